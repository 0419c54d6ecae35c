"""DeviceCarrier: gradients and parameters lie on a device that the worker and the server both use."""

import contextlib
import time
from collections.abc import Sequence

from torch import Tensor

from paceline.comm import Connection, Region
from paceline.comm.device import FLAGS_BYTES, DeviceBlock, FlagFence, Flags
from paceline.comm.fence import Fence
from paceline.comm.worker_messages import AdmitReply, AssignMessage, AttachedReply, LinkResumed, PushMessage
from paceline.exceptions import FrameError, LinkError
from paceline.ps.carriers.carrier import Attaching
from paceline.ps.contributions import Copy, Gradients
from paceline.ps.device_parameters import DeviceParameters
from paceline.ps.shard import Shard

__all__ = ["PUSHED", "REPLIED", "DeviceCarrier"]

PUSHED, REPLIED = 0, 1
"""Flags of a link: the worker raises one with every push, the server the other with every reply."""
_PATIENCE_S, _LOOK_S = 0.5, 0.0001
_NAN_BYTE = 0xFF
"""Numbers of any floating-point type that are made of it are NaN."""


class DeviceCarrier:
    """The server owns all memory, and tells the worker its handles. Messages bring numbers of the flags that
    the other side's device waits for; no CPU waits.

    Raises:
        FrameError: the worker did not send its flags along, or the parameters are not on a device.
        torch.OutOfMemoryError: the device has no room for the worker's gradients.
    """

    checked = False
    streams = False
    has_thread = False

    def __init__(self, attaching: Attaching) -> None:
        if attaching.on_device is None:
            raise FrameError("a worker that shares a device, and the parameters are in host memory")
        if len(attaching.descriptors) != 1:
            raise FrameError("a worker that shares a device attaches with its flags")
        self._connection = attaching.connection
        self._layout = attaching.layout
        self._memory: DeviceParameters = attaching.on_device
        region = Region.attach(attaching.descriptors.pop(), FLAGS_BYTES)
        self._flags: Flags = self._memory.device.flags(region)
        region.close_descriptor()
        self._slot: DeviceBlock = self._memory.take()
        self._copy: DeviceBlock | None = None
        self._shard = attaching.shard
        self.gradients = Gradients(self._slot.memory, self._layout, self._shard.slices)
        self.copy: Copy | None = None
        self._untold_copy: str | None = None
        """Handle of the copy's memory, until the worker has been told."""
        self._replies = self._pushes = 0
        self._closed = False
        self.read_in_place(attaching.in_place)

    def refit(self, shard: Shard) -> None:
        """See Carrier."""
        self._shard = shard
        self.gradients = Gradients(self._slot.memory, self._layout, shard.slices)
        if self.copy is not None and self._copy is not None:
            self.copy = shard.copy_in(self._copy.memory)

    def read_in_place(self, in_place: bool) -> None:
        """See Carrier. The copy's memory is taken when the mode first wants one."""
        if in_place:
            self.copy = None
            return
        if self._copy is None:
            self._copy = self._memory.take()
            self._untold_copy = self._copy.handle.hex()
        self.copy = self._shard.copy_in(self._copy.memory)

    def ready(self, message: PushMessage | AssignMessage) -> Fence | None:
        """See Carrier."""
        if message.fence is None:
            raise FrameError("a push to a device without the number of its flag")
        self._pushes = message.fence
        return FlagFence(self._flags, PUSHED, self._pushes)

    def pushed_parameters(self) -> Sequence[Tensor]:
        """See Carrier."""
        return self.gradients.flat

    def welcome(self, reply: AttachedReply, owned: Sequence[int]) -> None:
        """See Carrier."""
        reply.parameters, reply.gradients = self._memory.handle.hex(), self._slot.handle.hex()
        self._complete(reply)
        self._connection.tell(reply)
        self.end_reply()

    def begin_reply(self, reply: AdmitReply, *, fetch: bool) -> Sequence[Copy]:
        """See Carrier. The message overtakes the work, which the worker's device waits for: the server gives
        its work to the device while the worker prepares its next step."""
        self._complete(reply)
        with contextlib.suppress(LinkError):  # it died meanwhile; its link says so by itself
            self._connection.tell(reply)
        return (self.copy,) if fetch and self.copy is not None else ()

    def slice_ready(self, position: int) -> None:
        """See Carrier."""

    def end_reply(self) -> None:
        """See Carrier."""
        self._flags.raise_in_order(REPLIED, self._replies)

    def _complete(self, reply: AdmitReply | AttachedReply) -> None:
        """Add what the worker's device waits for from this message on. `end_reply` raises the flag."""
        self._replies += 1
        reply.fence = self._replies
        reply.copy, self._untold_copy = self._untold_copy, None

    def skip(self) -> None:
        """See Carrier."""

    def resume(self, connection: Connection, received: int) -> None:
        """See Carrier."""
        connection.tell(LinkResumed(self._connection.received))
        self._connection.go_on(connection, received)

    def release(self) -> None:
        """See Carrier. A gradient that the worker's device has not written whole is refused: it is made NaN
        before the server's device, which waits for it, gets to it."""
        if not self._closed and not self._flags.raised(PUSHED, self._pushes):
            with self._memory.device.queue() as queue:
                self._slot.memory.fill_(_NAN_BYTE)
                mark = queue.mark()
            # A GPU may put both queues into one, where this one waits for the flag, too: do not insist.
            until = time.monotonic() + _PATIENCE_S
            while not mark.reached() and time.monotonic() < until:
                time.sleep(_LOOK_S)
        self._flags.release(PUSHED)

    def close(self) -> None:
        """See Carrier."""
        self._connection.close()
        self.release()
        if not self._closed:
            self._closed = True
            self._memory.give_back(self._slot)
            if self._copy is not None:
                self._memory.give_back(self._copy)
