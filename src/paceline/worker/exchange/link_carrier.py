"""LinkCarrier: how a worker's payloads reach one server, and how parameters reach the worker."""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from paceline.comm.worker_messages import (
    AdmitReply,
    AttachedReply,
    AttachMessage,
    OrderedMessage,
    SendsMessage,
)
from paceline.params import Slice

__all__ = ["LinkCarrier"]


class LinkCarrier(Protocol):
    """The worker's end of one link's payloads. One thread at a time calls it.

    The server's end is a `Carrier` (`ps/carriers/`).
    """

    def offer(self, message: AttachMessage) -> Sequence[int]:
        """Complete an ATTACH message: `carrier` names the server's end. Returns descriptors that go along."""
        ...

    def hear(self, reply: AdmitReply | AttachedReply) -> None:
        """A reply to ATTACH or to a request begins to come. The work that follows finds its parameters, once
        `read` is through."""
        ...

    def arrange(self, sends: Sequence[Slice], owned: Sequence[int]) -> SendsMessage | None:
        """Carry these slices from now on.

        Args:
            sends: slices that pushes bring to the server.
            owned: indices of those that its replies bring.

        Returns:
            A message, if the server must be told.
        """
        ...

    def write(
        self, message: OrderedMessage, due: Collection[int] | None
    ) -> tuple[OrderedMessage, Sequence[memoryview]]:
        """What is sent for a request: its message, with what the server must know, and the payload behind it.

        Args:
            message: of the request. Other servers get it, too.
            due: indices of the slices that a push is about, where there are several optimizers; None: all.
        """
        ...

    def read(
        self, reply: AdmitReply | AttachedReply, into: Sequence[memoryview] | None = None
    ) -> Iterator[int]:
        """Read the parameters that come with a reply; yields the position of each slice once it is there.

        Args:
            into: where they go, if not to where the model has them.
        """
        ...

    def close(self) -> None:
        """The link is closed."""
        ...
