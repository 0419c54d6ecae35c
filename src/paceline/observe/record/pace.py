"""How fast a run trains. This is the one definition of samples and steps a second, wherever they are shown.

A run trains from its first step's begin (a worker asks for its first batch) to its last step's end. Samples
count when their gradient is applied. Start-up comes before, and the first step, which may compile, is in it
and shown apart. Of a resumed run these are the figures of its last start; `total` has those of all.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.observe.record.status import RunStatus

__all__ = ["TrainingPace", "pace_of"]


@dataclass(frozen=True)
class TrainingPace:
    """Samples and steps, and the time that they took."""

    samples: int = 0
    steps: int = 0
    seconds: float = 0.0
    """From the first step's begin to the last step's end."""
    samples_seconds: float | None = None
    """While the run goes on: seconds up to the last report of samples. None: equal to `seconds`."""

    @property
    def samples_per_s(self) -> float:
        seconds = self.seconds if self.samples_seconds is None else self.samples_seconds
        return self.samples / seconds if seconds > 0 else 0.0

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds if self.seconds > 0 else 0.0


def pace_of(status: "RunStatus", *, total: bool = False) -> TrainingPace:
    """Of this start of the run, or of all its starts together."""
    # A run of an older version has no ended_s: it was timed from its first update on.
    ended_s = status.ended_s or status.elapsed_s
    seconds = max(0.0, ended_s - status.startup_s)
    until_s = seconds
    if status.ended_s and not status.told_all:
        # Samples are told now and then: the time to go with them ends when they were told.
        until_s = max(0.0, min(ended_s, status.progressed_s) - status.startup_s)
    samples = max(0, status.samples - status.samples_before)
    steps = max(0, status.steps - status.steps_before)
    if total:
        samples, steps = status.samples, status.steps
        seconds, until_s = seconds + status.earlier_s, until_s + status.earlier_s
    return TrainingPace(samples, steps, seconds, until_s)
