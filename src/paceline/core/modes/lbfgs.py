"""Sandblaster's coordinator: L-BFGS on shards, by scalars only (Dean et al., 2012).

Every server has its part of some named vectors. The coordinator sends all of them the same list of
operations, adds up their partial dot products, and never sees a vector. All that the two-loop recursion
needs of the history is dot products, so they are asked for together (Chen et al., 2014), and an iteration
is one round trip, then one list that nobody answers:

    w's mean gradient is in g ──► ask() ──answers──► tell() ──ops──► w is the next point to evaluate

    ["copy", x, z]                        z = x
    ["scale", a, z]                       z = a·z
    ["combine", z, [[a, x], [b, y], …]]   z = a·x + b·y + …, where z is none of the others
    ["dot", x, y]  ["abs_sum", x]  ["abs_max", x]      one answer each

No operation needs an answer of its own list, so a server may run a list slice by slice, while a slice is
in the cache.

Vectors: w, the parameters; g, their mean gradient; x and p, parameters and gradient where the present
direction starts; s0 y0 s1 y1 …, the history's pairs, and one pair of the direction and scratch.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Literal

from paceline.exceptions import UsageError

__all__ = ["Answer", "Lbfgs", "Move", "Ops", "merge_answers", "num_answers"]

Ops = list[list[Any]]
"""Operations in their order, as JSON."""

Answer = float | None
"""What a reduction came to; None if that is not finite, which JSON cannot say."""

_REDUCTIONS = ("dot", "abs_sum", "abs_max")

_MIN_CURVATURE = 1e-10
"""A pair is kept if y·s is above this, as in torch."""

_MAX_SLOPE = 0.9
"""A point is too far if the slope there is positive and above 0.9 of what it was negative at the start: one
of Hager and Zhang's approximate Wolfe conditions (2005). On a quadratic function it says that the point is
lower than the start by at least 0.05 times length and slope. The other one, that a point is not too near, is
not worth a pass over the data: the next direction is longer by itself."""

_SHRINK = 0.1
"""A trial is at least this much of the one before."""


def num_answers(ops: Ops) -> int:
    """How many answers a server gives to these operations. With 0 there is nothing to wait for."""
    return sum(op[0] in _REDUCTIONS for op in ops)


def merge_answers(ops: Ops, parts: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The answers for whole vectors from those of all shards, in whatever order the shards come."""
    merged: list[Answer] = []
    reductions = [op[0] for op in ops if op[0] in _REDUCTIONS]
    for reduction, values in zip(reductions, zip(*parts, strict=True), strict=True):
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            merged.append(None)
        else:
            merged.append(max(known) if reduction == "abs_max" else sum(sorted(known)))
    return merged


@dataclass(frozen=True, slots=True)
class Move:
    """What the gradient at a point led to.

    | outcome   | the point                            | w is now                                    |
    |-----------|--------------------------------------|---------------------------------------------|
    | moved     | is accepted                          | one step along a new direction              |
    | searching | is too far, or its gradient unusable | nearer on the same line                     |
    | restarted | was the last trial of the line       | where the line starts, without a history    |
    | converged | is a minimum within the tolerances   | as it was                                   |
    | stuck     | has an unusable gradient, but is not a trial: no step led here | as it was         |
    """

    ops: Ops
    """For all servers, without answers. Then w is the next point to evaluate."""
    outcome: Literal["moved", "searching", "restarted", "converged", "stuck"]


@dataclass(slots=True)
class _Pair:
    """A step s and the change y of the gradient over it."""

    slot: int
    sy: list[float]
    """s·y for the s of every pair from the oldest to this, and this one's y."""
    yy: list[float]
    """y·y for the y of every pair from the oldest to this, and this one's y."""


@dataclass(slots=True)
class _Trial:
    """A step whose gradient is not known yet: w = x + length · (s of its slot)."""

    slot: int
    slope: float
    """Of the function along the direction, where it starts: negative."""
    length: float
    number: int = 1


@dataclass(slots=True)
class _Reading:
    """One round's answers. Lists are by pair, oldest first, the trial's own last."""

    abs_max: float
    abs_sum: float
    gg: float
    gs: list[float]
    gy: list[float]
    sy: list[float]
    """With the trial's y, and so are those in `yy`."""
    yy: list[float]


class Lbfgs:
    """One minimisation: `ask` and `tell` for every gradient, which is one pass over the data.

    With `line_search=None` it takes the steps of torch.optim.LBFGS with max_iter=1. Both break down where
    that full step leads away, so by default a step is shortened until the slope along it says that it went
    down: surely so on a convex quadratic function, and on others as far as slopes can tell. They cannot
    tell a valley from the plateau behind the next ridge. The very first step then has length lr (Nocedal and
    Wright). torch's, g / Σ|g|, is so short in a large model that ten passes over the data gain nothing.

    Args:
        lr: the length of a direction's first trial; 1 is the method's own.
        history: pairs to keep. Servers hold 2 · history + 6 vectors.
        line_search: None takes every point whose gradient is finite.
        tolerance_grad: converged when no element of the gradient is larger.
        tolerance_change: converged when the slope along a new direction is no steeper.
        max_trials: points of one line to evaluate before it is given up.
    """

    def __init__(
        self,
        *,
        lr: float = 1.0,
        history: int = 10,
        line_search: Literal["backtrack"] | None = "backtrack",
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        max_trials: int = 10,
    ) -> None:
        if history < 1:
            raise UsageError(f"L-BFGS needs a history of at least 1 pair, got history={history}")
        if not 0 < lr < math.inf:
            raise UsageError(f"L-BFGS needs a positive learning rate, got lr={lr}; 1 suits most problems")
        if line_search not in ("backtrack", None):
            raise UsageError(f"L-BFGS has line_search='backtrack' and None, got {line_search!r}")
        self.lr = lr
        """May be changed between two gradients."""
        self.iterations = 0
        """Directions taken so far."""
        self._history = history
        self._searches = line_search is not None
        self._tolerance_grad = tolerance_grad
        self._tolerance_change = tolerance_change
        self._max_trials = max_trials
        self._first = self._new = True
        self._pairs: list[_Pair] = []
        self._diagonal = 1.0
        self._trial: _Trial | None = None

    # One gradient

    def ask(self) -> Ops:
        """What to ask when the mean gradient at w is in g. Changes nothing here: it may be asked again."""
        ops: Ops = [["abs_max", "g"], ["abs_sum", "g"], ["dot", "g", "g"]]
        slots = [pair.slot for pair in self._pairs]
        others = ["g"]
        if self._trial is not None:
            change = f"y{self._trial.slot}"
            ops.insert(0, ["combine", change, [[1.0, "g"], [-1.0, "p"]]])
            slots.append(self._trial.slot)
            others.append(change)
        return ops + [["dot", f"{v}{slot}", other] for slot in slots for v in "sy" for other in others]

    def tell(self, answers: Sequence[Answer], *, whole: bool = True) -> Move:
        """Decide what to do about the gradient.

        Args:
            answers: to what `ask` asked, of all shards (see `merge_answers`).
            whole: False says that g lacks samples whose gradient was not finite.
        """
        reading = self._read(answers) if whole else None
        trial = self._trial
        if reading is not None and (trial is None or self._accepts(trial, reading.gs[-1])):
            return self._go_on(reading, [] if trial is None else self._close(trial, reading))
        if trial is None:
            return Move([], "stuck")
        if trial.number >= self._max_trials:
            ops = self.rewind()
            self.restart()
            self._new = False
            return Move(ops, "restarted")
        trial.length *= _SHRINK if reading is None else _shorter(trial, reading.gs[-1])
        trial.number += 1
        return Move([_step(trial)], "searching")

    def rewind(self) -> Ops:
        """Put w back to the last point that was accepted, for an end between two gradients.

        Without it w is one step on, where the gradient is not known.
        """
        ops: Ops = [] if self._trial is None else [["copy", "x", "w"]]
        self._trial = None
        return ops

    def restart(self) -> None:
        """Forget the history and begin anew at w, which was set from outside."""
        self._first = self._new = True
        self._pairs.clear()
        self._diagonal = 1.0
        self._trial = None

    # State

    @property
    def vectors(self) -> tuple[str, ...]:
        """Beside w and g, what servers must keep to go on from here. Others may be dropped."""
        slots = [pair.slot for pair in self._pairs]
        kept = [f"{v}{slot}" for slot in slots for v in "sy"]
        return (*kept, f"s{self._trial.slot}", "p", "x") if self._trial is not None else tuple(kept)

    def snapshot(self) -> dict[str, Any]:
        """The scalars, as JSON; they belong to the vectors as they are before an `ask` or after a `tell`."""
        return {
            "first": self._first,
            "new": self._new,
            "iterations": self.iterations,
            "diagonal": self._diagonal,
            "pairs": [asdict(pair) for pair in self._pairs],
            "trial": None if self._trial is None else asdict(self._trial),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot. A shorter history than then keeps the newest pairs."""
        self._first = snapshot["first"]
        self._new = snapshot.get("new", self._first)  # not in checkpoints of earlier versions
        self.iterations = snapshot["iterations"]
        self._diagonal = snapshot["diagonal"]
        self._pairs = [_Pair(p["slot"], list(p["sy"]), list(p["yy"])) for p in snapshot["pairs"]]
        self._trial = None if snapshot["trial"] is None else _Trial(**snapshot["trial"])
        while len(self._pairs) > self._history:
            self._drop_oldest()

    # How it goes

    def _read(self, answers: Sequence[Answer]) -> _Reading | None:
        numbers = [number for number in answers if number is not None and math.isfinite(number)]
        if len(numbers) < len(answers):
            return None
        abs_max, abs_sum, gg, *dots = numbers
        if self._trial is None:
            return _Reading(abs_max, abs_sum, gg, gs=dots[0::2], gy=dots[1::2], sy=[], yy=[])
        return _Reading(abs_max, abs_sum, gg, gs=dots[0::4], sy=dots[1::4], gy=dots[2::4], yy=dots[3::4])

    def _accepts(self, trial: _Trial, slope: float) -> bool:
        return not self._searches or slope <= -_MAX_SLOPE * trial.slope

    def _close(self, trial: _Trial, reading: _Reading) -> Ops:
        """The trial becomes a pair of the history if the function curves upwards there."""
        self._trial = None
        gs, gy = reading.gs.pop(), reading.gy.pop()
        curvature = reading.sy.pop() * trial.length
        if curvature <= _MIN_CURVATURE:
            return []
        self._pairs.append(_Pair(trial.slot, [*reading.sy, curvature], reading.yy))
        reading.gs.append(gs * trial.length)
        reading.gy.append(gy)
        self._diagonal = curvature / reading.yy[-1]
        if len(self._pairs) > self._history:
            self._drop_oldest()
            del reading.gs[0], reading.gy[0]
        return [["scale", trial.length, f"s{trial.slot}"]]

    def _drop_oldest(self) -> None:
        del self._pairs[0]
        for pair in self._pairs:
            del pair.sy[0], pair.yy[0]

    def _go_on(self, reading: _Reading, ops: Ops) -> Move:
        if reading.abs_max <= self._tolerance_grad:
            return Move(ops, "converged")
        terms, slope = self._direction(reading)
        if self._pairs and (not math.isfinite(slope) or (self._searches and slope >= 0)):
            self.restart()  # rounding has spoilt the history
            self._new = False
            terms, slope = [[-1.0, "g"]], -reading.gg
        length = self.lr
        if self._first:
            length *= min(1.0, 1.0 / reading.abs_sum)
            if self._searches and self._new and reading.gg > 0:
                length = self.lr / math.sqrt(reading.gg)
        self._first = self._new = False
        self.iterations += 1
        if not slope <= -self._tolerance_change:
            return Move(ops, "converged")
        used = {pair.slot for pair in self._pairs}
        slot = next(number for number in count() if number not in used)
        self._trial = _Trial(slot, slope, length)
        start: Ops = [["combine", f"s{slot}", terms], ["copy", "w", "x"], ["copy", "g", "p"]]
        return Move([*ops, *start, _step(self._trial)], "moved")

    def _direction(self, reading: _Reading) -> tuple[list[list[Any]], float]:
        """The two loops on scalars: the direction as a sum of vectors, and the slope along it.

        What torch has in one buffer is here first q = -g - Σ alpha·y, then h·q + Σ share·s.
        """
        pairs, h = self._pairs, self._diagonal
        alpha = [0.0] * len(pairs)
        for i in reversed(range(len(pairs))):
            newer = [alpha[j] * pairs[j].sy[i] for j in range(i + 1, len(pairs))]
            alpha[i] = -sum([reading.gs[i], *newer]) / pairs[i].sy[i]
        share = [0.0] * len(pairs)
        for i, pair in enumerate(pairs):
            with_y = [pair.yy[j] if j <= i else pairs[j].yy[i] for j in range(len(pairs))]
            q = -sum([reading.gy[i], *(a * yy for a, yy in zip(alpha, with_y, strict=True))])
            older = [share[j] * pair.sy[j] for j in range(i)]
            share[i] = alpha[i] - sum([h * q, *older]) / pair.sy[i]
        terms: list[list[Any]] = [[-h, "g"]]
        slopes = [-h * reading.gg]
        for i, pair in enumerate(pairs):
            terms += [[-h * alpha[i], f"y{pair.slot}"], [share[i], f"s{pair.slot}"]]
            slopes += [-h * alpha[i] * reading.gy[i], share[i] * reading.gs[i]]
        return terms, sum(slopes)


def _step(trial: _Trial) -> list[Any]:
    return ["combine", "w", [[1.0, "x"], [trial.length, f"s{trial.slot}"]]]


def _shorter(trial: _Trial, slope: float) -> float:
    """The part to go of a trial that was too far.

    It ends where a straight line through both slopes is zero, or after a half, a quarter, an eighth, … if
    that is less: slopes that do not grow with the distance say nothing about where the valley is.
    """
    zero = trial.slope / (trial.slope - slope)
    return max(_SHRINK, min(zero, 0.5**trial.number))
