"""What an engine starts, and what every engine can do."""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

__all__ = ["Engine", "Exit", "RoleSpec"]


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
    config: dict[str, Any] = field(default_factory=dict)
    """Arguments of ServerConfig or WorkerConfig."""

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

    def kill(self, role: str, rank: int, signal: int) -> None:
        """Send a signal to a role and all its children; nothing if it is gone."""

    def close(self) -> None:
        """Kill what still runs and release everything."""
