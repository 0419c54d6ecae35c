"""DeviceLink: payloads lie on a device that the server uses, too."""

import select
import threading
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

__all__ = ["DeviceLink"]

_PUSHED, _REPLIED = 0, 1
"""Flags of a link: see `ps/carriers/device_carrier.py`."""
_LOOK_S = 0.2


class DeviceLink:
    """See LinkCarrier. A push raises a flag in the order of the device's work, and what follows a reply waits
    there for the server's flag; the CPU waits for neither.

    A thread watches the link: if the server dies while work of the device waits for it, that work is let go,
    so that a script which waits for the device hears of the end, too.
    """

    def __init__(self, connection: Connection, memory: DeviceMemory) -> None:
        self._connection = connection
        self._memory = memory
        self._region = Region.create(FLAGS_BYTES)
        self._flags = memory.device.flags(self._region)
        self._pushes = 0
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_server, name="device link", daemon=True)
        self._watch.start()

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
        self._closing.set()
        self._flags.release(_REPLIED)
        self._watch.join()
        self._region.close_descriptor()

    def _watch_server(self) -> None:
        while not self._closing.wait(_LOOK_S):
            if self._connection.sock.fileno() < 0 or _hung_up(self._connection):
                self._flags.release(_REPLIED)
                return


def _hung_up(connection: Connection) -> bool:
    """Whether the other side has closed its socket, without reading from it."""
    poll = select.poll()
    try:
        poll.register(connection.sock, select.POLLRDHUP)
    except (OSError, ValueError):  # closed meanwhile
        return True
    return bool(poll.poll(0))
