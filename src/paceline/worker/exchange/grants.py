"""Leases that the lead has granted, and those that a worker asks for before it needs them."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.comm import Kind
from paceline.comm.frames import field
from paceline.worker.exchange.pipeline import PipelinedExchange
from paceline.worker.exchange.server_links import Body, ServerLinks

__all__ = ["Grant", "LeasesAhead"]


@dataclass(frozen=True)
class Grant:
    """Leases: (id, ranges of positions). `over`: the epoch has no more."""

    leases: Sequence[tuple[int, list[tuple[int, int]]]]
    over: bool
    save: bool
    """The run wants this worker's part of a checkpoint."""

    @classmethod
    def of(cls, body: Body) -> "Grant":
        """From the body of a GRANT."""
        leases = [(int(i), [(int(a), int(b)) for a, b in ranges]) for i, ranges in body["leases"]]
        return cls(leases=leases, over=field(body, "over", bool), save="save" in body)


class LeasesAhead:
    """Asks for the next leases when the last ones are handed out.

    So they are there when a reply would be, and towards an epoch's end they are few: as many requests are on
    their way as `prefetch` steps will need.
    """

    def __init__(self, exchange: PipelinedExchange, links: ServerLinks, prefetch: int) -> None:
        self._exchange = exchange
        self._links = links
        self._prefetch = prefetch
        self._epochs: collections.deque[int] = collections.deque()
        """Epochs of the leases that are asked for already."""
        self._unsaid: Body = {}
        """Fields that go with the next request: batches that were skipped."""

    def collect(self, epoch: int, *, wait: bool, more: Body) -> tuple[Grant | None, list[int]]:
        """The next grant that was asked for ahead, if there is one; and granted leases that are of no use.

        Args:
            more: fields that go with the next request.
        """
        self._unsaid = _together(self._unsaid, more)
        unused: list[int] = []
        while self._epochs:
            asked = self._epochs.popleft()
            grant = Grant.of(self._exchange.receive(self._links.lead, Kind.GRANT).body)
            if asked == epoch and (grant.leases or not wait):
                return grant, unused
            unused += [lease for lease, _ in grant.leases]
        return None, unused

    def ask(self, epoch: int, limit: int, grant: Grant) -> None:
        """Ask for what comes after this grant."""
        if not grant.leases or grant.over:
            return
        for _ in range(len(self._epochs), -(-(self._prefetch + 1) // len(grant.leases))):
            self._epochs.append(epoch)
            body = {"epoch": epoch, "limit": limit, "wait": False, **self.take_unsaid()}
            self._exchange.send(self._links.lead, Kind.TAKE, body)

    def take_unsaid(self, more: Body | None = None) -> Body:
        """Fields for the next message, with those in `more`."""
        unsaid, self._unsaid = _together(self._unsaid, more or {}), {}
        return unsaid


def _together(one: Body, other: Body) -> Body:
    """Lists and numbers of two messages, added up."""
    return {k: one[k] + other[k] if k in one and k in other else (one | other)[k] for k in one | other}
