"""DeviceLink: payloads lie on a device that the server uses, too."""

from collections.abc import Collection, Iterator, Sequence

from paceline.comm import Connection, Frame, Kind, Region
from paceline.comm.device import FLAGS_BYTES
from paceline.comm.frames import Body, field
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

    def offer(self) -> tuple[Body, Sequence[int]]:
        """See LinkCarrier."""
        return {"carrier": "device"}, [self._region.fd]

    def hear(self, kind: Kind, body: Body) -> None:
        """See LinkCarrier."""
        self._memory.hear(body)
        if "fence" in body:
            self._flags.wait_in_order(_REPLIED, field(body, "fence", int))

    def arrange(self, sends: Sequence[Slice], owned: Sequence[int]) -> Body | None:
        """See LinkCarrier. The server sees all of the memory."""
        return None

    def write(
        self, kind: Kind, message: Body, due: Collection[int] | None
    ) -> tuple[Body, Sequence[memoryview]]:
        """See LinkCarrier."""
        if kind is Kind.PULL:
            return message, ()
        self._pushes += 1
        self._flags.raise_in_order(_PUSHED, self._pushes)
        return {**message, "fence": self._pushes}, ()

    def read(self, frame: Frame, into: Sequence[memoryview] | None = None) -> Iterator[int]:
        """See LinkCarrier. The server has written them, or will have, in order."""
        return iter(())

    def close(self) -> None:
        """See LinkCarrier."""
        self._watch.close()
        self._region.close_descriptor()
