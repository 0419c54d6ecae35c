"""SharedLink: payloads lie in memory that a server on this host sees, too."""

from collections.abc import Collection, Iterator, Sequence

from paceline.comm import Frame, Kind
from paceline.comm.frames import Body
from paceline.params import Slice
from paceline.worker.exchange.exchange_memory import ExchangeMemory

__all__ = ["SharedLink"]


class SharedLink:
    """Messages name what lies in the memory, and bring nothing along. See LinkCarrier."""

    def __init__(self, memory: ExchangeMemory) -> None:
        self._memory = memory

    def offer(self) -> tuple[Body, Sequence[int]]:
        """See LinkCarrier."""
        body: Body = {"carrier": "shared", "in_place": self._memory.may_share}
        return body, [self._memory.region.fd]

    def hear(self, kind: Kind, body: Body) -> None:
        """See LinkCarrier."""

    def arrange(self, sends: Sequence[Slice], owned: Sequence[int]) -> Body | None:
        """See LinkCarrier. The server sees all of the memory."""
        return None

    def write(
        self, kind: Kind, message: Body, due: Collection[int] | None
    ) -> tuple[Body, Sequence[memoryview]]:
        """See LinkCarrier."""
        return message, ()

    def read(self, frame: Frame, into: Sequence[memoryview] | None = None) -> Iterator[int]:
        """See LinkCarrier. The server has written them."""
        return iter(())

    def close(self) -> None:
        """See LinkCarrier."""
