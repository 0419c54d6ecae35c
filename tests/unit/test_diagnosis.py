"""Facts and diagnoses of runs that are made up, where the right answer is known."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.diagnosis import diagnose
from paceline.observe.facts import Facts, LinkFacts, ServerFacts, Times, WorkerFacts, facts_of
from paceline.observe.phases import PHASES
from paceline.observe.run_data import RunData


def worker(
    rank: int, *, steps: int = 100, on: dict[int, float] | None = None, **seconds: float
) -> WorkerFacts:
    made = WorkerFacts(rank, steps=steps, seconds=seconds, blocked_on=on or {})
    waited = seconds.get("wait", 0.0) + seconds.get("pull", 0.0)
    made.busy = (sum(seconds.values()) - waited) / steps
    return made


def facts(workers: Sequence[WorkerFacts], *, update_s: float = 0.1, updates: int = 100) -> Facts:
    made = Facts(workers=list(workers), seconds=max(w.total_s for w in workers), writes=100 * len(workers))
    made.servers = [ServerFacts(0, updates, update_s, Times(updates, update_s / updates))]
    return made


def test_computing_is_the_workers():
    found = diagnose(facts([worker(i, forward=4.0, backward=5.0, wait=0.5) for i in range(4)]), cores=2)
    assert found.limit == "worker"
    assert "95 %" in found.sentence and "2 cores are taken" in found.advice


def test_a_slow_worker_is_named_with_what_it_is_slow_at():
    fast = [worker(i, forward=2.0, load=0.1, wait=6.0, on={2: 5.8}) for i in (0, 1)]
    slow = worker(2, forward=2.0, load=6.0, wait=0.1)
    found = diagnose(facts([*fast, slow]), "ssp:2")
    assert found.limit == "straggler"
    assert "worker:2 takes 3.8 times as long" in found.sentence
    assert "loading data" in found.sentence
    assert found.advice.endswith("asp instead of ssp:2.")


def test_workers_that_wait_for_each_other_have_no_straggler_to_blame():
    all_ = [worker(i, forward=4.0, wait=3.0, on={(i + 1) % 3: 1.6, (i + 2) % 3: 1.2}) for i in range(3)]
    found = diagnose(facts(all_))
    assert found.limit == "straggler" and "their steps vary" in found.sentence


def test_a_server_that_takes_long_for_an_update():
    found = diagnose(facts([worker(i, forward=4.0, wait=6.0) for i in range(2)], update_s=5.5))
    assert found.limit == "server" and "55 ms for each" in found.sentence


def test_a_busy_server_makes_pushes_queue():
    """In asp every push is an update: ten workers of one server wait for each other's."""
    made = facts([worker(i, forward=1.0, wait=9.0) for i in range(10)], update_s=9.5, updates=1000)
    assert diagnose(made, "asp").limit == "server"


def test_a_link_that_takes_long():
    made = facts([worker(i, forward=4.0, push=1.0, pull=1.0, wait=3.0) for i in range(2)])
    assert "processes wait for a core" in diagnose(made, "asp").sentence  # nothing travelled
    made.links = [LinkFacts(0, 0, 5_000_000, 5_000_000)]
    found = diagnose(made, "asp")
    assert found.limit == "network" and "10 MB" in found.sentence and "--prefetch" in found.advice
    assert "--prefetch" not in diagnose(made, "bsp").advice


def test_data_that_takes_long():
    assert diagnose(facts([worker(0, load=5.0, forward=5.0)])).limit == "data"


def test_nothing_known_is_said_to_be_so():
    assert diagnose(Facts()).limit == "unknown"
    assert "--no-spans" in diagnose(Facts(workers=[WorkerFacts(0)])).advice


seconds = st.floats(0, 1e6, allow_nan=False)


@given(
    st.lists(st.dictionaries(st.sampled_from(PHASES[:-1]), seconds), min_size=1, max_size=5),
    seconds,
    st.integers(0, 10**6),
    st.dictionaries(st.integers(0, 4), seconds, max_size=3),
)
def test_shares_are_shares_whatever_was_measured(spent, update_s, updates, on):
    made = Facts(
        workers=[worker(i, on=on, **each) for i, each in enumerate(spent)], seconds=1.0, writes=updates
    )
    made.servers = [ServerFacts(0, updates, update_s)]
    found = diagnose(made)
    assert found.text.strip()
    if found.limit != "unknown":
        assert all(share >= 0 for share in (found.computing, found.data, found.network))


# --- facts of tables ------------------------------------------------------------------------------------


def test_an_empty_run_has_empty_facts(tmp_path: Path):
    made = facts_of(RunData(tmp_path))
    assert made == Facts()
    assert made.idleness == made.computation == made.communication == made.blocked == 0.0
    assert made.straggler is None


def test_pushes_that_were_cut_short_are_left_out(tmp_path: Path):
    header = "version,worker,incarnation,sequence,read_version,staleness,samples\n"
    (tmp_path / "pushes.csv").write_text(header + "1,0,0,0,0,0,8\n2,1,0,0,0,1,8\n3,0,0,1,1,1,")
    made = facts_of(RunData(tmp_path))
    assert (made.writes, made.samples, dict(made.staleness)) == (2, 16, {0: 1, 1: 1})


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "version,worker\nx,y\n", "\x00\xff"])
def test_pushes_that_cannot_be_understood_are_named(tmp_path: Path, text: str):
    (tmp_path / "pushes.csv").write_text(text)
    run = RunData(tmp_path)
    assert facts_of(run).writes == 0
    assert any(m.startswith("pushes.csv") for m in run.missing)


def test_times_of_nothing_and_of_one():
    assert Times.of(np.array([], np.int64)) == Times()
    assert Times.of(np.array([2_000_000_000])) == Times(1, 2.0, 2.0, 2.0)
