"""SharedCarrier: gradients and parameters lie in memory that a worker on this host shares with the server."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm import Connection, Region
from paceline.comm.fence import Fence
from paceline.comm.worker_messages import AdmitReply, AssignMessage, AttachedReply, LinkResumed, PushMessage
from paceline.exceptions import FrameError
from paceline.ps.carriers.carrier import Attaching
from paceline.ps.contributions import Copy, Gradients
from paceline.ps.shard import Shard

__all__ = ["SharedCarrier"]


class SharedCarrier:
    """The worker's region holds its gradients and, behind them, its copy of the parameters.

    Raises:
        FrameError: the worker did not send its memory along.
    """

    checked = True
    streams = False
    has_thread = False
    descriptors = 1
    """How many the worker sends along: of its memory, first."""

    def __init__(self, attaching: Attaching) -> None:
        self._connection = attaching.connection
        self._layout = attaching.layout
        if len(attaching.descriptors) != self.descriptors:
            raise FrameError("a worker on this host attaches with its memory")
        self._may_share = attaching.message.in_place
        self._region = Region.attach(attaching.descriptors.pop(0), 2 * self._layout.nbytes)
        self._reply = AdmitReply(version=0)
        self.gradients, self._own_copy = self._fit(attaching.shard)
        self.copy: Copy | None = self._own_copy
        self.read_in_place(attaching.in_place)

    def _fit(self, shard: Shard) -> tuple[Gradients, Copy]:
        memory = torch.frombuffer(self._region.buffer, dtype=torch.uint8)
        gradients = Gradients(memory[: self._layout.nbytes], self._layout, shard.slices)
        return gradients, shard.copy_in(memory[self._layout.nbytes :])

    def refit(self, shard: Shard) -> None:
        """See Carrier."""
        self.gradients, self._own_copy = self._fit(shard)
        if self.copy is not None:
            self.copy = self._own_copy

    def read_in_place(self, in_place: bool) -> None:
        """See Carrier. A worker whose model is on a GPU cannot read the server's memory."""
        self.copy = None if in_place and self._may_share else self._own_copy

    def ready(self, message: PushMessage | AssignMessage) -> Fence | None:
        """See Carrier."""
        return None

    def pushed_parameters(self) -> Sequence[Tensor]:
        """See Carrier."""
        return [each for each in self._own_copy if each is not None]

    def welcome(self, reply: AttachedReply, owned: Sequence[int]) -> None:
        """See Carrier."""
        self._connection.tell(reply)

    def begin_reply(self, reply: AdmitReply, *, fetch: bool) -> Sequence[Copy]:
        """See Carrier."""
        self._reply = reply
        return (self.copy,) if fetch and self.copy is not None else ()

    def slice_ready(self, position: int) -> None:
        """See Carrier."""

    def end_reply(self) -> None:
        """See Carrier."""
        self._connection.tell(self._reply)

    def skip(self) -> None:
        """See Carrier."""

    def resume(self, connection: Connection, received: int) -> None:
        """See Carrier."""
        connection.tell(LinkResumed(self._connection.received))
        self._connection.go_on(connection, received)

    def release(self) -> None:
        """See Carrier."""

    def close(self) -> None:
        """See Carrier."""
        self._connection.close()
        self._region.close()
