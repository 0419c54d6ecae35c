"""When each worker's steps ended: written by the training scripts, read by the command that started them."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from paceline.exceptions import PacelineError

__all__ = ["StepTimes", "Stopwatch", "samples_per_s", "score_of", "step_times"]


@dataclass
class StepTimes:
    """Of one worker. Times are of the host's monotonic clock."""

    rank: int
    ends: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    score: float | None = None
    """The model's accuracy at the end, as the script measured it."""


class Stopwatch:
    """Notes the end of every step of this worker."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"steps-{rank:03}.json"
        self._times = StepTimes(rank)

    def step_ended(self, samples: int) -> None:
        """A step with so many samples has just ended."""
        self._times.ends.append(time.perf_counter())
        self._times.samples.append(samples)

    def write(self, score: float | None = None) -> None:
        """Write everything down."""
        self._times.score = score
        self._path.write_text(json.dumps(self._times.__dict__), encoding="utf-8")


def step_times(folder: Path) -> list[StepTimes]:
    """What all workers wrote, by rank."""
    return [
        StepTimes(**json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob("steps-*.json"))
    ]


def samples_per_s(workers: list[StepTimes]) -> float:
    """Samples a second of all workers together, while all of them were training.

    The first step of each worker warms up (memory, caches) and does not count.
    """
    begin = max((each.ends[0] for each in workers if each.ends), default=0.0)
    end = min((each.ends[-1] for each in workers if each.ends), default=0.0)
    counted = sum(
        samples
        for each in workers
        for at, samples in zip(each.ends, each.samples, strict=True)
        if begin < at <= end
    )
    if not counted:
        raise PacelineError("the workers made too few steps at the same time to measure their speed.")
    return counted / (end - begin)


def score_of(workers: list[StepTimes]) -> float:
    """The model's accuracy at the end, which worker 0 measured."""
    scores = [each.score for each in workers if each.score is not None]
    if not scores:
        raise PacelineError("no worker measured the model's accuracy.")
    return scores[0]
