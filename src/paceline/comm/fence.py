"""Fence: a moment in the work of a device, which another process can wait for."""

from typing import Protocol

__all__ = ["Fence"]


class Fence(Protocol):
    """A moment that is reached when everything before it is done. Where the CPU does the work there is none:
    what a message says has been done when the message comes."""

    def reached(self) -> bool:
        """Whether everything before it is done. Does not block."""
        ...

    def wait(self) -> None:
        """Let the work that follows here wait for it. Does not block the calling thread."""
        ...
