"""Steps: what all servers execute, in one order.

The decider makes them, and the leader sends them to the other servers. So all servers apply the same pushes
in the same order, every checkpoint is a consistent cut, and a lease is finished in the same breath as the
update computed from it is applied.

    an update                  Apply, or Reduce and later Commit (with --clip-norm)
    pushes                     Hold, Drop
    workers                    Admit, Leave
    parameters set by a script Assign, Load
    the run                    Mode, Checkpoint, Place
    sandblaster                Add, Ask, Vectors
"""

from typing import Any, Literal, NamedTuple

from paceline.core.codec import Codec
from paceline.core.modes.lbfgs import Ops
from paceline.core.modes.machine import PushId
from paceline.core.placement import Placement

__all__ = [
    "AddStep",
    "AdmitStep",
    "ApplyStep",
    "AskStep",
    "AssignStep",
    "CheckpointStep",
    "CommitStep",
    "DropStep",
    "HoldStep",
    "LeaveStep",
    "LoadStep",
    "ModeStep",
    "PlaceStep",
    "ReduceStep",
    "Step",
    "Steps",
    "VectorsStep",
    "WeightedPush",
    "step_from_json",
    "step_to_json",
    "steps_from_json",
    "steps_to_json",
]


class WeightedPush(NamedTuple):
    """One push in an update."""

    worker: int
    incarnation: int
    sequence: int
    weight: float
    """Its part in the weighted mean: mostly the number of its samples."""
    scale: float
    """What its gradient is multiplied with, for its staleness; in elastic modes alpha."""


class ApplyStep(NamedTuple):
    """Make an update of the mean of these pushes."""

    pushes: tuple[WeightedPush, ...]


class ReduceStep(NamedTuple):
    """Compute the mean of these pushes, and tell the leader its norm: the first half of an update."""

    pushes: tuple[WeightedPush, ...]
    number: int
    """The version before the update: its name in answers."""


class CommitStep(NamedTuple):
    """Apply the mean of the last ReduceStep, times a factor: the second half of an update."""

    scale: float


class HoldStep(NamedTuple):
    """Keep a push for a later update, out of its worker's reach, which goes on meanwhile."""

    push: PushId


class DropStep(NamedTuple):
    """Forget a push: it is not applied."""

    push: PushId


class AdmitStep(NamedTuple):
    """Answer a worker: it goes on, with fresh parameters unless it keeps those that it has."""

    worker: int
    version: int
    keep: Literal["keep"] | None = None

    @property
    def fetches(self) -> bool:
        """Whether the worker gets fresh parameters."""
        return self.keep is None


class AssignStep(NamedTuple):
    """Overwrite the parameters with what this push brought."""

    push: PushId


class LoadStep(NamedTuple):
    """Take over the optimizer state that a worker gave."""

    push: PushId
    """The worker, its incarnation, and the number of the state."""


class LeaveStep(NamedTuple):
    """A worker is gone: nothing of it comes any more."""

    worker: int
    incarnation: int


class ModeStep(NamedTuple):
    """Go on in another mode."""

    mode: str


class CheckpointStep(NamedTuple):
    """Write this server's part of a checkpoint."""

    version: int
    directory: str
    parameters_only: bool = False
    """A snapshot for evaluation: the part has no optimizer state."""


class PlaceStep(NamedTuple):
    """From here on, slices are held and owned as this says."""

    placement: Placement


class AddStep(NamedTuple):
    """Add gradients to the epoch's sum."""

    pushes: tuple[WeightedPush, ...]


class AskStep(NamedTuple):
    """Run operations on the named vectors, and tell the leader what the reductions came to."""

    ops: Ops


class VectorsStep(NamedTuple):
    """Run operations on the named vectors that nobody answers: w is the next point."""

    ops: Ops
    kept: tuple[str, ...]
    """Vectors that stay, beside w."""


Step = (
    ApplyStep
    | AdmitStep
    | HoldStep
    | DropStep
    | ReduceStep
    | CommitStep
    | AssignStep
    | LoadStep
    | LeaveStep
    | ModeStep
    | CheckpointStep
    | PlaceStep
    | AddStep
    | AskStep
    | VectorsStep
)
Steps = list[Step]

_CODEC: Codec[Step] = Codec(
    {
        "apply": ApplyStep,
        "reduce": ReduceStep,
        "commit": CommitStep,
        "hold": HoldStep,
        "drop": DropStep,
        "admit": AdmitStep,
        "assign": AssignStep,
        "load": LoadStep,
        "left": LeaveStep,
        "mode": ModeStep,
        "checkpoint": CheckpointStep,
        "place": PlaceStep,
        "add": AddStep,
        "ask": AskStep,
        "vectors": VectorsStep,
    },
    optional={AdmitStep: 1, CheckpointStep: 1},
)

step_to_json = _CODEC.encode
step_from_json = _CODEC.decode


def steps_to_json(steps: Steps) -> list[Any]:
    """Steps as JSON, in their order."""
    return [step_to_json(step) for step in steps]


def steps_from_json(data: Any) -> Steps:
    """The inverse of `steps_to_json`. Raises FrameError."""
    return [step_from_json(each) for each in data]
