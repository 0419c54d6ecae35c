"""SharedLink: payloads lie in memory that a server on this host sees, too."""

from collections.abc import Collection, Iterator, Sequence

from paceline.comm.worker_messages import (
    AdmitReply,
    AttachedReply,
    AttachMessage,
    OrderedMessage,
    SendsMessage,
)
from paceline.params import Slice
from paceline.worker.exchange.exchange_memory import ExchangeMemory

__all__ = ["SharedLink"]


class SharedLink:
    """Messages name what lies in the memory, and bring nothing along. See LinkCarrier."""

    def __init__(self, memory: ExchangeMemory) -> None:
        self._memory = memory

    def offer(self, message: AttachMessage) -> Sequence[int]:
        """See LinkCarrier."""
        message.carrier, message.in_place = "shared", self._memory.may_share
        return [self._memory.region.fd]

    def hear(self, reply: AdmitReply | AttachedReply) -> None:
        """See LinkCarrier."""

    def arrange(self, sends: Sequence[Slice], owned: Sequence[int]) -> SendsMessage | None:
        """See LinkCarrier. The server sees all of the memory."""
        return None

    def write(
        self, message: OrderedMessage, due: Collection[int] | None
    ) -> tuple[OrderedMessage, Sequence[memoryview]]:
        """See LinkCarrier."""
        return message, ()

    def read(
        self, reply: AdmitReply | AttachedReply, into: Sequence[memoryview] | None = None
    ) -> Iterator[int]:
        """See LinkCarrier. The server has written them."""
        return iter(())

    def close(self) -> None:
        """See LinkCarrier."""
