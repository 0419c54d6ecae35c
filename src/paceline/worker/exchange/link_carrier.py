"""LinkCarrier: how a worker's payloads reach one server, and how parameters reach the worker."""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from paceline.comm import Frame, Kind
from paceline.comm.frames import Body
from paceline.params import Slice

__all__ = ["LinkCarrier"]


class LinkCarrier(Protocol):
    """The worker's end of one link's payloads. One thread at a time calls it.

    The server's end is a `Carrier` (`ps/carriers/`).
    """

    def offer(self) -> tuple[Body, Sequence[int]]:
        """Fields of the ATTACH message, and descriptors that go with it. `carrier` names the server's end."""
        ...

    def hear(self, kind: Kind, body: Body) -> None:
        """A reply to ATTACH or to a request begins to come. The work that follows finds its parameters, once
        `read` is through."""
        ...

    def arrange(self, sends: Sequence[Slice], owned: Sequence[int]) -> Body | None:
        """Carry these slices from now on.

        Args:
            sends: slices that pushes bring to the server.
            owned: indices of those that its replies bring.

        Returns:
            The body of a SENDS message, if the server must be told.
        """
        ...

    def write(
        self, kind: Kind, message: Body, due: Collection[int] | None
    ) -> tuple[Body, Sequence[memoryview]]:
        """What is sent for a request: its message, with what the server must know, and the payload behind it.

        Args:
            message: of the request. Other servers get it, too.
            due: indices of the slices that a push is about, where there are several optimizers; None: all.
        """
        ...

    def read(self, frame: Frame, into: Sequence[memoryview] | None = None) -> Iterator[int]:
        """Read the parameters that come with a reply; yields the position of each slice once it is there.

        Args:
            into: where they go, if not to where the model has them.
        """
        ...

    def close(self) -> None:
        """The link is closed."""
        ...
