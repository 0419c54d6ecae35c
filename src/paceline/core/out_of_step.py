"""OutOfStep: in a mode with rounds, workers step the run's optimizers in different orders."""

from paceline.core.modes.machine import Rounds
from paceline.core.modes.mode_spec import ModeSpec
from paceline.exceptions import PacelineError

__all__ = ["OUT_OF_STEP", "OutOfStep", "check_in_step", "mixed_round"]

OUT_OF_STEP = 256
"""Number of rounds in a row with different optimizers after which workers do not run the same loop."""


class OutOfStep(PacelineError):
    """In a mode with rounds, workers step the run's optimizers in different orders."""


def check_in_step(machine: Rounds, mode: ModeSpec) -> None:
    """Raise OutOfStep if the workers have stepped different optimizers for many rounds."""
    if machine.mixed < OUT_OF_STEP:
        return
    clocks = machine.clocks
    who = ", ".join(
        f"worker:{worker} steps optimizer {optimizer} (step {clocks.get(worker, 0)})"
        for worker, optimizer in sorted(machine.last_mix.items())
    )
    raise OutOfStep(
        f"for {machine.mixed} rounds the workers have stepped different optimizers at the same time: "
        f"{who}. In mode {mode} all workers must step the optimizers in the same order: look for "
        "what in the loop depends on the rank or on a worker's own data, or use mode asp."
    )


def mixed_round(machine: Rounds) -> str:
    """Tell the user of a round in which workers stepped different optimizers."""
    who = ", ".join(f"worker:{w} optimizer {k}" for w, k in sorted(machine.last_mix.items()))
    return (
        f"at version {machine.version} workers stepped different optimizers at the same time ({who}). Each "
        "update is made of the pushes for one optimizer, and the other workers wait until all are in step "
        "again: this happens after a worker was replaced"
    )
