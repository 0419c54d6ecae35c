"""Messages between the leader and the other servers: one class and one kind of frame for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from paceline.comm.frames import Kind
from paceline.comm.message_codec import Catalogue, JsonForm, message
from paceline.comm.worker_messages import PreparedModel
from paceline.core.events import Event, events_from_json, events_to_json
from paceline.core.json_types import Json
from paceline.core.modes.lbfgs import Answer
from paceline.core.placement import Placement
from paceline.core.steps import Step, steps_from_json, steps_to_json

__all__ = [
    "FROM_LEADER",
    "TO_LEADER",
    "CaughtUp",
    "FromLeader",
    "ModelHeld",
    "ModelMessage",
    "NormsReduced",
    "OrderEntered",
    "OrderMessage",
    "PartFailed",
    "PartWritten",
    "SlicesMessage",
    "SlicesPlaced",
    "ToLeader",
    "VectorsAnswered",
]

_Steps = Annotated[Sequence[Step], JsonForm(steps_to_json, steps_from_json)]
_Events = Annotated[Sequence[Event], JsonForm(events_to_json, events_from_json)]

# --- leader → follower ----------------------------------------------------------------------------------


@message(Kind.ADOPT)
@dataclass(slots=True, kw_only=True)
class ModelMessage(PreparedModel):
    """The run's model. Behind it the follower's slices, unless it shares memory, and the extras."""

    checkpoint: str | None
    """Path of the one that the run goes on from."""
    placement: Placement
    takes_part: bool
    """The follower executes the order from its beginning on."""
    extras_bytes: int
    """Bytes of frozen parameters and initial buffers; 0 without replicas."""


@message(Kind.ORDER)
class OrderMessage(NamedTuple):
    """The next steps of the order."""

    steps: _Steps
    events: _Events = ()
    """Events that they follow from; none without replicas."""
    held: _Steps = ()
    """Steps that wait for the second half of an update."""


@message(Kind.ENTER_ORDER)
class OrderEntered(NamedTuple):
    """A new server takes part from here on."""

    position: int
    """Number of steps in the order before it."""
    answered: dict[int, int]
    """Number of each worker's last request that is answered before this position."""
    placement: Placement
    incarnations: dict[int, int]
    """The processes of the workers that made those requests."""
    decider: Json = None
    """State of the leader's decider; None without replicas."""
    records: Json = None
    """Records of applied pushes in that state that the leader has not written yet."""


@message(Kind.CATCH_UP)
class CaughtUp(NamedTuple):
    """What a follower of the leader before lacks."""

    steps: _Steps
    held: _Steps
    decider: Json
    records: Json


@message(Kind.SLICES)
class SlicesMessage(NamedTuple):
    """Behind it slices that a server holds from a placement on. The leader passes them on."""

    to: int
    """Rank of that server."""
    number: int
    """Of the placement."""


# --- follower → leader ----------------------------------------------------------------------------------


@message(Kind.MODEL_HELD)
class ModelHeld(NamedTuple):
    """The follower has the model."""


@message(Kind.REDUCED)
class NormsReduced(NamedTuple):
    """The first half of an update is done on this shard."""

    number: int
    norms: tuple[tuple[int, float], ...]
    """Index and norm of each of its slices."""


@message(Kind.VECTOR_ANSWERS)
class VectorsAnswered(NamedTuple):
    """What the reductions of an AskStep came to on this shard."""

    answers: tuple[Answer, ...]


@message(Kind.PLACED)
class SlicesPlaced(NamedTuple):
    """The follower has all its slices of the placement of this number."""

    number: int


@message(Kind.PART_WRITTEN)
class PartWritten(NamedTuple):
    """A server's part of a checkpoint is written."""

    directory: str
    name: str
    sha256: str
    bytes: int


@message(Kind.PART_FAILED)
class PartFailed(NamedTuple):
    """A server's part of a checkpoint could not be written."""

    directory: str
    reason: str


FromLeader = ModelMessage | OrderMessage | OrderEntered | CaughtUp | SlicesMessage
ToLeader = (
    ModelHeld | NormsReduced | VectorsAnswered | SlicesPlaced | PartWritten | PartFailed | SlicesMessage
)
FROM_LEADER: Final[Catalogue[FromLeader]] = Catalogue(FromLeader, "a follower")
TO_LEADER: Final[Catalogue[ToLeader]] = Catalogue(ToLeader, "the leader")
