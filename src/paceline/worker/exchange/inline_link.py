"""InlineLink: payloads travel on the link's socket, behind their messages."""

from collections.abc import Collection, Iterator, Sequence

from paceline.comm import Connection, Frame, Kind
from paceline.comm.frames import Body
from paceline.comm.transfer import Transfer
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

    def offer(self) -> tuple[Body, Sequence[int]]:
        """See LinkCarrier."""
        self._told = self._sends
        body: Body = {"carrier": "inline", "sends": self._sends}
        if self._transfer.replies is not None:
            body["compress_replies"] = True
        if self._transfer.compresses:
            body["compress"] = str(self._transfer.compress)
        return body, ()

    def hear(self, kind: Kind, body: Body) -> None:
        """See LinkCarrier."""
        if "owned" in body:  # the server answers for other slices from here on
            self.into = self._memory.incoming(body["owned"])

    def arrange(self, sends: Sequence[Slice], owned: Sequence[int]) -> Body | None:
        """See LinkCarrier."""
        self._sends = [piece.index for piece in sends]
        self.out = self._memory.outgoing(sends)
        self.into = self._memory.incoming(owned)
        if self._told is None or self._told == self._sends:
            return None
        self._told = self._sends
        return {"slices": self._sends}

    def write(
        self, kind: Kind, message: Body, due: Collection[int] | None
    ) -> tuple[Body, Sequence[memoryview]]:
        """See LinkCarrier."""
        carries = message.get("carries", "slot")
        if kind is Kind.PULL or carries == "nothing":
            return message, ()
        if carries == "parameters":
            return message, self.into
        if message.get("void"):
            return message, ()
        if due is None:
            return message, self.out
        return message, [view for i, view in zip(self._sends, self.out, strict=True) if i in due]

    def read(self, frame: Frame, into: Sequence[memoryview] | None = None) -> Iterator[int]:
        """See LinkCarrier."""
        views = self.into if into is None else into
        if self._differences is not None:
            return self._differences.read(self._connection, self._server, frame.body, views)
        return self._connection.read_each(views)

    def close(self) -> None:
        """See LinkCarrier."""
