"""Whom the lead server answers when leases are there again, and the record that it takes over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.decider import Decider
from paceline.core.events import Leave
from paceline.core.leases import Lease
from paceline.core.steps import Steps
from paceline.core.totals import Applied
from paceline.observe.record.thinning import Thinning
from paceline.ps.ordering import Ordering
from paceline.ps.peers import WorkerPeer
from paceline.ps.push_record import PushRecord, open_pushes
from tests.deciding import replay
from tests.unit.test_lead import Worker, lead_of

ALL = Thinning(1_000)


class Server(Ordering):
    """Orders for a decider with worker 0, which holds every lease, and worker 1, which waits for some."""

    def __init__(self, lead: Decider) -> None:
        self.config: Any = SimpleNamespace(replicas=1, records_mb=1, clip_norm=None)
        self._begin_ordering(lead, adoption=None, gate=None)  # type: ignore[arg-type]
        self._executor: Any = SimpleNamespace(peers={1: 1})
        self._record: Any = SimpleNamespace(pending=[])
        self.granted: list[int] = []

    def _order(self, steps: Steps) -> None:
        pass

    def _grant(self, peer: WorkerPeer, leases: tuple[Lease, ...], *, over: bool) -> None:
        self.granted.append(sum(lease.samples for lease in leases))


def parked() -> Decider:
    lead = lead_of("asp", samples=4).decider
    replay(lead, ["take", 0, 0, 8, False, 1])
    leases, _ = replay(lead, ["take", 1, 0, 8, True, 5])
    assert leases is None and lead.parks
    return lead


def test_who_waits_here_is_answered_when_another_worker_leaves() -> None:
    server = Server(parked())
    server._taking.add(1)
    server._act(server._do(Leave(0, 0, False)).steps)
    assert server.granted == [4]


def test_who_asked_the_lead_before_is_answered_when_it_asks_again() -> None:
    """It does not read answers to what it has not asked here."""
    server = Server(parked())
    server._act(server._do(Leave(0, 0, False)).steps)
    assert server.granted == []
    number, leases, _ = server._decider.roster.grants[1]
    assert number == 5 and sum(lease.samples for lease in leases) == 4


@pytest.mark.parametrize("written", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("torn", [b"", b"5,0,0"])
def test_a_lead_in_another_ones_place_goes_on_with_its_record(
    tmp_path: Path, written: int, torn: bytes
) -> None:
    """The one before had written fewer rows than it told us of, or more, and may have died within one."""
    lead = lead_of("asp", workers=1).decider
    worker = Worker(lead, 0)
    for _ in range(4):
        worker.take()
        worker.push()
    record = tmp_path / "pushes.csv"
    with open_pushes(record, 0, ALL) as file:
        file.write(b"".join(b"%d,row\n" % (i + 1) for i in range(written)) + torn)
    taken = PushRecord.take_over(record, 4, lead.pushes.applied, ALL)
    kept = min(written, 4)
    assert len(taken.pending) == 4 - kept
    taken.close()
    with record.open("ab") as file:
        file.write(b"next\n")
    rows = record.read_text().splitlines()[1:]
    assert rows == [*(f"{i + 1},row" for i in range(kept)), "next"]


@pytest.mark.parametrize("told", range(0, 31, 3))
def test_a_lead_goes_on_with_a_thinned_record_as_if_it_had_written_all_of_it(
    tmp_path: Path, told: int
) -> None:
    """The one before wrote its first `told` pushes; this one knows the last 20 of 30."""

    def push(lead: Decider, count: int) -> list[Applied]:
        worker = Worker(lead, 0)  # type: ignore[arg-type]
        worker.sequence = lead.totals.pushes
        lead.pushes.applied.clear()
        for _ in range(count):
            worker.take()
            worker.push()
        return [*lead.pushes.applied]

    few = Thinning(12)

    def write(path: Path, *, first: int, remembered: int) -> list[str]:
        lead = lead_of("asp", samples=400, workers=1).decider
        record = PushRecord.begin(path, 0, few)
        early = push(lead, first)
        record.pending += early
        record.write(lead.totals.pushes)
        late = push(lead, 30 - first)
        if first < 30:
            record.close()
            record = PushRecord.take_over(path, 30, late[-remembered:], few)
        record.write(lead.totals.pushes)
        record.close()
        return path.read_text().splitlines()[1:]

    whole = write(tmp_path / "a.csv", first=30, remembered=30)
    assert len(whole) == few.rows_of(30) == 9
    assert write(tmp_path / "b.csv", first=told, remembered=30) == whole
    with open_pushes(tmp_path / "b.csv", 10, few):
        pass
    assert (tmp_path / "b.csv").read_text().splitlines()[1:] == whole[: few.rows_of(10)]
