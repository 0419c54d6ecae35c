"""Warnings while a run goes on: what costs it time or accuracy now, and what to do about it."""

import math
import re
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median, variance

from paceline.observe.analyse import wording
from paceline.observe.analyse.window import Window, WorkerRates
from paceline.observe.record.status import RunStatus

__all__ = ["Watch"]

WINDOW_S = 10.0
LOSS_WINDOW_S = 30.0
LEAST_TRAINED_S = 10.0
LEAST_STEPS = 20
"""Number of steps before the first warning: the first steps are not typical."""

IDLENESS = 0.3
LOADING = 0.3
SLOWER = 2.0
_FEW = 3
"""Number of steps or updates below which their duration is not judged."""
_LOSS_VALUES = 12
_RISE = 0.05
_ERRORS = 4
"""A loss rises if its mean rises by this share and by this number of standard errors: it is tested every
second, so chance has many chances."""

_NEVER_WAITS = re.compile(r"(hybrid:)?(asp|downpour|easgd|eamsgd|hogwild|dogwild)\b")
_BOUND = re.compile(r"(?:hybrid:)?(?:ssp:(\d+)|(asp|downpour)\b)")


class Watch:
    """Takes one status after another and returns warnings, each at most once a run.

    Pure: `elapsed_s` is the clock. Rates are of the last 10 s, or of as many as a few steps take.
    """

    def __init__(self) -> None:
        self._window = _new_window()
        self._mode = ""
        self._processes: dict[int, int | None] = {}
        self._losses: deque[tuple[float, float]] = deque()
        self._said: set[str] = set()
        self._slow: set[int] = set()

    def see(self, status: RunStatus) -> list[str]:
        """Take a newer status, about once a second. Returns new warnings, mostly none."""
        if status.state != "running":
            self._begin_again(status)
            return []
        clock_began_again = self._losses and status.elapsed_s < self._losses[-1][0]
        if status.mode != self._mode or _processes(status) != self._processes or clock_began_again:
            self._begin_again(status)
        self._window.see(status)
        self._see_loss(status)
        trained_s = status.elapsed_s - status.startup_s
        steps = max((worker.clock for worker in status.workers.values()), default=0)
        if trained_s < LEAST_TRAINED_S or steps < LEAST_STEPS:
            return []
        if self._window.whole or self._window.seconds < 0.8 * WINDOW_S:
            return []
        rates = {rank: self._window.worker(rank) for rank in sorted(status.workers)}
        found = {
            "idle": self._idle(status),
            "slow": self._slower(rates),
            "stale": self._stale(status),
            "server": self._servers(status, rates),
            "data": self._data(),
        }
        new = [(kind, text) for kind, text in found.items() if text and kind not in self._said]
        # Another worker may turn slow later, and is named then.
        self._said |= {kind for kind, _ in new if kind != "slow"}
        return [text for _, text in new if text]

    def _begin_again(self, status: RunStatus) -> None:
        """Forget earlier statuses: the mode or the processes changed, or the run recovered."""
        self._mode, self._processes = status.mode, _processes(status)
        self._window = _new_window()
        self._losses.clear()

    def _see_loss(self, status: RunStatus) -> None:
        values = [worker.metrics["loss"] for worker in status.workers.values() if "loss" in worker.metrics]
        if values and math.isfinite(loss := fmean(values)):
            self._losses.append((status.elapsed_s, loss))
        while self._losses and status.elapsed_s - self._losses[0][0] > LOSS_WINDOW_S:
            self._losses.popleft()

    def _idle(self, status: RunStatus) -> str | None:
        phases = self._window.phases
        total = sum(phases.values())
        share = (phases.get("wait", 0.0) + phases.get("pull", 0.0)) / total if total > 0 else 0.0
        if share <= IDLENESS:
            return None
        if _NEVER_WAITS.match(status.mode):
            advice = (
                "Servers or links are too slow for them: more --servers, --compress, --prefetch 2, or an "
                "exchange every few steps (+period=4)"
            )
        else:
            less = "asp, or ssp with a larger bound," if status.mode.startswith("ssp") else "ssp:2 or asp"
            advice = (
                f"{less} waits less than {status.mode or 'this mode'}; larger batches, or an exchange "
                "every few steps (local:4), wait less often"
            )
        return (
            f"idleness: the workers spent {wording.percent(share)} of the last "
            f"{wording.duration(self._window.seconds)} waiting for parameters. {advice}"
        )

    def _slower(self, rates: dict[int, WorkerRates]) -> str | None:
        busy = {rank: rate.busy_s for rank, rate in rates.items() if rate.steps >= _FEW and rate.busy_s > 0}
        if len(busy) < 2:
            return None
        slow = {}
        for rank, seconds in busy.items():
            usual = median(each for other, each in busy.items() if other != rank)
            if seconds >= SLOWER * usual and rank not in self._slow:
                slow[rank] = seconds / usual
        if not slow:
            return None
        self._slow |= set(slow)
        each = ", ".join(
            f"worker:{rank} takes {1e3 * busy[rank]:.3g} ms of its own time for a step, {times:.1f} times "
            "the others' median"
            for rank, times in list(slow.items())[:3]
        )
        more = f", and {wording.plural(len(slow) - 3, 'more worker')} so" if len(slow) > 3 else ""
        return (
            f"slow worker: {each}{more}. See what is different about its host, its data or its device; "
            "backup:1 or asp does not wait for it"
        )

    def _stale(self, status: RunStatus) -> str | None:
        bound = _bound(status)
        counts = self._window.staleness
        pushes = sum(counts.values())
        if not bound or not pushes:
            return None
        staleness = sum(each * n for each, n in counts.items()) / pushes
        rise = _rise(self._losses)
        if staleness <= bound / 2 or rise is None:
            return None
        before, now = rise
        of = (
            f"the {bound} that {status.mode} allows" if "ssp" in status.mode else f"the {bound} other workers"
        )
        return (
            f"staleness: {staleness:.2g} lately, more than half of {of}, and the loss rises, from "
            f"{wording.metric(before)} to {wording.metric(now)}. Lower the learning rate, leave out "
            "damping=none if you asked for it, or bound the staleness (ssp:1, bsp)"
        )

    def _servers(self, status: RunStatus, rates: dict[int, WorkerRates]) -> str | None:
        steps = sum(rate.steps for rate in rates.values())
        busy_s = sum(rate.accounted_s - rate.waited_s for rate in rates.values())
        servers = {rank: self._window.server(rank) for rank in status.servers}
        updating = {
            rank: rate.update_s / rate.updates for rank, rate in servers.items() if rate.updates >= _FEW
        }
        if steps < _FEW or busy_s <= 0 or not updating:
            return None
        slowest = max(updating, key=lambda rank: updating[rank])
        if updating[slowest] <= busy_s / steps:
            return None
        return (
            f"slow server: server:{slowest} takes {1e3 * updating[slowest]:.3g} ms for an update, longer "
            f"than a worker for a step without waiting ({1e3 * busy_s / steps:.3g} ms). More --servers share "
            "the parameters; larger batches, or an exchange every few steps (local:4), ask for fewer updates"
        )

    def _data(self) -> str | None:
        phases = self._window.phases
        total = sum(phases.values())
        share = phases.get("load", 0.0) / total if total > 0 else 0.0
        if share <= LOADING:
            return None
        return (
            f"data loading: the workers spent {wording.percent(share)} of the last "
            f"{wording.duration(self._window.seconds)} waiting for their DataLoader. Give it num_workers "
            "(more of them, if it has some), or cache what is slow to read"
        )


def _processes(status: RunStatus) -> dict[int, int | None]:
    """Process ids of the workers: a new process counts from 0, and its first steps are slow."""
    return {rank: worker.pid for rank, worker in status.workers.items()}


def _new_window() -> Window:
    return Window(WINDOW_S, least_steps=2 * _FEW)


def _bound(status: RunStatus) -> int:
    """The mode's bound of the staleness, or its usual value in asp; 0 if the mode has none."""
    match = _BOUND.match(status.mode)
    if match is None:
        return 0
    return int(match[1]) if match[1] else len(status.workers) - 1


def _rise(losses: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Of (time, loss), the mean of the first third and of the last, if that is clearly higher."""
    values = [loss for _, loss in losses]
    if len(values) < _LOSS_VALUES or losses[-1][0] - losses[0][0] < 0.8 * WINDOW_S:
        return None
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    before, now = fmean(first), fmean(last)
    noise = math.sqrt((variance(first) + variance(last)) / third)
    return (before, now) if now - before > max(_ERRORS * noise, _RISE * abs(before)) else None
