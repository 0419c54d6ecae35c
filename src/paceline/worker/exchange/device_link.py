"""DeviceLink: payloads lie on a device that the server uses, too."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from paceline.comm import Connection, Region
from paceline.comm.device import FLAGS_BYTES
from paceline.comm.worker_messages import (
    AdmitReply,
    AttachedReply,
    AttachMessage,
    OrderedMessage,
    PullMessage,
    SendsMessage,
)
from paceline.params import Slice
from paceline.worker.exchange.device_memory import DeviceMemory
from paceline.worker.exchange.link_watch import LinkWatch

__all__ = ["DeviceLink"]

_PUSHED, _REPLIED = 0, 1
"""Flags of a link: see `ps/carriers/device_carrier.py`."""


class DeviceLink:
    """See LinkCarrier. A push raises a flag in the order of the device's work, and what follows a reply waits
    there for the server's flag; the CPU waits for neither.

    If the server dies while work of the device waits for it, that work is let go.
    """

    def __init__(self, connection: Connection, memory: DeviceMemory) -> None:
        self._memory = memory
        self._region = Region.create(FLAGS_BYTES)
        self._flags = memory.device.flags(self._region)
        self._pushes = 0
        self._watch = LinkWatch(connection, lambda: self._flags.release(_REPLIED))

    def offer(self, message: AttachMessage) -> Sequence[int]:
        """See LinkCarrier."""
        message.carrier = "device"
        return [self._region.fd]

    def hear(self, reply: AdmitReply | AttachedReply) -> None:
        """See LinkCarrier."""
        if isinstance(reply, AttachedReply):
            self._memory.hear(parameters=reply.parameters, gradients=reply.gradients)
        self._memory.hear(copy=reply.copy)
        if reply.fence is not None:
            self._flags.wait_in_order(_REPLIED, reply.fence)

    def arrange(self, sends: Sequence[Slice], owned: Sequence[int]) -> SendsMessage | None:
        """See LinkCarrier. The server sees all of the memory."""
        return None

    def write(
        self, message: OrderedMessage, due: Collection[int] | None
    ) -> tuple[OrderedMessage, Sequence[memoryview]]:
        """See LinkCarrier."""
        if isinstance(message, PullMessage):
            return message, ()
        self._pushes += 1
        self._flags.raise_in_order(_PUSHED, self._pushes)
        return replace(message, fence=self._pushes), ()

    def read(
        self, reply: AdmitReply | AttachedReply, into: Sequence[memoryview] | None = None
    ) -> Iterator[int]:
        """See LinkCarrier. The server has written them, or will have, in order."""
        return iter(())

    def close(self) -> None:
        """See LinkCarrier."""
        self._watch.close()
        self._region.close_descriptor()
