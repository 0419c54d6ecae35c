"""How far the run is, as a worker knows: for `paceline.progress()` and for schedulers."""

from dataclasses import dataclass

__all__ = ["RunPlace", "RunProgress", "fraction_done"]


@dataclass(frozen=True)
class RunProgress:
    """How far the run is, of all workers together."""

    updates: int
    """Updates of the parameters; alone, steps of all optimizers."""
    samples: int
    """Samples that the updates were computed from, in all epochs."""
    epoch: int
    """The epoch that this worker is in, from 0."""
    fraction: float | None
    """From 0 to 1, the part of all samples of all epochs that is done. None where nobody knows how many there
    will be: the script has no prepared loader with a length, or does not use `paceline.epochs`."""


@dataclass(frozen=True)
class RunPlace:
    """How far the run is in its data.

    Args:
        done: samples that are through, in all epochs; of a batch sampler of the script's own, batches.
        whole: how many an epoch has.
        batches: how many batches of an epoch a worker gets if all are equally fast: `len(loader)`.
    """

    done: int
    whole: int
    batches: int


def fraction_done(at: RunPlace | None, epochs: int | None) -> float | None:
    """The part of so many epochs that is done, if both are known."""
    if at is None or epochs is None:
        return None
    return min(1.0, at.done / (at.whole * epochs)) if epochs else 1.0
