"""MirroredCarrier: memory of the host that a worker shares; its device copies from and to it by itself."""

import contextlib
from collections.abc import Sequence

from paceline.comm import Region
from paceline.comm.device import FlagWords, flags_bytes
from paceline.comm.worker_messages import AdmitReply, AttachedReply
from paceline.exceptions import LinkError
from paceline.ps.carriers.carrier import Attaching
from paceline.ps.carriers.shared_carrier import SharedCarrier
from paceline.ps.contributions import Copy
from paceline.ps.shard import Shard

__all__ = ["MirroredCarrier"]


class MirroredCarrier(SharedCarrier):
    """A SharedCarrier that answers before it works, and raises a flag for each slice that is done. The
    worker's device waits for the flag, takes the slice, and may write the next gradient there."""

    streams = True
    descriptors = 2

    def __init__(self, attaching: Attaching) -> None:
        super().__init__(attaching)
        self._shard = attaching.shard
        size = flags_bytes(len(attaching.layout.slices))
        self._words = FlagWords(Region.attach(attaching.descriptors.pop(0), size))
        self._replies = 0

    def welcome(self, reply: AttachedReply, owned: Sequence[int]) -> None:
        """See Carrier."""
        reply.fence = self._replies
        super().welcome(reply, owned)

    def begin_reply(self, reply: AdmitReply, *, fetch: bool) -> Sequence[Copy]:
        """See Carrier."""
        self._replies += 1
        reply.fence = self._replies
        with contextlib.suppress(LinkError):  # it died meanwhile; its link says so by itself
            self._connection.tell(reply)
        return (self.copy,) if fetch and self.copy is not None else ()

    def slice_ready(self, position: int) -> None:
        """See Carrier."""
        self._words.raise_now(self._shard.slices[position].index, self._replies)

    def end_reply(self) -> None:
        """See Carrier."""
        for piece in self._shard.slices:
            self._words.raise_now(piece.index, self._replies)

    def refit(self, shard: Shard) -> None:
        """See Carrier."""
        super().refit(shard)
        self._shard = shard

    def close(self) -> None:
        """See Carrier."""
        super().close()
        self._words.region.close()
