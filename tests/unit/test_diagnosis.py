"""Facts and diagnoses of runs that are made up, where the right answer is known."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.modes import parse_mode
from paceline.observe.analyse.diagnosis import LOSSES, Diagnosis, diagnose
from paceline.observe.analyse.facts import Facts, LinkFacts, ServerFacts, Times, WorkerFacts, facts_of
from paceline.observe.analyse.run_data import RunData
from paceline.observe.analyse.summary import diagnosis_of
from paceline.observe.record.phase import PHASES, Phase
from tests.synthetic_run import write_run


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
    assert "ssp gains nothing against a worker that is always slower" in found.sentence
    assert "or use asp, which does not wait for it, or ssp:2+batches=speed" in found.advice
    assert "ssp gains" not in diagnose(facts([*fast, slow]), "bsp").sentence


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
        assert all(getattr(found, name) >= 0 for name in ("computing", *LOSSES))


# --- a grid of runs: every mode, every cause ------------------------------------------------------------

MODES = (
    *("bsp", "bsp+period=4", "backup:1", "backup:2", "ssp:1", "ssp:2", "ssp:2+batches=speed", "ssp:4"),
    *("asp", "asp+damping=none", "asp+period=4", "downpour:4,4", "downpour", "easgd:4", "eamsgd:8"),
    *("local:4", "local:8", "diloco:8", "hogwild", "dogwild", "allreduce", "hybrid:bsp", "hybrid:asp"),
    *("hybrid:ssp:2", "sandblaster"),
)
# What to make of a run, and what its workers' time is lost to then.
CAUSES: dict[str, dict[str, Any]] = {
    "worker": {"ms": {Phase.WAIT: 0.1, Phase.PUSH: 0.1}, "slow": 1.0, "waits_for": "server"},
    "straggler": {"wait_ms": 25.0, "slow": 4.0},
    "unsteady": {"wait_ms": 25.0, "slow": 1.0},
    "data": {"ms": {Phase.LOAD: 30.0}, "slow": 1.0},
    "outside": {"ms": {Phase.OTHER: 60.0}, "slow": 1.0, "waits_for": "server"},
    "server": {"wait_ms": 30.0, "slow": 1.0, "waits_for": "server", "update_ms": 29.0},
    "network": {"ms": {Phase.PUSH: 30.0}, "slow": 1.0, "waits_for": "server"},
    "checkpoint": {"ms": {Phase.CHECKPOINT: 30.0}, "slow": 1.0},
}


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunData]:
    made = tmp_path_factory.mktemp("grid")
    runs = {}
    for cause, how in CAUSES.items():
        runs[cause] = RunData(write_run(made / cause, steps=30, with_resources=False, **how))
    return runs


@pytest.mark.parametrize("cause", CAUSES)
def test_the_largest_loss_is_named_and_another_mode_recommended(grid, cause):
    known = facts_of(grid[cause])
    for mode in MODES:
        found = diagnose(known, mode, cores=64)
        losses = {name: getattr(found, name) for name in LOSSES}
        assert found.limit == {"unsteady": "straggler", "outside": "worker"}.get(cause, cause), (mode, found)
        if found.limit == "worker":
            assert max(losses.values()) < 0.15
        else:
            assert losses[found.limit] == max(losses.values()) >= 0.15
            assert f"{100 * losses[found.limit]:.0f} %" in found.sentence
        assert abs(sum(losses.values()) + found.computing - 1) < 1e-6
        running = parse_mode(mode)
        for advised in found.modes:
            assert parse_mode(advised) != running, (mode, found)
            assert advised in found.advice
        # Whatever text the advice has, the running mode is named only as what to use something else for.
        assert f"{mode} instead" not in found.advice and f"use {mode} " not in found.advice
        assert found.text.endswith(".") and "  " not in found.text


@pytest.mark.parametrize("mode", ["asp", "downpour:4,4", "hogwild", "hybrid:asp"])
def test_where_nobody_waits_no_other_mode_waits_less(grid, mode):
    for cause in ("straggler", "unsteady"):
        found = diagnose(facts_of(grid[cause]), mode)
        assert not found.modes and "epochs" in found.advice


@pytest.mark.parametrize("mode", MODES)
def test_only_ssp_is_told_that_it_gains_nothing_against_a_permanent_straggler(grid, mode):
    assert ("ssp gains nothing" in diagnose(facts_of(grid["straggler"]), mode).sentence) is (
        mode.startswith("ssp")
    )
    assert "ssp gains nothing" not in diagnose(facts_of(grid["unsteady"]), mode).sentence


def test_a_script_that_is_outside_its_model_most_of_the_time_is_told_so(grid):
    assert "in the script outside the model" in diagnose(facts_of(grid["outside"]), "bsp").advice
    assert "outside the model" not in diagnose(facts_of(grid["worker"]), "bsp").advice


def test_what_is_in_use_is_not_recommended(grid):
    known = facts_of(grid["network"])
    for option in ("overlap", "compress", "prefetch"):
        assert f"--{option}" in diagnose(known, "asp").advice
        assert f"--{option}" not in diagnose(known, "asp", using={option}).advice
    assert diagnose(known, "hogwild", using={"overlap", "compress", "prefetch"}).advice.startswith("A faster")


def test_a_backup_worker_that_works_for_nothing_is_named(tmp_path: Path):
    """The slow one of three: 26 pushes, all of them too late."""
    header = "version,worker,incarnation,sequence,read_version,staleness,samples\n"

    def made(name: str, dropped: dict[int, int], late_applied: int, **how: Any) -> Diagnosis:
        path = write_run(tmp_path / name, steps=26, mode="backup:1", dropped=dropped, **how)
        rows = [f"{v},{w},0,{v},{v},0,8" for v in range(100) for w in (0, 1)]
        rows += [f"{v},2,0,{v},{v},0,8" for v in range(late_applied)]
        (path / "pushes.csv").write_text(header + "\n".join(rows) + "\n")
        return diagnosis_of(run := RunData(path), facts_of(run))

    quick = {"waits_for": "server", "wait_ms": 0.1, "slow": 4.0, "ms": {Phase.PUSH: 0.1, Phase.PULL: 0.1}}
    found = made("wasted", {2: 26}, 0, **quick)
    assert found.limit == "dropped" and found.dropped > 0.15, found
    assert "All 26 pushes of worker:2 were dropped." in found.sentence
    assert "worker:2" in found.advice and "asp uses what it computes" in found.advice
    assert "13 of 24 pushes of worker:2 were dropped." in made("some", {2: 13}, 11, **quick).text
    # Whatever else limits the run, that is said as well.
    assert "All 26 pushes of worker:2" in made("data", {2: 26}, 0, ms={Phase.LOAD: 90.0}).sentence
    assert "dropped" not in made("few", {2: 3}, 23, ms={Phase.LOAD: 90.0}).text


@pytest.mark.parametrize("cause", ["network", "straggler", "worker"])
def test_a_run_that_failed_is_said_to_have_failed_and_nothing_else(tmp_path: Path, cause: str):
    error = "worker:1: ValueError: no such label: 12\nTraceback (most recent call last):\n  File ..."
    run = RunData(write_run(tmp_path / "run", steps=20, state="failed", error=error, **CAUSES[cause]))
    found = diagnosis_of(run, facts_of(run))
    assert (found.limit, found.modes) == ("failure", ())
    assert found.text == "The run failed. worker:1: ValueError: no such label: 12"


def test_a_run_that_diverged_is_said_to_have_diverged(tmp_path: Path):
    run = RunData(write_run(tmp_path / "run", steps=20, diverged="The loss rose from 19 to 2.4e+33."))
    found = diagnosis_of(run, facts_of(run))
    assert (found.limit, found.text) == ("divergence", "The loss rose from 19 to 2.4e+33.")


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
