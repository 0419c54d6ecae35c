"""What an engine starts, what every engine can do, and what a dead controller leaves to its successor."""

import socket
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from paceline.causes import ProcessEnd, ending_of

__all__ = ["Engine", "Exit", "Handover", "Left", "RoleSpec", "Succession"]


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """What a process is to be. Plain JSON, so that any engine can carry it. Holds the run's secret
    and the role's key: it travels over private descriptors, never on a command line."""

    role: str
    rank: int
    incarnation: int
    log: str
    secret: str
    """Hex."""
    controller: dict[str, Any]
    """Address of the controller."""
    certificate: dict[str, Any] | None = None
    """With TLS, the role's certificate and key."""
    patience_s: float = 0.0
    """How long it goes on without a controller, if that dies; 0: not at all."""
    config: dict[str, Any] = field(default_factory=dict)
    """Arguments of ServerConfig or WorkerConfig."""
    mps: bool = False
    """Whether it shares a GPU with other roles by NVIDIA MPS, where its host has that."""

    @property
    def name(self) -> str:
        return f"{self.role}:{self.rank}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Exit:
    """A process ended: with an exit code, or by a signal."""

    role: str
    rank: int
    incarnation: int
    code: int | None
    signal: int | None

    @property
    def end(self) -> ProcessEnd:
        """The cause, and how to tell it."""
        return ending_of(self.code, self.signal)


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


class Engine(Protocol):
    """Starts, watches and kills processes. Not thread safe."""

    def start(self, spec: RoleSpec) -> None:
        """Start a process; returns before it runs."""

    def fileno(self) -> int:
        """Readable when `exits` has news."""

    def exits(self) -> list[Exit]:
        """Processes that ended since the last call. Does not block."""

    def pids(self) -> dict[str, int]:
        """Process ids of running roles by name."""

    def starting(self) -> list[tuple[str, int]]:
        """Role and rank of processes that were asked for and do not run yet."""

    def kill(self, role: str, rank: int, signal: int) -> None:
        """Send a signal to a role and its children, now or as soon as it runs; nothing if it is gone."""

    def guard(self, succession: Succession | None) -> None:
        """Start a successor if this process dies; with None, end everything then. An engine that cannot do
        this does nothing."""

    def close(self) -> None:
        """Kill what still runs and release everything."""
