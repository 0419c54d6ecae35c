"""Carrier: how the payloads of one worker's link reach a server, and how parameters reach the worker."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.comm import Connection, Frame
from paceline.comm.fence import Fence
from paceline.comm.transfer import Transfer
from paceline.comm.worker_messages import (
    AdmitReply,
    AssignMessage,
    AttachedReply,
    AttachMessage,
    PushMessage,
)
from paceline.observe.record.spans import Recorder
from paceline.params import Layout
from paceline.ps.carriers.link_thread import LinkThread
from paceline.ps.contributions import Copy, Gradients
from paceline.ps.device_parameters import DeviceParameters
from paceline.ps.shard import Shard

__all__ = ["Attaching", "Carrier"]


class Carrier(Protocol):
    """The server's end of one link's payloads. Only the server's main thread calls it.

    A push lies in `gradients` when the fence of its message (`ready`) is reached. A reply is a call of
    `begin_reply`, one of `slice_ready` for each owned slice, in any order, and one of `end_reply`. The worker
    may write over its gradients only after that.
    """

    gradients: Gradients
    """What the worker pushed last."""
    copy: Copy | None
    """The worker's parameters, which the server refreshes. None: the worker reads the server's own memory, or
    is sent it."""
    checked: bool
    """Whether the worker looks for NaN and Inf in the very memory that the server reads."""
    streams: bool
    """Whether slices of a reply leave one by one: `slice_ready` must be called."""
    has_thread: bool
    """Whether a thread of its own reads the link. Otherwise the server's hub reads it."""

    def ready(self, message: PushMessage | AssignMessage) -> Fence | None:
        """When the push of this message is in `gradients`. None: it is there when its message is.

        Raises:
            FrameError: the message does not say what it should.
        """
        ...

    def pushed_parameters(self) -> Sequence[Tensor]:
        """Slice by slice, the parameters that the last push brought instead of a gradient."""
        ...

    def welcome(self, reply: AttachedReply, owned: Sequence[int]) -> None:
        """Answer the worker's ATTACH, with the parameters.

        Args:
            reply: the carrier adds its own fields.
            owned: indices of the slices that this server answers for.
        """
        ...

    def begin_reply(self, reply: AdmitReply, *, fetch: bool) -> Sequence[Copy]:
        """The worker may go on. Returns the copies to refresh before `end_reply`.

        Args:
            reply: the carrier adds its own fields before it sends it.
            fetch: whether the worker gets fresh parameters with it.
        """
        ...

    def slice_ready(self, position: int) -> None:
        """The slice at this position of the shard is updated and copied. From any thread."""
        ...

    def end_reply(self) -> None:
        """All work on the shard is done, or on its way to be done in order.

        Raises:
            LinkError: the link is broken.
        """
        ...

    def read_in_place(self, in_place: bool) -> None:
        """Whether the mode lets workers read the server's own memory, from the next reply on."""
        ...

    def refit(self, shard: Shard) -> None:
        """The server has another shard, or its shard answers for other slices."""
        ...

    def skip(self) -> None:
        """The last request gets no answer from this server."""
        ...

    def resume(self, connection: Connection, received: int) -> None:
        """Resume the link over another connection, from frame number `received`."""
        ...

    def release(self) -> None:
        """The worker's process has ended: no work of this server waits for its device any longer."""
        ...

    def close(self) -> None:
        """Close the link, and let go of the memory."""
        ...


@dataclass(frozen=True, kw_only=True)
class Attaching:
    """A worker that attaches: all that a carrier is made from."""

    connection: Connection
    worker: int
    message: AttachMessage
    descriptors: list[int]
    """File descriptors that came with the message."""
    layout: Layout
    shard: Shard
    on_device: DeviceParameters | None
    """The parameters' memory, if they are on a device."""
    transfer: Transfer
    in_place: bool
    """Whether the mode lets workers read the server's own memory."""
    sent_in_place: bool
    """Whether replies can be sent from the shard's own slices: no update writes to them meanwhile."""
    groups_of: Callable[[int], Collection[int] | None]
    """The parameter groups of an optimizer, which its pushes bring; None: all. Raises FrameError."""
    release: Callable[[Connection], None]
    """Stops the server's hub reading a connection: from then on a thread of the carrier reads it."""
    post: Callable[[LinkThread, Frame | None, str], None]
    """Hands a frame, or None when the link ended, to the server's main thread."""
    spans: Recorder
