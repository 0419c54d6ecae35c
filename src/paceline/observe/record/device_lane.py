"""DeviceLane: what a device did in the phases of a role's main thread, from marks in the order of its work.

A GPU works behind the CPU that feeds it. Where the main lane enters a phase, a mark goes into the stream of
the device's work; the device passes it when all work before it is done. The time from one mark to the next is
the device's time in that phase, with gaps in which it had nothing to do. Marks are read later, those that the
device has passed: no CPU waits for one.

Short steps are sampled, so that marks cost little of them. Sums of this lane are those of the sampled steps.
"""

import collections
from collections.abc import Callable
from time import perf_counter_ns
from typing import NamedTuple, Protocol, Self

from paceline.observe.record.phase import Phase

__all__ = ["DEVICE_LANE", "EVERY_NS", "DeviceLane", "TimeMark"]

DEVICE_LANE = 255
"""Number of the lane in a role's spans and totals, on disk."""
EVERY_NS = 20_000_000
"""A step is marked if the last marked one began at least this long ago. Some ten marks cost about 0.1 ms."""
_MOST_MARKS = 4096
"""Not passed yet; a device that is so far behind is marked no further."""


class TimeMark(Protocol):
    """A moment in the order of a device's work. It can be recorded again."""

    def record(self) -> bool:
        """Put it behind all work that the device was given so far. Does not block.

        Returns:
            False if that cannot be done now.
        """
        ...

    def passed(self) -> bool:
        """Whether the device has come to it. Does not block."""
        ...

    def ms_since(self, earlier: Self) -> float:
        """Milliseconds between two marks that the device has passed."""
        ...


class _Boundary(NamedTuple):
    """A phase begins on the device."""

    mark: TimeMark
    phase: int
    given: int
    """When the CPU put the mark there: the device passed it later."""
    step: int
    detailed: bool


class DeviceLane:
    """Of one role. The role's main thread only.

    Places on the run's clock are chained from mark to mark. No mark is passed before the CPU gave it or after
    it was seen passed; these two bounds anchor the chain, again and again.

    Args:
        new_mark: makes a mark.
        take: gets a span: phase, begin (of `perf_counter_ns`), length, step, whether it is kept by itself.
    """

    def __init__(
        self, new_mark: Callable[[], TimeMark], take: Callable[[int, int, int, int, bool], None]
    ) -> None:
        self._new_mark = new_mark
        self._take = take
        self._unused: list[TimeMark] = []
        self._pending: collections.deque[_Boundary] = collections.deque()
        self._last: _Boundary | None = None
        """The last boundary that was passed."""
        self._last_at = 0
        self._phase: int = Phase.IDLE
        """Of the last mark."""
        self._marks = False
        self._marked_at = -EVERY_NS
        self._step = 0
        self._detailed = True
        self._failed = False

    def begin_step(self, step: int, phase: int, *, detailed: bool) -> None:
        """A step begins. Decides whether it is marked, and reads marks that were passed.

        Args:
            phase: that the main lane is in.
            detailed: whether spans of this step are kept.
        """
        now = perf_counter_ns()
        self._step, self._detailed = step, detailed
        if now - self._marked_at >= EVERY_NS:
            self._marked_at = now
            self._marks = not self._failed
            self.enter(phase, now)
            self.drain()
        elif self._marks:
            self.enter(Phase.IDLE, now)  # what follows is not measured
            self._marks = self._phase != Phase.IDLE

    def enter(self, phase: int, now: int) -> None:
        """The main lane enters a phase.

        Args:
            now: of `perf_counter_ns`, read before this call.
        """
        if not self._marks or phase == self._phase:
            return
        if len(self._pending) >= _MOST_MARKS and phase != Phase.IDLE:
            return
        try:
            mark = self._unused.pop() if self._unused else self._new_mark()
            if not mark.record():
                self._unused.append(mark)
                return
        except RuntimeError:  # the script meets the same error at its next call, and says it
            self._give_up()
            return
        self._phase = phase
        self._pending.append(_Boundary(mark, phase, now, self._step, self._detailed))

    def drain(self) -> None:
        """Take the spans that have ended by now. Does not block."""
        try:
            while self._pending and self._pending[0].mark.passed():
                self._pass(self._pending.popleft())
        except RuntimeError:
            self._give_up()

    def _pass(self, boundary: _Boundary) -> None:
        last, at = self._last, boundary.given
        if last is not None:
            ns = max(0, round(1e6 * boundary.mark.ms_since(last.mark)))
            at = min(max(at, self._last_at + ns), perf_counter_ns())
            if last.phase != Phase.IDLE:
                self._take(last.phase, at - ns, ns, last.step, last.detailed)
            self._unused.append(last.mark)
        self._last, self._last_at = boundary, at

    def _give_up(self) -> None:
        """The device has failed: measure no more."""
        self._failed, self._marks = True, False
        self._pending.clear()
