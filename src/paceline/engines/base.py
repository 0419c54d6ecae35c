"""What an engine provides (hosts), and what the agent on each host does (it runs roles)."""

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import psutil

from paceline.causes import Cause, ProcessEnd, ending_of
from paceline.engines.handover import Guardian
from paceline.plan.plan import LOCAL_HOST

__all__ = [
    "LOCAL_HOST",
    "Agent",
    "AgentEvent",
    "Engine",
    "EngineEvent",
    "Exited",
    "HostInfo",
    "HostJoined",
    "HostLost",
    "JoinRefused",
    "RoleSpec",
    "RoleUsage",
    "Started",
]


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """What a process is to be. Plain JSON, so that any agent can be sent it. Holds the run's secret
    and the role's key: it travels over private descriptors or TLS, never on a command line."""

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


class HostInfo(NamedTuple):
    """A host of a run."""

    id: str
    name: str
    """For people: its host name."""
    address: str | None
    """Where other hosts of the run reach its roles; None: they need not."""
    cores: int
    memory: int
    """Bytes."""

    @classmethod
    def own(cls, id: str = LOCAL_HOST, address: str | None = None) -> Self:
        """This host."""
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        return cls(id, socket.gethostname(), address, cores, psutil.virtual_memory().total)


# --- what agents and engines report ---------------------------------------------------------------------


class Started(NamedTuple):
    """A role's process runs."""

    role: str
    rank: int
    incarnation: int
    pid: int
    """On its host."""


class Exited(NamedTuple):
    """A role's process ended."""

    role: str
    rank: int
    incarnation: int
    cause: Cause
    how: str
    """Completes a sentence: `was killed by SIGKILL`."""
    hint: str = ""
    """What usually causes this."""
    code: int | None = None
    """Its exit code, if it exited by itself."""

    @classmethod
    def of(cls, role: str, rank: int, incarnation: int, code: int | None, signal: int | None) -> Self:
        """A process that ended with an exit code, or by a signal."""
        end = ending_of(code, signal)
        return cls(role, rank, incarnation, end.cause, end.how, end.hint, code)

    @property
    def end(self) -> ProcessEnd:
        """The cause, and how to tell it."""
        return ProcessEnd(self.cause, self.how, self.hint)


class RoleUsage(NamedTuple):
    """What a role uses now, on a host whose processes the controller cannot look at."""

    role: str
    rank: int
    cpu: float
    """Cores."""
    memory: int
    """Bytes."""


AgentEvent = Started | Exited | RoleUsage


class HostJoined(NamedTuple):
    """A host is there, with an agent."""

    host: HostInfo


class HostLost(NamedTuple):
    """A host is gone. Its agent reports the ends of its roles."""

    host: HostInfo
    reason: str


class JoinRefused(NamedTuple):
    """A host, or a stranger, wanted to join and was refused."""

    reason: str


EngineEvent = HostJoined | HostLost | JoinRefused


class Agent(Protocol):
    """Runs roles on one host: starts, watches and ends them. Not thread safe."""

    def start(self, spec: RoleSpec) -> None:
        """Start a role; returns before it runs. `poll` then gives Started and, in the end, Exited."""

    def end(self, role: str, rank: int) -> None:
        """Kill a role and its children, now or as soon as it runs; nothing if it is gone."""

    def poll(self) -> Sequence[AgentEvent]:
        """What happened since the last call. Does not block. Each role that was started is reported to have
        ended exactly once, also if its host is lost."""

    def fileno(self) -> int:
        """Readable when `poll` has news."""

    def close(self) -> None:
        """Kill what still runs and release everything."""


class Engine(Protocol):
    """Provides hosts, each with an agent; knows nothing of roles. Not thread safe."""

    @property
    def guardian(self) -> Guardian | None:
        """What has a successor started if this process dies; None: the run ends with this process."""

    def hosts(self) -> Sequence[HostInfo]:
        """The hosts that are there now; the controller's own is the first."""

    def agent(self, host: str) -> Agent:
        """The agent of a host, also of one that was lost: it reports the ends of its roles."""

    def events(self) -> Sequence[EngineEvent]:
        """Hosts that came, were lost or were refused since the last call. Does not block."""

    def fileno(self) -> int:
        """Readable when an agent, or `events`, has news."""

    def close(self) -> None:
        """Kill what still runs and release everything."""
