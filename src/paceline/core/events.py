"""Events: everything that changes what the decider knows.

The leader sends every event to the followers before it acts on what follows from it. A follower's decider
that hears the same events knows and decides the same, and can go on from there.
"""

from typing import Any, NamedTuple

from paceline.core.codec import Codec
from paceline.core.modes.machine import PushId

__all__ = [
    "Answered",
    "Answers",
    "Assign",
    "Call",
    "Carry",
    "Count",
    "Dismiss",
    "DrawOrder",
    "Event",
    "FatesTold",
    "GiveBack",
    "Granted",
    "Heard",
    "Join",
    "Leave",
    "Load",
    "Push",
    "Rate",
    "Refuse",
    "Skip",
    "Spoiled",
    "StopEarly",
    "Switch",
    "Take",
    "Verdicts",
    "Vote",
    "event_from_json",
    "event_to_json",
    "events_from_json",
    "events_to_json",
]


class Push(NamedTuple):
    """A push arrived whole. Its gradient is the servers' business."""

    id: PushId
    read_version: int
    samples: int
    """How many samples it was computed from; 0 if unknown."""
    leases: tuple[int, ...]
    void: bool
    """It is not finite, or more than the bound allows: it keeps its place in the order but is not applied."""
    norm: float | None = None
    """Of the gradient, if the run has a bound on that."""
    fetch: bool = True
    """Whether its worker wants fresh parameters with the answer."""
    optimizer: int = 0
    """The optimizer of the script whose step it is."""
    weight: int = 0
    """How many samples it was computed from, where another push accounts for some of them."""

    @property
    def weighs(self) -> int:
        """How many samples its gradient is the mean of; 0 if unknown."""
        return self.weight or self.samples


class Take(NamedTuple):
    """A worker asks for leases."""

    worker: int
    epoch: int
    limit: int
    wait: bool
    """It has used up all it had, so it may be parked; else an empty answer comes at once."""
    number: int = 0
    """Of its request."""


class Granted(NamedTuple):
    """Answer parked workers that can be answered."""

    limit: int
    """Number of leases for one worker."""


class Join(NamedTuple):
    """A worker attached."""

    worker: int
    incarnation: int


class Leave(NamedTuple):
    """A worker is gone, in order (`finished`) or not."""

    worker: int
    incarnation: int
    finished: bool


class Dismiss(NamedTuple):
    """A worker was told to leave: the run goes on with fewer."""

    worker: int


class Assign(NamedTuple):
    """A worker sent parameters to take over."""

    push: PushId


class Load(NamedTuple):
    """A worker gave all servers an optimizer state."""

    worker: int
    incarnation: int
    number: int


class Switch(NamedTuple):
    """Go on in another mode as soon as that is possible."""

    mode: str


class Heard(NamedTuple):
    """A worker's request of this number arrived."""

    worker: int
    number: int


class Vote(NamedTuple):
    """A worker asks whether the run ends early (paceline.should_stop)."""

    worker: int
    number: int
    who: str
    """Whose condition counts."""
    wants: bool


class Verdicts(NamedTuple):
    """Answer votes that can be answered."""


class StopEarly(NamedTuple):
    """End the run early, whatever the votes."""

    reason: str


class Call(NamedTuple):
    """A worker calls a collective (paceline.gather)."""

    worker: int
    number: int
    place: str
    value: str


class Answers(NamedTuple):
    """Answer calls of collectives that can be answered."""


class DrawOrder(NamedTuple):
    """A worker has drawn the order of an epoch from the script's sampler."""

    worker: int
    epoch: int
    fingerprint: str
    sampler: str


class Count(NamedTuple):
    """A script without a prepared loader has trained on so many samples."""

    samples: int


class GiveBack(NamedTuple):
    """A worker will not use these leases."""

    worker: int
    leases: tuple[int, ...]


class Carry(NamedTuple):
    """A worker has read these leases, and the step that covers them comes after the epoch's end."""

    worker: int
    leases: tuple[int, ...]


class Refuse(NamedTuple):
    """A step that had these leases was not made: it was not finite."""

    worker: int
    leases: tuple[int, ...]


class Skip(NamedTuple):
    """A worker's script read these leases, and samples without a lease, and made no step with them."""

    worker: int
    leases: tuple[int, ...]
    samples: int


class Rate(NamedTuple):
    """Sandblaster: the script has another learning rate."""

    lr: float


class Answered(NamedTuple):
    """Sandblaster: all servers have answered an AskStep."""

    parts: tuple[tuple[float | None, ...], ...]
    """The answers of each."""


class FatesTold(NamedTuple):
    """A worker is told which of its pushes were not applied."""

    worker: int


class Spoiled(NamedTuple):
    """The servers found NaN or Inf in a push that its worker thought finite, and left that part out."""

    worker: int


Event = (
    Push
    | Take
    | Granted
    | Heard
    | Join
    | Leave
    | Dismiss
    | Assign
    | Load
    | Switch
    | Vote
    | Verdicts
    | StopEarly
    | Call
    | Answers
    | DrawOrder
    | Count
    | GiveBack
    | Carry
    | Refuse
    | Skip
    | Spoiled
    | Rate
    | Answered
    | FatesTold
)

_CODEC: Codec[Event] = Codec(
    {
        "push": Push,
        "take": Take,
        "granted": Granted,
        "join": Join,
        "leave": Leave,
        "retire": Dismiss,
        "assign": Assign,
        "load": Load,
        "switch": Switch,
        "heard": Heard,
        "vote": Vote,
        "verdicts": Verdicts,
        "stop": StopEarly,
        "call": Call,
        "answers": Answers,
        "order": DrawOrder,
        "count": Count,
        "give_back": GiveBack,
        "carry": Carry,
        "refuse": Refuse,
        "skip": Skip,
        "spoiled": Spoiled,
        "rate": Rate,
        "answered": Answered,
        "told": FatesTold,
    },
    optional={Push: 2},
)

event_to_json = _CODEC.encode
event_from_json = _CODEC.decode


def events_to_json(events: list[Event]) -> list[Any]:
    """Events as JSON, in their order."""
    return [event_to_json(event) for event in events]


def events_from_json(data: Any) -> list[Event]:
    """The inverse of `events_to_json`. Raises FrameError."""
    return [event_from_json(each) for each in data]
