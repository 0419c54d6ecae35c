"""Divergence: sees from a run's first losses and gradient norms on that its training runs away.

A loss is compared with the first ones, not with the lowest: a loss that has become small swings by many times
itself. It diverges if values in a row are all far above the first ones: the further, the fewer it takes. Each
worker is judged by its own values, and most of the workers must agree, so that one whose process or data are
broken is not taken for the run. Losses of parts (a critic's, a generator's) rise in good runs; of them only
NaN and Inf count. So it is with all losses of a script that also logs a reward, an accuracy or the like,
while that is clearly better than at first.

A script that logs no loss is judged by the norms of the gradients, which swing more and must rise further,
and in any case by the pushes: if nearly all hold NaN or Inf, nothing is learned any more.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from statistics import median

from paceline.core.modes.mode_spec import ModeSpec

__all__ = ["Divergence", "explained", "is_loss"]

_FIRST = 3
"""Number of first values that say what is usual."""
_TIERS = ((3, 1e4), (6, 100.0), (15, 10.0))
"""Pairs (number, factor): a loss diverges when this number of values in a row are this factor above the first
ones."""
_NORM_TIERS = ((3, 1e6), (6, 1e4), (15, 1e3))
_HUGE = 1e30
"""Beyond this a value is as bad as Inf."""
_SUSPECT = 3.0
"""A value this many times the first ones is not good, though it proves nothing."""
_FAR = 10.0
"""A last loss of this many times the first is far above it."""
_PUSHES, _REFUSED = 16, 0.8
"""Number of pushes, and the share of them that must be refused: most workers push nothing but NaN and Inf."""
_BETTER = 1.5
"""A reward or an accuracy this many times its first is clearly better."""
_SILENT = 20
"""A worker that has not logged while each of the others did so this many times has ended, or logs no more."""
_STALE = 0.5
"""A mean staleness below this explains nothing."""

_LOSS = frozenset({"loss", "losses", "nll", "mse", "mae", "rmse", "error", "objective", "perplexity", "ppl"})
_PLAIN = frozenset(
    {"train", "training", "batch", "step", "epoch", "mean", "avg", "average", "total", "running", "ce"}
    | {"cross", "entropy", "xent", "smooth", "smoothed", "ema", "sum", "raw", "l1", "l2", "huber"}
)
"""Words beside those: the loss of the whole model all the same."""
_UP = frozenset({"reward", "rewards", "return", "returns", "score", "accuracy", "acc", "top1", "f1", "auc"})


@cache
def is_loss(name: str) -> bool:
    """Whether a metric is a loss by its name: `loss`, `train/loss`, `critic_loss`."""
    return bool(_words(name) & _LOSS)


@cache
def _words(name: str) -> frozenset[str]:
    return frozenset(word for word in re.split(r"[^a-z0-9]+", name.lower()) if word)


class Divergence:
    """Feed it what workers log, push and refuse, and ask it often: `seen` says whether the run diverges now.
    Feeding it costs little, and asking some time for every worker. Not thread-safe.

    Args:
        first: `first` of an earlier start of the run: a resumed run is judged by how it began.
        version: that the run goes on from.
    """

    def __init__(self, first: Mapping[str, float] | None = None, version: int = 0) -> None:
        self._curves: dict[str, _Curve] = {}
        self._norms = _Curve(_NORM_TIERS)
        self._better: dict[str, tuple[list[float], deque[float]]] = {}
        self._pushes: deque[tuple[int, int]] = deque()
        """(applied, refused) lately, together at least as many as are looked at."""
        self._good_version = self._version = version
        self._new = False
        for name, scale in (first or {}).items():
            self._curve(name).scale = scale

    @property
    def first(self) -> dict[str, float]:
        """What is usual at the beginning, by loss, as far as it is known."""
        return {name: curve.scale for name, curve in self._curves.items() if curve.scale}

    def restart(self, version: int) -> None:
        """The run went back to this version: what came since says nothing any more."""
        for curve in [*self._curves.values(), self._norms]:
            curve.courses.clear()
        self._better.clear()
        self._pushes.clear()
        self._good_version = self._version = version
        self._new = False

    def logged(self, worker: int, metrics: Mapping[str, float], version: int) -> None:
        """A worker's script logged these, when the run was at about this version."""
        for name, value in metrics.items():
            words = _words(name)
            if words & _LOSS:
                self._curve(name).add(worker, value)
            elif words & _UP and math.isfinite(value):
                begin, lately = self._better.setdefault(name, ([], deque(maxlen=_FIRST)))
                if len(begin) < _FIRST:
                    begin.append(value)
                lately.append(value)
        self._version, self._new = version, True

    def norm(self, worker: int, value: float, version: int) -> None:
        """A worker told the norm of a gradient."""
        self._norms.add(worker, value)
        self._version, self._new = version, True

    def pushes(self, applied: int, refused: int) -> None:
        """Count the pushes that were applied since the last call, and those refused for NaN or Inf."""
        self._pushes.append((applied, refused))
        while sum(map(sum, self._pushes)) - sum(self._pushes[0]) >= _PUSHES:
            self._pushes.popleft()

    def _curve(self, name: str) -> "_Curve":
        if name not in self._curves:
            whole = _words(name) <= _LOSS | _PLAIN
            self._curves[name] = _Curve(_TIERS if whole else ())
        return self._curves[name]

    @property
    def _main(self) -> dict[str, "_Curve"]:
        """The losses of the whole model."""
        return {name: curve for name, curve in self._curves.items() if curve.tiers and curve.courses}

    @property
    def _improves(self) -> bool:
        """Whether a reward, an accuracy or the like is clearly better than at first."""
        for begin, lately in self._better.values():
            start, now = median(begin), median(lately)
            if len(lately) == _FIRST and now > start + (_BETTER - 1) * abs(start):
                return True
        return False

    @property
    def good_version(self) -> int:
        """Up to here nothing was wrong: what was kept of the model by then is good."""
        if self._new:
            self._new = False
            curves = self._main.values() or [self._norms]
            if not any(curve.suspect for curve in curves) and not self._refused:
                self._good_version = max(self._good_version, self._version)
        return self._good_version

    @property
    def _refused(self) -> bool:
        applied, refused = (sum(each) for each in zip(*self._pushes, strict=True)) if self._pushes else (0, 0)
        return applied + refused >= _PUSHES and refused > _REFUSED * (applied + refused)

    @property
    def seen(self) -> str | None:
        """That the run diverges now, as the beginning of a sentence: `the loss rose from 19 to 2e+06`."""
        self.good_version  # noqa: B018 - as of now
        improves = self._improves
        for name, curve in self._curves.items():
            if curve.diverges(only_bad=improves):
                return curve.said(_called(name))
        if not self._main and self._norms.diverges():
            return self._norms.said("the norm of the gradients")
        if self._refused:
            return "nearly all pushes hold NaN or Inf, and are refused"
        return None

    @property
    def outcome(self) -> str | None:
        """Of a run that is over: that its last losses are not finite, or far above the first ones."""
        improves = self._improves
        for name, curve in self._curves.items():
            if curve.ended_badly(only_bad=improves or not curve.tiers):
                return curve.said(_called(name))
        return None if self._main else self.seen


class _Curve:
    """One loss, of all workers."""

    def __init__(self, tiers: tuple[tuple[int, float], ...]) -> None:
        self.tiers = tiers
        self.scale = 0.0
        """What is usual at the beginning; 0: not known."""
        self.courses: dict[int, _Course] = {}
        self._begin: list[float] = []
        self._count = 0

    def add(self, worker: int, value: float) -> None:
        bad = not abs(value) < _HUGE
        if not self.scale and value and not bad:
            self._begin.append(abs(value))
            if len(self._begin) == _FIRST:
                self.scale = max(self._begin)
        elif value < 0 and not bad:  # it may have begun near 0, which says nothing about what is large
            self.scale = max(self.scale, -value)
        self._count += 1
        course = self.courses.setdefault(worker, _Course())
        course.last.append(math.inf if bad else value)
        course.at, course.count = self._count, course.count + 1
        course.finite = course.finite or not bad

    @property
    def _usual(self) -> float:
        """The same as early as possible."""
        return self.scale or (self._begin[0] if self._begin else math.inf)

    @property
    def suspect(self) -> bool:
        """Whether the last value of a worker was not good."""
        limit = _SUSPECT * self._usual if self.tiers else _HUGE
        return any(course.above(1, limit) for course in self._present)

    @property
    def _present(self) -> list["_Course"]:
        oldest = self._count - _SILENT * len(self.courses)
        return [course for course in self.courses.values() if course.at > oldest]

    def diverges(self, *, only_bad: bool = False) -> bool:
        """Whether most workers' last values are."""
        tiers = ((_TIERS[0][0], math.inf), *(() if only_bad or not self.scale else self.tiers))
        return self._most(lambda course: any(course.above(k, f * self.scale) for k, f in tiers))

    def ended_badly(self, *, only_bad: bool) -> bool:
        """Whether most workers ended far above the first ones."""

        def badly(course: _Course) -> bool:
            if course.last[-1] == math.inf:
                return True
            if only_bad or course.count < 2:
                return False
            enough = course.count >= 2 * _FIRST and course.above(_FIRST, _FAR * self._usual)
            return enough or course.last[-1] > _FAR**2 * self._usual

        return self._most(badly)

    def _most(self, is_so: "Callable[[_Course], bool]") -> bool:
        present = self._present
        return 2 * sum(map(is_so, present)) > len(present)

    def said(self, name: str) -> str:
        now = max(course.last[-1] for course in self._present)
        if not any(course.finite for course in self.courses.values()) and not self.scale:
            return f"{name} was NaN or Inf from the beginning"
        first = f"{self._usual:.3g}"
        return (
            f"{name} became NaN or Inf (at first it was {first})"
            if now == math.inf
            else (f"{name} rose from {first} to {now:.3g}")
        )


class _Course:
    """The last values of one worker."""

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=max(k for k, _ in (*_TIERS, *_NORM_TIERS)))
        self.count = self.at = 0
        self.finite = False

    def above(self, number: int, limit: float) -> bool:
        """Whether this number of last values are all above the limit, or bad."""
        if len(self.last) < number:
            return False
        return all(self.last[-i] > limit or self.last[-i] == math.inf for i in range(1, number + 1))


def _called(name: str) -> str:
    return "the loss" if name == "loss" else f"the metric {name!r}"


def explained(
    seen: str, mode: ModeSpec, *, workers: int, staleness: float | None, guarded: bool = False
) -> str:
    """What was seen, its likely cause and what to change, in whole sentences.

    Args:
        seen: as `Divergence.seen` says it.
        staleness: mean, of the pushes so far; None: not known yet.
        guarded: the run has a guard, which need not be recommended.
    """
    text = f"The run diverged: {seen}."
    if "from the beginning" in seen:
        return (
            f"{text} Look in the data, the model and the loss for what is no number from the first step on."
        )
    late = mode.spare is None if staleness is None else staleness >= _STALE
    if workers > 1 and (late or mode.name == "hogwild"):
        when = "late" if not staleness else f"{staleness:.1f} updates late on average"
        if mode.name == "hogwild":
            text += f" {workers} workers write at once, and nothing is damped."
        else:
            text += (
                f" With {workers} workers in {mode} gradients are applied {when}: that acts as a higher "
                "learning rate would."
            )
        ways = []
        if mode.payload == "gradient" and mode.spare is None and mode.damping == "none":
            ways.append("damp late gradients (--damping momentum)")
        if mode.tighter() is not None:
            tight = "bsp" if mode.tighter() == ModeSpec(bound=0, spare=0) else "ssp:1 or bsp"
            ways.append(f"wait more ({tight})")
            if not guarded:
                ways.append("let --guard go back and do so by itself")
        if mode.local and mode.push_every > 1:
            ways.append("exchange more often")
        ways += ["use fewer workers", "lower the learning rate"]
        return f"{text} To change that: {_or(ways)}."
    ways = ["lower the learning rate", "warm it up", "clip the gradients"]
    if mode.local and mode.push_every > 1:
        ways.append("exchange more often")
    return f"{text} The learning rate is the likely cause: {_or(ways)}."


def _or(ways: list[str]) -> str:
    return f"{', '.join(ways[:-1])} or {ways[-1]}"
