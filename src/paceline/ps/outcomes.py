"""Outcomes: what a server's role (leader or follower) must do about a step that the executor has executed."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from paceline.core.modes.lbfgs import Answer
from paceline.core.placement import Placement
from paceline.ps.peers import WorkerPeer

__all__ = [
    "Forgotten",
    "ModeChanged",
    "Outcome",
    "Placed",
    "PushSpoiled",
    "Reduced",
    "SlicesDue",
    "SnapshotTaken",
    "VectorAnswers",
]


class Reduced(NamedTuple):
    """The first half of an update is done: the norms of its slices."""

    number: int
    norms: Sequence[tuple[int, float]]


class VectorAnswers(NamedTuple):
    """What the reductions of an AskStep came to on this shard."""

    answers: Sequence[Answer]


class PushSpoiled(NamedTuple):
    """A push that its worker thought finite was not, in part. That part was left out."""

    worker: int


class Placed(NamedTuple):
    """Slices are held and owned as this says."""

    placement: Placement


class SlicesDue(NamedTuple):
    """Another server holds these slices from a placement on, and needs them."""

    server: int
    number: int
    """Of the placement."""
    tensors: dict[str, Tensor]


class ModeChanged(NamedTuple):
    """The run goes on in another mode."""


class Forgotten(NamedTuple):
    """The order says that this worker is gone, and its link is still here."""

    peer: WorkerPeer


class SnapshotTaken(NamedTuple):
    """This server's part of a checkpoint, to be written."""

    directory: Path
    tensors: dict[str, Tensor]


Outcome = Reduced | VectorAnswers | PushSpoiled | Placed | SlicesDue | ModeChanged | Forgotten | SnapshotTaken
