"""Which gradients are absurd, though finite: a bound on their norm, relative to what is usual in the run.

A fixed bound would need the user to know the norms of his model; this one needs only a factor. Everything
that workers push counts as usual, also what was refused: one worker that went wrong cannot move the median of
all, but when the norms of everybody change for good (another learning rate, a new kind of data) the bound
follows within half a window instead of refusing them for ever.

The norms are those that workers tell. It guards against a broken process, device or batch, not against liars.
"""

import math
from statistics import median

__all__ = ["NormBound"]

WINDOW = 100
"""Pushes of all workers that say what is usual."""
LEAST = 20
"""Before so many nothing is refused: a run's first gradients are of all sizes."""


class NormBound:
    """Judges pushes by their norm.

    Args:
        factor: how many times the usual norm is absurd.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._recent: list[float] = []

    @property
    def usual(self) -> float | None:
        """The median of the last norms; None while there are too few."""
        return median(self._recent) if len(self._recent) >= LEAST else None

    def is_absurd(self, norm: float) -> bool:
        """Whether a push of this norm is to be refused. It counts from now on."""
        usual = self.usual
        if math.isfinite(norm):
            self._recent = [*self._recent[1 - WINDOW :], norm]
        # Where everything is zero there is no telling what is large.
        return usual is not None and usual > 0 and norm > self.factor * usual
