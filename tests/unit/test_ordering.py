"""Whom the lead server answers when leases are there again."""

from types import SimpleNamespace
from typing import Any

from paceline.data.leases import Lease
from paceline.ps.lead import Lead, Steps
from paceline.ps.ordering import Ordering
from paceline.ps.peers import WorkerPeer
from tests.unit.test_lead import lead_of


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
