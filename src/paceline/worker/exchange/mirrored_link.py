"""MirroredLink: payloads lie in memory of the host, from and to which a device copies them slice by slice."""

from collections.abc import Sequence

from paceline.comm import Connection, Region
from paceline.comm.device import Flags, SharedDevice, flags_bytes
from paceline.comm.worker_messages import AdmitReply, AttachedReply, AttachMessage
from paceline.exceptions import FrameError
from paceline.worker.exchange.exchange_memory import ExchangeMemory
from paceline.worker.exchange.link_watch import LinkWatch
from paceline.worker.exchange.shared_link import SharedLink

__all__ = ["MirroredLink"]


class MirroredLink(SharedLink):
    """A SharedLink whose replies come before the parameters: the server raises a flag for each slice that it
    has updated. The device waits for the flags, and the CPU does not. See LinkCarrier.

    A slice of the gradient may be written over when its flag is raised.
    """

    def __init__(self, connection: Connection, memory: ExchangeMemory, device: SharedDevice) -> None:
        super().__init__(memory)
        self._region = Region.create(flags_bytes(len(memory.layout.slices)))
        self.flags: Flags = device.flags(self._region)
        """By the slices' indices."""
        self.replies = 0
        """What the flags are raised to for the newest reply."""
        self._watch = LinkWatch(connection, self.flags.release_all)

    def offer(self, message: AttachMessage) -> Sequence[int]:
        """See LinkCarrier."""
        descriptors = super().offer(message)
        message.carrier, message.in_place = "mirrored", False
        return [*descriptors, self._region.fd]

    def hear(self, reply: AdmitReply | AttachedReply) -> None:
        """See LinkCarrier."""
        if reply.fence is None:
            raise FrameError("a reply to a worker that waits for flags, without their number")
        self.replies = reply.fence

    def close(self) -> None:
        """See LinkCarrier."""
        self._watch.close()
        self._region.close_descriptor()
