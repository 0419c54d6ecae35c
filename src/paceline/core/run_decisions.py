"""The states of a run, and what the run machine can decide: one class for each decision.

The controller carries decisions out in one exhaustive `match`.
"""

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "Announce",
    "Decision",
    "DismissServer",
    "End",
    "GoBack",
    "Introduce",
    "Kill",
    "Launch",
    "LostServer",
    "Note",
    "Retire",
    "RetireServer",
    "RunState",
    "Save",
    "WaitForCause",
]


class RunState(Enum):
    """State of a run."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        """Whether the run has ended, in order or not."""
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED)


@dataclass(frozen=True)
class Launch:
    """Start a process."""

    role: str
    rank: int
    incarnation: int


@dataclass(frozen=True)
class Kill:
    """Kill a process that hangs. The machine hears of its exit as a separate event."""

    role: str
    rank: int


@dataclass(frozen=True)
class Retire:
    """Ask a worker to leave after its current step."""

    rank: int


@dataclass(frozen=True)
class RetireServer:
    """Ask a server to hand its slices to the other servers."""

    rank: int


@dataclass(frozen=True)
class DismissServer:
    """Stop a server that has handed over all its slices."""

    rank: int


@dataclass(frozen=True)
class Announce:
    """Send the addresses of the servers to all roles."""


@dataclass(frozen=True)
class Save:
    """Ask the servers for a checkpoint of the present version."""


@dataclass(frozen=True)
class WaitForCause:
    """A role lost a link, probably because another role died. Call `patience_over` after a short wait."""


@dataclass(frozen=True)
class GoBack:
    """Parameters are lost: kill all processes and choose the checkpoint that the next launches start from."""

    reason: str


@dataclass(frozen=True)
class LostServer:
    """A server is gone, but replicas of all its slices remain. The other servers continue, led by `lead`."""

    rank: int
    lead: int


@dataclass(frozen=True)
class Introduce:
    """A server joined a run in progress: tell it which server leads."""

    rank: int


@dataclass(frozen=True)
class Note:
    """A message for the user."""

    text: str


@dataclass(frozen=True)
class End:
    """The run is over: stop all processes."""


Decision = (
    Launch
    | Kill
    | Retire
    | RetireServer
    | DismissServer
    | Announce
    | Save
    | WaitForCause
    | GoBack
    | LostServer
    | Introduce
    | Note
    | End
)
