"""InlineLink: payloads travel on the link's socket, behind their messages."""

from collections.abc import Collection, Iterator, Sequence

from paceline.comm import Connection
from paceline.comm.transfer import Transfer
from paceline.comm.worker_messages import (
    AdmitReply,
    AttachedReply,
    AttachMessage,
    OrderedMessage,
    PullMessage,
    PushMessage,
    SendsMessage,
)
from paceline.params import Slice
from paceline.worker.exchange.encoders import DifferenceReader
from paceline.worker.exchange.exchange_memory import ExchangeMemory

__all__ = ["InlineLink"]


class InlineLink:
    """See LinkCarrier.

    Args:
        differences: reads compressed replies; None if replies are not compressed.
    """

    def __init__(
        self,
        connection: Connection,
        server: int,
        memory: ExchangeMemory,
        transfer: Transfer,
        differences: DifferenceReader | None,
    ) -> None:
        self._connection = connection
        self._server = server
        self._memory = memory
        self._transfer = transfer
        self._differences = differences
        self._sends: list[int] = []
        """Indices of the slices that pushes bring."""
        self._told: list[int] | None = None
        """Those that the server was told of."""
        self.out: list[memoryview] = []
        """Their bytes in the memory that is pushed."""
        self.into: list[memoryview] = []
        """Where the parameters of a reply go."""

    def offer(self, message: AttachMessage) -> Sequence[int]:
        """See LinkCarrier."""
        self._told = self._sends
        message.carrier, message.sends = "inline", tuple(self._sends)
        message.compress_replies = self._transfer.replies is not None
        if self._transfer.compresses:
            message.compress = str(self._transfer.compress)
        return ()

    def hear(self, reply: AdmitReply | AttachedReply) -> None:
        """See LinkCarrier."""
        if reply.owned is not None:  # the server answers for other slices from here on
            self.into = self._memory.incoming(reply.owned)

    def arrange(self, sends: Sequence[Slice], owned: Sequence[int]) -> SendsMessage | None:
        """See LinkCarrier."""
        self._sends = [piece.index for piece in sends]
        self.out = self._memory.outgoing(sends)
        self.into = self._memory.incoming(owned)
        if self._told is None or self._told == self._sends:
            return None
        self._told = self._sends
        return SendsMessage(tuple(self._sends))

    def write(
        self, message: OrderedMessage, due: Collection[int] | None
    ) -> tuple[OrderedMessage, Sequence[memoryview]]:
        """See LinkCarrier."""
        if isinstance(message, PullMessage):
            return message, ()
        if isinstance(message, PushMessage):
            if message.carries == "parameters":
                return message, self.into
            if message.void or message.carries == "nothing":
                return message, ()
        if due is None:
            return message, self.out
        return message, [view for i, view in zip(self._sends, self.out, strict=True) if i in due]

    def read(
        self, reply: AdmitReply | AttachedReply, into: Sequence[memoryview] | None = None
    ) -> Iterator[int]:
        """See LinkCarrier."""
        views = self.into if into is None else into
        if self._differences is not None:
            sizes = reply.sizes if isinstance(reply, AdmitReply) else None
            return self._differences.read(self._connection, self._server, sizes, views)
        return self._connection.read_each(views)

    def close(self) -> None:
        """See LinkCarrier."""
