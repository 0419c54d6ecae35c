"""Whom the lead server answers when leases are there again, and the record that it takes over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.data.leases import Lease
from paceline.ps.lead import Lead, Steps
from paceline.ps.ordering import Ordering, append_pushes, open_pushes
from paceline.ps.peers import WorkerPeer
from tests.unit.test_lead import Worker, lead_of


class Server(Ordering):
    """Orders for a Lead with worker 0, which holds every lease, and worker 1, which waits for some."""

    def __init__(self, lead: Lead) -> None:
        self.config: Any = SimpleNamespace(replicas=1)
        self._begin_ordering(lead, adoption=None, gate=None)  # type: ignore[arg-type]
        self._peers: Any = {1: 1}
        self.granted: list[int] = []

    def _order(self, steps: Steps) -> None:
        pass

    def _grant(self, peer: WorkerPeer, leases: tuple[Lease, ...], *, over: bool) -> None:
        self.granted.append(sum(lease.samples for lease in leases))


def parked() -> Lead:
    lead = lead_of("asp", samples=4)
    lead.replay(["take", 0, 0, 8, False, 1])
    leases, _ = lead.replay(["take", 1, 0, 8, True, 5])
    assert leases is None and lead.parks
    return lead


def test_who_waits_here_is_answered_when_another_worker_leaves() -> None:
    server = Server(parked())
    server._taking.add(1)
    server._act(server._do("leave", 0, 0, False))
    assert server.granted == [4]


def test_who_asked_the_lead_before_is_answered_when_it_asks_again() -> None:
    """It does not read answers to what it has not asked here."""
    server = Server(parked())
    server._act(server._do("leave", 0, 0, False))
    assert server.granted == []
    number, leases, _ = server._lead.grants[1]
    assert number == 5 and sum(lease.samples for lease in leases) == 4


@pytest.mark.parametrize("written", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("torn", [b"", b"5,0,0"])
def test_a_lead_in_another_ones_place_goes_on_with_its_record(
    tmp_path: Path, written: int, torn: bytes
) -> None:
    """The one before had written fewer rows than it told us of, or more, and may have died within one."""
    lead = lead_of("asp", workers=1)
    worker = Worker(lead, 0)
    for _ in range(4):
        worker.take()
        worker.push()
    record = tmp_path / "pushes.csv"
    with open_pushes(record, 0) as file:
        file.write(b"".join(b"%d,row\n" % (i + 1) for i in range(written)) + torn)
    with append_pushes(record, lead) as file:
        kept = min(written, 4)
        assert len(lead.applied) == 4 - kept
        file.write(b"next\n")
    rows = record.read_text().splitlines()[1:]
    assert rows == [*(f"{i + 1},row" for i in range(kept)), "next"]
