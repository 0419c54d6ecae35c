"""Spans: what every thread of a role did, from when to when.

A lane is in one phase at a time. `enter` ends that and begins the next, so the phases of a role's main lane
add up to its time, by construction. Sums of them are exact however long a run is; the spans themselves are
kept for every step at first, and for every second, fourth, … step when there are many.

Recording is two clock readings and a tuple a span. It is off (`NO_SPANS`) without --spans.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from paceline.observe.record.device_lane import DEVICE_LANE, DeviceLane, TimeMark
from paceline.observe.record.phase import Phase
from paceline.observe.record.tables import SPANS, TOTALS, RawTable

__all__ = ["NO_SPANS", "Lane", "Recorder", "recorder_of", "unix_clock_ns"]

BLOCKS = "PACELINE_SPANS_BLOCKS"
"""Set to n in the environment: record n steps, rest for n, and so on. Only benchmarks.tracing does that."""
FLUSH_S = 0.5
_TOTALS_EVERY = 1 / 2000
"""Sums are written this part of the time apart that they have been recorded for: every 0.5 s at first, every
22 s after 12 hours. So a file of them grows with the logarithm of the time."""
MOST_SPANS = 400_000
"""After this number of spans a role keeps only every second step, after as many again every fourth, …"""

_IDLE = Phase.IDLE
_OTHER = 4
"""Bits of a phase."""


def unix_clock_ns() -> int:
    """What to add to this host's monotonic clock to get Unix time."""
    return time.time_ns() - perf_counter_ns()


class Lane:
    """One thread's phases. Only that thread calls it."""

    __slots__ = (
        *("_began", "_bytes", "_other", "_phase", "_recorder", "_slice", "_sums", "_told"),
        *("device", "number"),
    )

    def __init__(self, recorder: "Recorder", number: int, phase: int = Phase.IDLE) -> None:
        self._recorder = recorder
        self.number = number
        self.device: DeviceLane | None = None
        """Follows this lane on a device."""
        self._phase = phase
        self._began = perf_counter_ns()
        self._bytes = 0
        self._other = self._slice = -1
        # By phase and, in the bits above it, the rank of the other role.
        self._sums: dict[int, list[int]] = {}
        self._told: dict[int, list[int]] = {}

    def enter(self, phase: int, other: int = -1, slice_: int = -1) -> int:
        """Begin a phase; returns the one that it ends.

        Args:
            other: rank of the role at the other end, or that is waited for.
            slice_: the one that it has to do with.
        """
        before = self._phase
        if phase == before and other == self._other and slice_ == self._slice:
            return before
        if self._recorder.resting:
            self._phase = phase
            return before
        now = perf_counter_ns()
        if before != _IDLE:
            self._record(now)
        self._phase, self._began, self._other, self._slice, self._bytes = phase, now, other, slice_, 0
        if self.device is not None:
            self.device.enter(phase, now)
        return before

    @property
    def phase(self) -> int:
        """That it is in."""
        return self._phase

    def took(self, phase: int, began: int, ns: int, step: int, detailed: bool) -> None:
        """Add a span that has ended, of a lane that enters no phases itself.

        Args:
            began: of `perf_counter_ns`.
            detailed: whether it is kept by itself, and not only added up.
        """
        sums = self._sums.setdefault(phase, [0, 0, 0])
        sums[0] += ns
        sums[1] += 1
        if detailed:
            self._recorder.rows.append((began, ns, 0, step, -1, -1, phase, self.number))

    def _record(self, now: int) -> None:
        phase, other = self._phase, self._other
        key, spent = phase + ((other + 1) << _OTHER), now - self._began
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = [0, 0, 0]
        sums[0] += spent
        sums[1] += 1
        sums[2] += self._bytes
        recorder = self._recorder
        if recorder.detailed:
            recorder.rows.append(
                (self._began, spent, self._bytes, recorder.step, self._slice, other, phase, self.number)
            )

    def carried(self, nbytes: int) -> None:
        """Add payload bytes to this phase."""
        self._bytes += nbytes

    def blame(self, other: int, seconds: float) -> None:
        """Attribute the first `seconds` of this phase to the role of rank `other`."""
        now, until = perf_counter_ns(), self._began + round(seconds * 1e9)
        phase = self._phase
        self._other = other
        self._record(min(now, until))
        self._began, self._other, self._bytes = min(now, until), -1, 0
        self._phase = phase

    def new_sums(self) -> list[tuple[int, int, list[int]]]:
        """Of all that ended since the last time: phase, other, and [ns, count, bytes].

        Another thread may be adding meanwhile: sums only grow, and what it adds now is told next time.
        """
        news = []
        for key, sums in list(self._sums.items()):
            now, before = list(sums), self._told.get(key, [0, 0, 0])
            if now != before:
                self._told[key] = now
                new = [a - b for a, b in zip(now, before, strict=True)]
                news.append((key & ((1 << _OTHER) - 1), (key >> _OTHER) - 1, new))
        return news


class Recorder:
    """A role's lanes, and the files that they end up in.

    Args:
        directory: the run's `raw/`.
        owner: as in the files' names: `worker-1.0`.
        clock_ns: from this host's monotonic clock to the controller's Unix time.
    """

    on = True

    def __init__(
        self,
        directory: Path,
        owner: str,
        *,
        clock_ns: int,
        phase: int = Phase.IDLE,
        most_spans: int = MOST_SPANS,
    ) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.step = 0
        self.detailed = True
        """Whether spans are kept now, and not only added up."""
        self.resting = False
        """Whether nothing is recorded now: for the benchmark of what recording costs."""
        self._blocks = int(os.environ.get(BLOCKS, "0"))
        self._clock_ns = clock_ns
        self._most = most_spans
        self._kept = 0
        self._every = 1
        self._flushed = time.perf_counter()
        self._spans = RawTable(directory, owner, SPANS)
        self._totals = RawTable(directory, owner, TOTALS)
        self._lanes: dict[str, Lane] = {}
        self._began = self._summed = self._flushed
        self._sums: dict[tuple[int, int, int], list[int]] = {}
        """Not written yet: [ns, count, bytes] by lane, phase and other."""
        self.main = self.lane("main", phase)

    def lane(self, name: str, phase: int = Phase.IDLE) -> Lane:
        """The lane of a thread; the next thread of that name goes on with it."""
        if name not in self._lanes:
            self._lanes[name] = Lane(self, min(len(self._lanes), DEVICE_LANE - 1), phase)
        return self._lanes[name]

    def follow_device(self, new_mark: Callable[[], TimeMark]) -> None:
        """From here on a second lane records what a device does in the phases of the main lane.

        Args:
            new_mark: makes a mark in the order of the device's work.
        """
        lane = self._lanes.setdefault("device", Lane(self, DEVICE_LANE))
        if self.main.device is None:
            self.main.device = DeviceLane(new_mark, lane.took)
            self.main.device.begin_step(self.step, self.main.phase, detailed=self.detailed)

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""
        self.step = step
        self.detailed = step % self._every == 0
        if self._blocks:
            self.resting = step // self._blocks % 2 == 1
        if self.main.device is not None and not self.resting:
            self.main.device.begin_step(step, self.main.phase, detailed=self.detailed)

    @property
    def due(self) -> bool:
        """Whether it is time to flush."""
        return time.perf_counter() - self._flushed > FLUSH_S

    def flush(self) -> dict[int, float]:
        """Write what there is. Returns the seconds of each phase of the main lane since the last time."""
        self._flushed = time.perf_counter()
        if self.main.device is not None:
            self.main.device.drain()
        rows, self.rows = self.rows, []
        if rows:
            spans = np.array(rows, SPANS.record)
            spans["start"] += self._clock_ns
            self._spans.append(spans)
            self._kept += len(rows)
            while self._kept > self._most:
                self._every *= 2
                self._kept -= self._most
        seconds: dict[int, float] = {}
        for lane in list(self._lanes.values()):
            number = lane.number
            for phase, other, new in lane.new_sums():
                sums = self._sums.setdefault((number, phase, other), [0, 0, 0])
                sums[:] = [a + b for a, b in zip(sums, new, strict=True)]
                if not number:
                    seconds[phase] = seconds.get(phase, 0.0) + new[0] / 1e9
        if self._flushed - self._summed >= _TOTALS_EVERY * (self._flushed - self._began):
            self._write_sums()
        return seconds

    def _write_sums(self) -> None:
        self._summed = self._flushed
        now = perf_counter_ns() + self._clock_ns
        rows = [
            (now, ns, nbytes, count, self.step, other, phase, number)
            for (number, phase, other), (ns, count, nbytes) in self._sums.items()
        ]
        self._sums.clear()
        self._totals.append(np.array(rows, TOTALS.record))

    @property
    def broken(self) -> OSError | None:
        """Why not everything is written, if so."""
        return self._spans.broken or self._totals.broken

    def close(self) -> None:
        """End every phase, and write it."""
        for lane in self._lanes.values():
            lane.enter(Phase.IDLE)
        self.flush()
        self._write_sums()
        self._spans.close()
        self._totals.close()


class _NoLane(Lane):
    """Records nothing."""

    def __init__(self) -> None:
        pass

    def enter(self, phase: int, other: int = -1, slice_: int = -1) -> int:
        return phase

    def carried(self, nbytes: int) -> None:
        pass

    def blame(self, other: int, seconds: float) -> None:
        pass


class _NoRecorder(Recorder):
    on = False
    due = False
    broken = None

    def __init__(self) -> None:
        self.main = _NoLane()

    def lane(self, name: str, phase: int = Phase.IDLE) -> Lane:
        return self.main

    def follow_device(self, new_mark: Callable[[], TimeMark]) -> None:
        pass

    def begin_step(self, step: int) -> None:
        pass

    def flush(self) -> dict[int, float]:
        return {}

    def close(self) -> None:
        pass


NO_SPANS: Recorder = _NoRecorder()
"""For runs without spans: every call costs next to nothing and does nothing."""


def recorder_of(directory: str | None, owner: str, *, clock_ns: int, phase: int = Phase.IDLE) -> Recorder:
    """A role's recorder; one that records nothing without a directory."""
    if directory is None:
        return NO_SPANS
    return Recorder(Path(directory), owner, clock_ns=clock_ns, phase=phase)
