"""A run's status from what its workers count themselves: steps, times and bytes."""

from collections.abc import Mapping

from paceline.observe.record.ledger import Ledger, Ledgers, together
from paceline.observe.record.status import RunStatus, WorkerStatus

__all__ = ["enter_ledgers", "go_on_from", "resumed"]

_COUNTS = ("steps", "moved_out", "moved_in", "wire_out", "wire_in")
"""Fields of a ledger that go on over a resume."""


def enter_ledgers(status: RunStatus, ledgers: Ledgers, start_ns: int) -> None:
    """Bring a status up to date with what its workers count themselves.

    Args:
        start_ns: Unix time of this start of the run, where its `elapsed_s` is 0.
    """
    for rank, worker in status.workers.items():
        _enter(worker, together([_ledger(worker.earlier), ledgers.of(rank)]))
    whole = together(ledgers.each)
    if whole.began_ns and whole.ended_ns:
        status.startup_s = max(0.0, (whole.began_ns - start_ns) / 1e9)
        status.ended_s = (whole.ended_ns - start_ns) / 1e9
        status.first_step_s = max(each.first_step_extra_s for each in ledgers.each)


def resumed(before: RunStatus, left: Ledgers) -> RunStatus:
    """The first status of a run that is resumed: what its earlier starts did counts on.

    Args:
        before: the last status of the start before.
        left: ledgers that it left behind; if it ended in order, it has entered them and removed the files.
    """
    status = RunStatus(run_id=before.run_id, run_dir=before.run_dir)
    status.earlier_s = before.earlier_s
    if left.each:
        status.earlier_s += together(left.each).seconds
    elif before.ended_s:  # else it is of an older version: nobody knows
        status.earlier_s += before.pace.seconds
    for rank in sorted(left.ranks | before.workers.keys()):
        known = before.workers.get(rank, WorkerStatus(rank=rank))
        counts = _ledger(known.earlier)
        if rank in left.ranks:
            counts = together([counts, left.of(rank)])
        elif not left.each:
            counts = Ledger(
                steps=known.clock,
                moved_out=known.moved_out,
                moved_in=known.moved_in,
                wire_out=known.bytes_out,
                wire_in=known.bytes_in,
            )
        status.workers[rank] = worker = WorkerStatus(rank=rank)
        worker.earlier = {name: getattr(counts, name) for name in _COUNTS}
        _enter(worker, counts)
    return status


def go_on_from(status: RunStatus, first: RunStatus) -> None:
    """Take over the counts of earlier starts from `resumed`."""
    status.earlier_s = first.earlier_s
    for rank, worker in status.workers.items():
        if rank in first.workers:
            worker.earlier = first.workers[rank].earlier
            _enter(worker, _ledger(worker.earlier))
    status.steps_before = status.steps


def _enter(worker: WorkerStatus, counts: Ledger) -> None:
    worker.clock = counts.steps
    worker.moved_out, worker.moved_in = counts.moved_out, counts.moved_in
    worker.bytes_out, worker.bytes_in = counts.wire_out, counts.wire_in


def _ledger(earlier: Mapping[str, int]) -> Ledger:
    return Ledger(**{name: int(earlier.get(name, 0)) for name in _COUNTS})
