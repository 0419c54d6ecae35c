"""What a dead controller leaves to its successor, and what an engine does to have one started."""

import socket
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Guardian", "Handover", "Left", "Succession"]


@dataclass(frozen=True)
class Succession:
    """State passed to the successor of a controller that dies."""

    call: str
    """The successor: `package.module:function`, called with a Handover in a process of its own."""
    run: str
    """The run directory."""
    log: str
    """Path of the successor's log."""
    secret: str
    """Hex."""
    listener: int
    """Descriptor of the socket that the roles dial. It never closes: no other process can take its name."""
    lock: int
    """Descriptor of the run directory's lock, which is never free while the run goes on."""
    certificates: dict[str, Any] = field(default_factory=dict, repr=False)
    """With TLS, each role's certificate and key."""


@dataclass(frozen=True)
class Left:
    """A role that a dead controller started last in its place."""

    role: str
    rank: int
    incarnation: int
    pid: int
    status: int | None
    """How it ended, as `waitpid` says; None: it runs."""


@dataclass(frozen=True)
class Handover:
    """What the successor of a dead controller is called with."""

    succession: Succession
    control: socket.socket
    """To the fork server."""
    roles: tuple[Left, ...]
    died: float
    """When the controller died, in Unix time."""


class Guardian(Protocol):
    """Has a successor started when the controller dies. Optional: see `Engine.guardian`."""

    def guard(self, succession: Succession | None) -> None:
        """Start a successor if this process dies; with None, end everything then."""
