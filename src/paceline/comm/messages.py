"""Messages between the controller and the roles: one class and one kind of frame for each.

`ToController` and `FromController` are the two directions. A receiver reads a frame with `TO_CONTROLLER` or
`FROM_CONTROLLER` and matches the result exhaustively.
"""

from typing import Final, NamedTuple

from paceline.comm.frames import Kind
from paceline.comm.message_codec import Catalogue, message
from paceline.core.json_types import JsonObject
from paceline.core.server.lead_reports import (
    FullyReplicated,
    ModeEntered,
    ReplaceWorker,
    RunEndsEarly,
    SaveCut,
    SaveEnded,
    ServerEmptied,
    ServerUnreachable,
    SwitchRefused,
)

__all__ = [
    "CLOCK_ANSWER",
    "FROM_CONTROLLER",
    "SAID_ONCE",
    "TO_CONTROLLER",
    "EndEarly",
    "FromController",
    "FullyReplicated",
    "LastWordsKept",
    "LeadReport",
    "LetServerGo",
    "LetWorkerGo",
    "LoggedMetrics",
    "ModeEntered",
    "ReplaceWorker",
    "RoleError",
    "RoleFinished",
    "RolesExpected",
    "RunEndsEarly",
    "SaveBegun",
    "SaveCut",
    "SaveEnded",
    "SaveNow",
    "SaveSoon",
    "ServerAddresses",
    "ServerEmptied",
    "ServerListening",
    "ServerReport",
    "ServerUnreachable",
    "StopServing",
    "StrangerSeen",
    "SwitchMode",
    "SwitchRefused",
    "TimeAsked",
    "TimeTold",
    "ToController",
    "UserNote",
    "WorkerReport",
]

# --- any role → controller ------------------------------------------------------------------------------


@message(Kind.ERROR)
class RoleError(NamedTuple):
    """The error that ends a role."""

    error: str
    """Name of the exception's class."""
    message: str
    traceback: str = ""
    cause: str | None = None
    """Value of a `Cause`; None: a server refused a connection."""
    code: int | None = None
    """Exit code of the process; None: 1."""
    version: int | None = None
    samples: int | None = None
    """Progress of the run, as far as this worker knows."""
    clock: int | None = None
    """Steps of this worker."""


@message(Kind.BYE)
class RoleFinished(NamedTuple):
    """A worker's script ended in order."""

    untrained: bool = False
    """The script exited before `paceline.prepare()`."""


@message(Kind.NOTE)
class UserNote(NamedTuple):
    """A message for the user. Training continues."""

    text: str


# --- worker → controller --------------------------------------------------------------------------------


@message(Kind.WORKER_REPORT)
class WorkerReport(NamedTuple):
    """Progress of a worker, twice a second."""

    clock: int
    wait_s: float
    """Seconds spent waiting for parameters so far."""
    step_s: float
    """Seconds spent computing so far."""
    ledger: tuple[int, ...]
    """`LedgerKeeper.told()`."""
    phases: dict[str, float]
    """Seconds in each phase since the last report."""
    spans_broken: str | None = None
    values_broken: str | None = None
    """Why spans or logged values cannot be written; None: they can."""


@message(Kind.METRICS)
class LoggedMetrics(NamedTuple):
    """Values that a worker's script has logged since the last message of this kind."""

    log: dict[str, float]
    """The latest value of each metric."""
    log_at: dict[str, int]
    """Position of the last one: `step`, `version`, `samples`, `epoch`, `attempt`."""
    losses: tuple[float, ...]
    """Every value of `loss`, oldest first."""
    clock: int


# --- server → controller --------------------------------------------------------------------------------


@message(Kind.READY)
class ServerListening(NamedTuple):
    """A server accepts connections at this address."""

    address: JsonObject


@message(Kind.SERVER_REPORT)
class ServerReport(NamedTuple):
    """Progress of a server, twice a second. A server that sends none for long hangs."""

    updates: int
    update_s: float
    phases: dict[str, float]
    spans_broken: str | None = None
    saving: tuple[int, int] | None = None
    """Bytes written of its part of a checkpoint, and bytes to write."""


@message(Kind.STRANGER)
class StrangerSeen(NamedTuple):
    """A server refused a connection."""

    reason: str


# --- lead server → controller ---------------------------------------------------------------------------


@message(Kind.STATS)
class LeadReport(NamedTuple):
    """Progress of the run, about ten times a second."""

    version: int
    epoch: int
    samples: int
    pushes: int
    dropped: int
    dropped_of: dict[int, int]
    """Dropped pushes by worker."""
    refused: int
    norms: tuple[tuple[int, float], ...]
    """Norms of gradients since the last report: worker and norm."""
    skipped: int
    lost: int
    update_s: float
    staleness: dict[int, int]
    """Number of applied pushes at each staleness."""
    data: JsonObject | None
    leases: tuple[dict[str, int], ...]
    earlier_epochs: dict[str, int]
    parameters: int
    last: bool = False
    """The lead ends, and these are its final figures."""


@message(Kind.SAVE_BEGUN)
class SaveBegun(NamedTuple):
    """The lead begins the requested checkpoint."""


# Reports on what it decides (core/server/lead_reports.py):
message(Kind.SAVE_CUT)(SaveCut)
message(Kind.SAVE_ENDED)(SaveEnded)
message(Kind.REPLACE)(ReplaceWorker)
message(Kind.ENDS_EARLY)(RunEndsEarly)
message(Kind.REPLICATED)(FullyReplicated)
message(Kind.EMPTIED)(ServerEmptied)
message(Kind.UNREACHABLE)(ServerUnreachable)
message(Kind.MODE)(ModeEntered)
message(Kind.SWITCH_REFUSED)(SwitchRefused)


# --- controller → roles ---------------------------------------------------------------------------------


@message(Kind.START)
class ServerAddresses(NamedTuple):
    """Addresses of the servers by rank, and the rank of the lead."""

    servers: dict[str, JsonObject]
    lead: int


@message(Kind.EXPECTED)
class RolesExpected(NamedTuple):
    """The run's processes by rank, and the incarnation of each: others may not take their places."""

    workers: dict[int, int]
    servers: dict[int, int]


@message(Kind.STOP)
class StopServing(NamedTuple):
    """End this server."""


@message(Kind.HEARD)
class LastWordsKept(NamedTuple):
    """The controller has journaled the role's last message: its process may end."""


@message(Kind.CHECKPOINT)
class SaveNow(NamedTuple):
    """Write a checkpoint of the present version; the controller waits for it."""

    all_ended: bool
    """All workers have finished: it is the final one."""


@message(Kind.SNAPSHOT)
class SaveSoon(NamedTuple):
    """Write a checkpoint at the next opportunity."""


@message(Kind.SWITCH)
class SwitchMode(NamedTuple):
    """Continue in another mode."""

    mode: str
    request: str


@message(Kind.LEAVE)
class LetWorkerGo(NamedTuple):
    """Have a worker leave after its current step."""

    worker: int


@message(Kind.EMPTY)
class LetServerGo(NamedTuple):
    """Have a server hand over its slices."""

    server: int


@message(Kind.END_EARLY)
class EndEarly(NamedTuple):
    """End the run in order."""

    reason: str


@message(Kind.CLOCK)
class TimeAsked(NamedTuple):
    """A role on another host asks the controller for the time, before its HELLO."""


@message(Kind.TIME)
class TimeTold(NamedTuple):
    """The answer: Unix time of the controller."""

    ns: int


ToController = (
    RoleError
    | RoleFinished
    | UserNote
    | WorkerReport
    | LoggedMetrics
    | ServerListening
    | ServerReport
    | StrangerSeen
    | LeadReport
    | SaveBegun
    | SaveCut
    | SaveEnded
    | ReplaceWorker
    | RunEndsEarly
    | FullyReplicated
    | ServerEmptied
    | ServerUnreachable
    | ModeEntered
    | SwitchRefused
)
FromController = (
    ServerAddresses
    | RolesExpected
    | StopServing
    | LastWordsKept
    | SaveNow
    | SaveSoon
    | SwitchMode
    | LetWorkerGo
    | LetServerGo
    | EndEarly
)

TO_CONTROLLER: Final[Catalogue[ToController]] = Catalogue(ToController, "the controller")
FROM_CONTROLLER: Final[Catalogue[FromController]] = Catalogue(FromController, "a role")
CLOCK_ANSWER: Final[Catalogue[TimeTold]] = Catalogue(TimeTold, "a role that asks for the time")

SAID_ONCE = frozenset(
    {
        Kind.NOTE,
        Kind.STRANGER,
        Kind.SAVE_BEGUN,
        Kind.SAVE_CUT,
        Kind.SAVE_ENDED,
        Kind.REPLACE,
        Kind.ENDS_EARLY,
        Kind.REPLICATED,
        Kind.EMPTIED,
        Kind.UNREACHABLE,
        Kind.MODE,
        Kind.SWITCH_REFUSED,
    }
)
"""Kinds that a role keeps for the next controller while it has none. A newer report replaces the others."""
