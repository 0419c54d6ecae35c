"""What a command can ask of a run that is going on, and what it is answered: one class for each.

They travel as JSON files (`requests.py`). A request has its `kind` there, an answer is told by its fields.
"""

from dataclasses import asdict, dataclass
from typing import TypeVar

from paceline.core.json_types import JsonObject
from paceline.storage.typed_json import checked

__all__ = [
    "BadRequest",
    "Refused",
    "RunAnswer",
    "RunRequest",
    "ScaleRequest",
    "Scaled",
    "StopRequest",
    "Stopping",
    "SwitchRequest",
    "Switched",
    "read_answer",
    "read_request",
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
class BadRequest:
    """A file that holds no request."""

    reason: str


RunRequest = SwitchRequest | ScaleRequest | StopRequest


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


RunAnswer = Refused | Switched | Scaled | Stopping

_KINDS: dict[str, type[RunRequest]] = {"switch": SwitchRequest, "scale": ScaleRequest, "stop": StopRequest}


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
