"""Whether a server can execute a step of the order now: what it needs, and whether that is here.

The order says which pushes an update has, and the workers send those pushes to every server by themselves. So
a step may come before a push that it needs, and waits for it. A push of a process that is gone never comes.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Protocol, assert_never

from paceline.core.modes.machine import PushId
from paceline.core.placement import Placement
from paceline.core.steps import (
    AddStep,
    AdmitStep,
    ApplyStep,
    AskStep,
    AssignStep,
    CheckpointStep,
    CommitStep,
    DropStep,
    HoldStep,
    LeaveStep,
    LoadStep,
    ModeStep,
    PlaceStep,
    ReduceStep,
    Step,
    VectorsStep,
)

__all__ = ["AttachedWorker", "can_execute"]


class AttachedWorker(Protocol):
    """A process that is attached to this server as a worker."""

    incarnation: int


def can_execute(
    step: Step,
    *,
    pushes: Container[PushId],
    loads: Container[PushId],
    workers: Mapping[int, AttachedWorker],
    has_slices: Callable[[Placement], bool],
) -> bool:
    """Whether all that a step needs is here, or never will be.

    Args:
        pushes, loads: gradients and optimizer states that are here.
        workers: those that are attached now.
        has_slices: whether all slices of this server in a placement are here.
    """
    match step:
        case ApplyStep(weighted) | ReduceStep(weighted) | AddStep(weighted):
            return _all_here([push[:3] for push in weighted], pushes, workers)
        case HoldStep(push) | AssignStep(push):
            return _all_here([push], pushes, workers)
        case LoadStep(push):
            return _all_here([push], loads, workers)
        case PlaceStep(placement):
            return has_slices(placement)
        case AdmitStep() | DropStep() | LeaveStep() | CommitStep() | ModeStep() | CheckpointStep():
            return True
        case AskStep() | VectorsStep():
            return True
        case _:
            assert_never(step)


def _all_here(
    ids: Iterable[tuple[int, int, int]], here: Container[PushId], workers: Mapping[int, AttachedWorker]
) -> bool:
    """Whether every push has arrived, or never will because its worker is gone."""
    for worker, incarnation, sequence in ids:
        if PushId(worker, incarnation, sequence) in here:
            continue
        attached = workers.get(worker)
        if attached is not None and attached.incarnation == incarnation:
            return False
    return True
