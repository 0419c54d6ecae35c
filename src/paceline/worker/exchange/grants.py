"""Leases that the lead has granted, and those that a worker asks for before it needs them."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.comm import Kind
from paceline.comm.worker_messages import GRANT, GrantReply, TakeMessage
from paceline.worker.exchange.pipeline import PipelinedExchange
from paceline.worker.exchange.sample_report import NOTHING_TO_REPORT, SampleReport
from paceline.worker.exchange.server_links import ServerLinks

__all__ = ["Grant", "LeasesAhead"]


@dataclass(frozen=True)
class Grant:
    """Leases: (id, ranges of positions). `over`: the epoch has no more."""

    leases: Sequence[tuple[int, list[tuple[int, int]]]]
    over: bool
    save: bool
    """The run wants this worker's part of a checkpoint."""

    @classmethod
    def of(cls, reply: GrantReply) -> "Grant":
        """From the lead's reply."""
        return cls(
            leases=[(lease, [*ranges]) for lease, ranges in reply.leases],
            over=reply.over,
            save=reply.save is not None,
        )


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
        self._unsaid = NOTHING_TO_REPORT
        """Goes with the next request."""

    def collect(self, epoch: int, *, wait: bool, report: SampleReport) -> tuple[Grant | None, list[int]]:
        """The next grant that was asked for ahead, if there is one; and granted leases that are of no use.

        Args:
            report: goes with the next request.
        """
        self._unsaid += report
        unused: list[int] = []
        while self._epochs:
            asked = self._epochs.popleft()
            frame = self._exchange.receive(self._links.lead, Kind.GRANT)
            grant = Grant.of(GRANT.read(frame.kind, frame.body))
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
            message = TakeMessage(epoch=epoch, limit=limit, wait=False)
            self.take_unsaid().complete(message)
            self._exchange.send(self._links.lead, message)

    def take_unsaid(self, more: SampleReport = NOTHING_TO_REPORT) -> SampleReport:
        """The report for the next message, with `more`."""
        unsaid, self._unsaid = self._unsaid + more, NOTHING_TO_REPORT
        return unsaid
