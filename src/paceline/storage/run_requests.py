"""What commands and readers can ask of a run that is going on, and the answers: one class for each.

They travel as JSON files (`requests.py`). A request has its `kind` there, an answer is told by its fields.
"""

from dataclasses import asdict, dataclass
from typing import TypeVar

from paceline.core.json_types import JsonObject
from paceline.storage.typed_json import AnyFloat, checked

__all__ = [
    "BadRequest",
    "EvaluatedRequest",
    "EvaluationHeard",
    "Refused",
    "RunAnswer",
    "RunHasEnded",
    "RunRequest",
    "ScaleRequest",
    "Scaled",
    "SnapshotAnswer",
    "SnapshotFailed",
    "SnapshotRequest",
    "SnapshotWritten",
    "StopRequest",
    "Stopping",
    "SwitchRequest",
    "Switched",
    "read_answer",
    "read_request",
    "read_snapshot_answer",
    "request_body",
]

T = TypeVar("T")


@dataclass(frozen=True)
class SwitchRequest:
    """Continue in another mode."""

    mode: str


@dataclass(frozen=True)
class ScaleRequest:
    """Continue with other numbers of roles; None: as many as there are."""

    workers: int | None = None
    servers: int | None = None


@dataclass(frozen=True)
class StopRequest:
    """End; `now`: without waiting for a checkpoint."""

    now: bool = False


@dataclass(frozen=True)
class SnapshotRequest:
    """A reader wants the model of a version."""

    at: int
    """The lowest version that serves."""
    every: int
    """Versions that are multiples of this one serve."""
    process: int
    """The reader's process id. What it asks takes the place of what it asked before."""


@dataclass(frozen=True)
class EvaluatedRequest:
    """A reader tells what it measured."""

    version: int
    values: dict[str, AnyFloat]


@dataclass(frozen=True)
class BadRequest:
    """A file that holds no request."""

    reason: str


RunRequest = SwitchRequest | ScaleRequest | StopRequest | SnapshotRequest | EvaluatedRequest


@dataclass(frozen=True)
class Refused:
    """The run continues as it was."""

    refused: str
    """The reason."""


@dataclass(frozen=True)
class Switched:
    """The run continues in another mode."""

    mode: str
    version: int
    """From this update on."""


@dataclass(frozen=True)
class Scaled:
    """The run continues with other numbers of roles."""

    workers: int
    servers: int
    version: int
    """From this update on."""


@dataclass(frozen=True)
class Stopping:
    """The run ends, or has ended."""

    state: str


@dataclass(frozen=True)
class SnapshotWritten:
    """The snapshot is there to be read."""

    path: str
    version: int


@dataclass(frozen=True)
class SnapshotFailed:
    """The servers could not write the snapshot; the reader may ask again."""

    failed: str
    """The reason."""


@dataclass(frozen=True)
class RunHasEnded:
    """The run has ended: there will be no more snapshots."""

    checkpoint: str | None
    """Path of the one that it ended with."""
    version: int


@dataclass(frozen=True)
class EvaluationHeard:
    """The results are in the run's status."""

    version: int
    """The run's present one."""


SnapshotAnswer = SnapshotWritten | SnapshotFailed | RunHasEnded
RunAnswer = Refused | Switched | Scaled | Stopping | SnapshotAnswer | EvaluationHeard

_KINDS: dict[str, type[RunRequest]] = {
    "switch": SwitchRequest,
    "scale": ScaleRequest,
    "stop": StopRequest,
    "snapshot": SnapshotRequest,
    "evaluated": EvaluatedRequest,
}


def request_body(request: RunRequest) -> JsonObject:
    """A request as its file has it."""
    (kind,) = (name for name, each in _KINDS.items() if type(request) is each)
    return {"kind": kind, **asdict(request)}


def read_request(body: JsonObject) -> RunRequest | BadRequest:
    """The request that a file holds."""
    name = body.get("kind")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join(map(repr, _KINDS))
        return BadRequest(f"a request of kind {name!r:.40} is unknown here; known: {known}")
    try:
        return checked(kind, body)
    except ValueError as error:
        return BadRequest(f"a request of kind {name!r} that cannot be understood: {error}")


def read_answer(wanted: type[T], body: JsonObject) -> T | Refused:
    """The answer that a file holds: the wanted one, or a refusal. Raises ValueError."""
    return checked(Refused, body) if body.get("refused") else checked(wanted, body)


def read_snapshot_answer(body: JsonObject) -> SnapshotAnswer | Refused:
    """The answer to a SnapshotRequest that a file holds. Raises ValueError."""
    if "failed" in body:
        return read_answer(SnapshotFailed, body)
    return read_answer(RunHasEnded if "checkpoint" in body else SnapshotWritten, body)
