"""What a mode promises, checked at the leader from what its decider says of the workers' clocks."""

from paceline.core.decider import Decider
from paceline.core.modes import Clocks, Rounds
from paceline.core.steps import ApplyStep, ReduceStep
from tests.explorer.model import Broken

__all__ = ["check_bounds", "check_update"]


def check_bounds(decider: Decider) -> None:
    """After every event: no worker that computes leads the slowest by more than the mode allows; drops are
    few."""
    mode, machine = decider.mode, decider.machine
    if not isinstance(machine, Clocks | Rounds):
        return
    clocks, active = machine.clocks, machine.active
    slowest = min((clocks[w] for w in active), default=0)
    for worker in active - machine.waiting.keys():
        if mode.bound is not None and mode.spare is None and clocks[worker] - slowest > mode.bound:
            raise Broken(
                f"in {mode} worker:{worker} computes at clock {clocks[worker]}, and the slowest is at "
                f"{slowest}"
            )
    if mode.spare is not None and not decider.totals.dropped <= (mode.spare + 2) * (decider.version + 1):
        raise Broken(f"in {mode} {decider.totals.dropped} pushes were dropped by version {decider.version}")


def check_update(decider: Decider, step: ApplyStep | ReduceStep) -> None:
    """An update has as many pushes as its mode says."""
    mode, machine = decider.mode, decider.machine
    if mode.spare is not None:
        least = max(1, len(machine.active) - mode.spare)
    else:
        least = min(mode.quorum, len(machine.active))
    if decider.several_optimizers or mode.grouped:
        return
    if len(step.pushes) < least:
        raise Broken(f"in {mode} an update has {len(step.pushes)} pushes, and {least} are due")
