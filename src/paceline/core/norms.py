"""Norms of gradients: which are absurd, and the norm of a whole update from the norms of its slices.

NormBound finds gradients that are absurd, though finite: a bound relative to what is usual in the run.

A fixed bound would need the user to know the norms of his model; this one needs only a factor. Everything
that workers push counts as usual, also what was refused: one worker that went wrong cannot move the median of
all, but when the norms of everybody change for good (another learning rate, a new kind of data) the bound
follows within half a window instead of refusing them for ever.

The norms are those that workers tell. It guards against a broken process, device or batch, not against liars.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

__all__ = ["NormBound", "NormBounds", "SliceNorms"]

WINDOW = 100
"""Pushes of all workers that say what is usual."""
LEAST = 20
"""Before so many nothing is refused: a run's first gradients are of all sizes."""


@dataclass
class NormBound:
    """Judges pushes by their norm."""

    factor: float
    """How many times the usual norm is absurd."""
    recent: list[float] = field(default_factory=list)
    """The last norms."""

    @property
    def usual(self) -> float | None:
        """The median of the last norms; None while there are too few."""
        return median(self.recent) if len(self.recent) >= LEAST else None

    def is_absurd(self, norm: float) -> bool:
        """Whether a push of this norm is to be refused. It counts from now on."""
        usual = self.usual
        if math.isfinite(norm):
            self.recent = [*self.recent[1 - WINDOW :], norm]
        # Where everything is zero there is no telling what is large.
        return usual is not None and usual > 0 and norm > self.factor * usual


@dataclass
class NormBounds:
    """Judges pushes by their norm, those of each optimizer by what is usual there."""

    factor: float | None = None
    """How many times the usual norm is absurd; None: none is."""
    bounds: dict[int, NormBound] = field(default_factory=dict)
    """By optimizer."""

    def absurd(self, optimizer: int, norm: float | None) -> float | None:
        """The usual norm, if a push of this norm is to be refused; None if not. It counts from now on."""
        if self.factor is None or norm is None:
            return None
        bound = self.bounds.setdefault(optimizer, NormBound(self.factor))
        usual = bound.usual
        return usual if bound.is_absurd(norm) else None


class SliceNorms:
    """Collects the norms of one update's slices from all servers, for `--clip-norm`.

    An update is named by its number in the order, which every server knows. A count of its own would not do:
    a server that joined later has executed fewer updates.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The update whose norms are awaited; None: of none."""
        self._squares: dict[int, float] = {}

    def expect(self, number: int) -> None:
        """The first half of this update is in the order."""
        self.number = number
        self._squares = {}

    def add(self, number: int, norms: Iterable[Any], slices: int) -> float | None:
        """A server's answer. Returns the update's norm once all slices are known, and expects nothing then.

        Args:
            number: the update that the server has reduced.
            norms: (slice, sum of squares) of what the server holds. Several servers may hold a slice.
            slices: how many slices there are.
        """
        if number != self.number:
            return None  # late: the copies of its slices were enough
        self._squares.update({int(i): float(x) for i, x in norms})
        if len(self._squares) < slices:
            return None
        self.number = None
        return math.sqrt(sum(self._squares[i] for i in sorted(self._squares)))
