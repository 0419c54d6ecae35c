"""Samples and steps a second: one definition, from the first step's begin to the last step's end."""

from pathlib import Path
from time import perf_counter_ns

import numpy as np
import pytest

from paceline.collective import ring_bytes, shared_bytes
from paceline.observe import RunStatus, WorkerStatus
from paceline.observe.analyse.curves import _going_on
from paceline.observe.record.counting import enter_ledgers, go_on_from, resumed
from paceline.observe.record.ledger import Ledger, LedgerKeeper, Ledgers, together
from paceline.observe.record.pace import pace_of

S = 10**9


def ledger(steps: int, began: float, first: float, ended: float, **more: int) -> Ledger:
    return Ledger(steps, round(began * S), round(first * S), round(ended * S), **more)


def ledgers(directory: Path, *told: tuple[int, int, Ledger]) -> Ledgers:
    found = Ledgers(directory)
    for rank, incarnation, each in told:
        keeper = LedgerKeeper(None, rank, incarnation)
        keeper.ledger = each
        found.hear(rank, keeper.told())
    return found


def status(**settings: object) -> RunStatus:
    workers = {rank: WorkerStatus(rank=rank) for rank in (0, 1)}
    return RunStatus(**{"state": "running", "workers": workers, "told_all": True, **settings})


def test_from_the_first_begin_to_the_last_end(tmp_path: Path) -> None:
    now = status(elapsed_s=30.0, samples=800)
    enter_ledgers(
        now, ledgers(tmp_path, (0, 0, ledger(40, 12, 13, 20)), (1, 0, ledger(10, 14, 15, 22))), 10 * S
    )
    assert (now.startup_s, now.ended_s) == (2.0, 12.0)
    assert (now.samples_per_s, now.steps_per_s) == (80.0, 5.0), "neither start-up nor the end counts"
    assert [worker.clock for worker in now.workers.values()] == [40, 10]


def test_a_mode_that_exchanges_rarely_is_not_faster(tmp_path: Path) -> None:
    """Samples are told when they are applied: after 16 steps, say. The clock does not begin only then."""
    now = status(elapsed_s=30.0, samples=320, version=1)
    enter_ledgers(now, ledgers(tmp_path, (0, 0, ledger(16, 10, 11, 26))), 10 * S)
    assert now.samples_per_s == 20.0


def test_while_it_goes_on_samples_go_with_the_time_that_they_were_told_at(tmp_path: Path) -> None:
    now = status(elapsed_s=30.0, samples=400, told_all=False, progressed_s=10.0)
    enter_ledgers(now, ledgers(tmp_path, (0, 0, ledger(16, 10, 11, 30))), 10 * S)
    assert now.samples_per_s == 40.0 and now.steps_per_s == 0.8
    now.told_all = True
    assert now.samples_per_s == 20.0


def test_a_first_step_that_compiles_is_shown_apart(tmp_path: Path) -> None:
    assert ledger(11, 0, 7, 17).first_step_extra_s == 6.0
    assert ledger(1, 0, 7, 7).first_step_extra_s == ledger(3, 0, 1, 5).first_step_extra_s == 0.0
    now = status(samples=110)
    enter_ledgers(now, ledgers(tmp_path, (0, 0, ledger(11, 1, 8, 18)), (1, 0, ledger(11, 1, 6, 18))), S)
    assert now.first_step_s == 6.0


def test_a_replaced_worker_goes_on_counting(tmp_path: Path) -> None:
    found = ledgers(
        tmp_path, (1, 0, ledger(30, 1, 2, 9, moved_out=300)), (1, 1, ledger(12, 15, 16, 20, moved_out=120))
    )
    now = status()
    enter_ledgers(now, found, 0)
    assert (now.workers[1].clock, now.workers[1].moved_out, now.ended_s) == (42, 420, 20.0)
    found.hear(1, LedgerKeeper(None, 1, 1).told())
    assert found.of(1).steps == 42, "an older report than the file"


@pytest.mark.parametrize("in_order", [True, False])
def test_a_resumed_run(tmp_path: Path, in_order: bool) -> None:
    """Whether the start before ended in order, or everything was killed and left its files."""
    before = status(samples=500)
    left = ledgers(tmp_path, (0, 0, ledger(30, 2, 3, 12, moved_out=3)), (1, 0, ledger(20, 2, 3, 12)))
    enter_ledgers(before, left, 0)
    again = status(samples=450, samples_before=450)
    go_on_from(again, resumed(before, Ledgers(tmp_path) if in_order else left))
    assert (again.steps, again.steps_before, again.steps_per_s) == (50, 50, 0)
    again.samples = 650
    enter_ledgers(again, ledgers(tmp_path, (0, 0, ledger(4, 101, 102, 105)), (1, 0, Ledger())), 100 * S)
    assert (again.steps, again.workers[0].clock, again.workers[0].moved_out) == (54, 34, 3)
    assert (again.samples_per_s, again.steps_per_s) == (50.0, 1.0)
    total = pace_of(again, total=True)
    assert (total.samples, total.seconds, total.steps) == (650, 14.0, 54)


def test_a_run_of_an_older_version() -> None:
    old = RunStatus(state="succeeded", elapsed_s=12.0, startup_s=2.0, samples=100)
    assert old.samples_per_s == 10.0
    new = status()
    go_on_from(new, resumed(old, Ledgers(Path("/nowhere"))))
    assert new.earlier_s == 0.0, "how long it trained is not known"


# --- the worker's side -------------------------------------------------------------------------------------


def test_what_a_killed_worker_leaves(tmp_path: Path) -> None:
    keeper = LedgerKeeper(tmp_path / "raw", 2, 1)
    keeper.joined()
    keeper.draws()
    keeper.got_batch()
    for _ in range(3):
        keeper.moved(10, 20)
        keeper.stepped()
    found = Ledgers(tmp_path / "raw")
    found.read()
    left = found.of(2)
    assert left == keeper.ledger and (left.steps, left.moved_out, left.moved_in) == (3, 30, 60)
    assert 0 < left.began_ns < left.first_ns < left.ended_ns
    keeper.close()
    found.remove()
    assert not (tmp_path / "raw").exists()


def test_the_first_step_begins_with_its_batch() -> None:
    """Neither an epoch that is over nor a look at a batch is the beginning."""
    keeper = LedgerKeeper()
    keeper.joined()
    joined = perf_counter_ns()
    keeper.draws()
    keeper.drew_nothing()
    keeper.draws()
    keeper.got_batch()
    looked = keeper.ledger.began_ns
    keeper.peeked()
    assert keeper.ledger.began_ns == 0
    keeper.draws()
    keeper.draws()
    keeper.got_batch()
    assert joined < looked < keeper.ledger.began_ns
    keeper.stepped()
    began = keeper.ledger.began_ns
    keeper.draws()
    keeper.got_batch()
    keeper.peeked()
    assert keeper.ledger.began_ns == began


def test_without_a_loader_it_begins_where_prepare_returns() -> None:
    keeper = LedgerKeeper()
    before = perf_counter_ns()
    keeper.joined()
    after = perf_counter_ns()
    keeper.stepped()
    assert before <= keeper.ledger.began_ns <= after


def test_a_disk_that_is_gone_costs_nothing_but_the_file(tmp_path: Path) -> None:
    (tmp_path / "raw").write_text("not a directory")
    keeper = LedgerKeeper(tmp_path / "raw", 0, 0)
    keeper.stepped()
    assert keeper.told()[1] == 1
    keeper.close()


def test_torn_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "worker-0.0.ledger").write_bytes(b"\1\2\3")
    (tmp_path / "worker-0.0.spans").write_bytes(b"")
    found = Ledgers(tmp_path)
    found.read()
    assert found.each == [] and together([]) == Ledger()


# --- bytes -------------------------------------------------------------------------------------------------


def test_bytes_within_a_group() -> None:
    assert [ring_bytes(1200, members) for members in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]
    assert ring_bytes(10, 3) == 13, "rounded down"
    assert shared_bytes(100, 4, root=True) == (300, 0) and shared_bytes(100, 4, root=False) == (0, 100)


def test_the_curve_goes_on_when_a_worker_is_replaced() -> None:
    assert _going_on(np.array([3.0, 8.0, 8.0, 2.0, 4.0])).tolist() == [3.0, 8.0, 8.0, 10.0, 12.0]
