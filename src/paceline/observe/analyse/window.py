"""Rates from a run's last few statuses: what it does now, not what it did on average since it began."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.observe.record.pace import TrainingPace
from paceline.observe.record.phase import COMPUTATION, PHASES
from paceline.observe.record.status import RunStatus, ServerStatus, WorkerStatus

__all__ = ["ServerRates", "Window", "WorkerRates", "shares_of"]

WAITING = ("wait", "pull")
"""The phases that idleness is made of."""

_COMPUTE = frozenset(PHASES[phase] for phase in COMPUTATION)
_SPACING = 40
"""Approximate number of moments that a window holds, however many statuses it gets."""
_MOST_MOMENTS = 240


@dataclass(frozen=True)
class WorkerRates:
    """One worker over a window."""

    steps: int = 0
    seconds: float = 0.0
    """How long the window was."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds in each phase. Without spans: `other` for all its work, and `wait`."""
    moved_out: float = 0.0
    """Logical bytes, per second, as `moved_in`."""
    moved_in: float = 0.0
    on_wire: float = 0.0
    """Bytes that sockets carried, out and in, per second."""

    @property
    def accounted_s(self) -> float:
        """Seconds that the worker has reported."""
        return sum(self.phases.values())

    @property
    def waited_s(self) -> float:
        """Seconds of them in which it waited for parameters."""
        return sum(self.phases.get(phase, 0.0) for phase in WAITING)

    @property
    def idleness(self) -> float:
        """The part of its time in which it waited for parameters, 0 to 1."""
        return self.waited_s / self.accounted_s if self.accounted_s > 0 else 0.0

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds if self.seconds > 0 else 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of a step without waiting for others; 0 without a step."""
        return (self.accounted_s - self.waited_s) / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class ServerRates:
    """One server over a window."""

    updates: int = 0
    update_s: float = 0.0
    """Seconds that they took, together."""
    seconds: float = 0.0

    @property
    def updates_per_s(self) -> float:
        return self.updates / self.seconds if self.seconds > 0 else 0.0

    @property
    def updating(self) -> float:
        """The part of the time that it spent updating, 0 to 1."""
        return min(1.0, self.update_s / self.seconds) if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class _Moment:
    """The numbers of a status that only grow; a copy, since the controller changes its status in place."""

    at: float
    samples: int = 0
    workers: dict[int, tuple[int, float, float, int, int, int]] = field(default_factory=dict)
    phases: dict[int, dict[str, float]] = field(default_factory=dict)
    servers: dict[int, tuple[int, float]] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, status: RunStatus) -> "_Moment":
        return cls(
            status.elapsed_s,
            status.samples,
            {rank: _counts(worker) for rank, worker in status.workers.items()},
            {rank: dict(worker.phases) for rank, worker in status.workers.items()},
            {rank: _updates(server) for rank, server in status.servers.items()},
            dict(status.staleness),
        )

    @property
    def steps(self) -> int:
        return max((counts[0] for counts in self.workers.values()), default=0)


class Window:
    """What happened in the last `seconds` seconds. Pure: a status's `elapsed_s` is the clock.

    With one status, all rates are means since the workers began to train.

    Args:
        seconds: how long it is, about.
        least_steps: the window grows until its fastest worker has made this number of steps in it.
    """

    def __init__(self, seconds: float, *, least_steps: int = 0) -> None:
        self._seconds = seconds
        self._least_steps = least_steps
        self._past: deque[_Moment] = deque()
        self._pace = TrainingPace()
        self._startup_s = 0.0
        self._earlier: dict[int, tuple[int, float, float, int, int, int]] = {}

    def see(self, status: RunStatus) -> None:
        """Take a newer status."""
        now, past = _Moment.of(status), self._past
        if past and now.at < past[-1].at:  # the run was resumed: its clock began again
            past.clear()
        repeated = past and now.at == past[-1].at
        if repeated or (len(past) > 1 and past[-1].at - past[-2].at < self._seconds / _SPACING):
            past.pop()
        past.append(now)
        while (
            len(past) > 2
            and now.at - past[1].at >= self._seconds
            and now.steps - past[1].steps >= self._least_steps
        ):
            past.popleft()
        if len(past) > _MOST_MOMENTS:  # steps that take very long
            self._past = deque([*list(past)[:-1:2], now])
        self._pace, self._startup_s = status.pace, status.startup_s
        self._earlier = {rank: _earlier_counts(worker) for rank, worker in status.workers.items()}

    @property
    def whole(self) -> bool:
        """Whether rates are means since the beginning, because there is only one status."""
        return len(self._past) < 2

    @property
    def seconds(self) -> float:
        """How long it is now."""
        if self.whole:
            return self._pace.seconds if self._past else 0.0
        # Start-up is no part of it: nothing could happen then.
        return max(0.0, self._past[-1].at - max(self._past[0].at, self._startup_s))

    @property
    def samples_per_s(self) -> float:
        if self.whole:
            return self._pace.samples_per_s
        first, last = self._ends()
        return max(0, last.samples - first.samples) / self.seconds if self.seconds > 0 else 0.0

    @property
    def steps_per_s(self) -> float:
        """Of all workers together."""
        if self.whole:
            return self._pace.steps_per_s
        return sum(self.worker(rank).steps_per_s for rank in self._ends()[1].workers)

    @property
    def staleness(self) -> dict[int, int]:
        """How many pushes were applied at each staleness."""
        first, last = self._ends()
        found = {each: n - first.staleness.get(each, 0) for each, n in last.staleness.items()}
        return {each: n for each, n in found.items() if n > 0}

    @property
    def phases(self) -> dict[str, float]:
        """Seconds in each phase, of all workers."""
        found: dict[str, float] = {}
        for rank in self._ends()[1].workers:
            for phase, seconds in self.worker(rank).phases.items():
                found[phase] = found.get(phase, 0.0) + seconds
        return found

    def worker(self, rank: int) -> WorkerRates:
        """One worker's rates; zeros if it is not known."""
        first, last = self._ends()
        if rank not in last.workers:
            return WorkerRates()
        zeros = (0, 0.0, 0.0, 0, 0, 0)
        before = first.workers.get(rank, self._earlier.get(rank, zeros) if self.whole else zeros)
        clock, step_s, wait_s, out, back, wire = _grown(last.workers[rank], before)
        phases = _all_grown(last.phases[rank], first.phases.get(rank, {}))
        if not last.phases[rank]:
            phases = {"other": step_s, "wait": wait_s} if step_s or wait_s else {}
        per_s = 1 / self.seconds if self.seconds > 0 else 0.0
        return WorkerRates(int(clock), self.seconds, phases, out * per_s, back * per_s, wire * per_s)

    def server(self, rank: int) -> ServerRates:
        """One server's rates; zeros if it is not known."""
        first, last = self._ends()
        if rank not in last.servers:
            return ServerRates()
        updates, update_s = _grown(last.servers[rank], first.servers.get(rank, (0, 0.0)))
        return ServerRates(int(updates), update_s, self.seconds)

    def _ends(self) -> tuple[_Moment, _Moment]:
        if not self._past:
            return _Moment(0.0), _Moment(0.0)
        first = _Moment(0.0) if self.whole else self._past[0]
        return first, self._past[-1]


def shares_of(phases: Mapping[str, float]) -> dict[str, float]:
    """Shares of 1, largest first; what is computation is `compute`."""
    total = sum(phases.values())
    if total <= 0:
        return {}
    found: dict[str, float] = {}
    for phase, seconds in phases.items():
        name = "compute" if phase in _COMPUTE else phase
        found[name] = found.get(name, 0.0) + seconds / total
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _counts(worker: WorkerStatus) -> tuple[int, float, float, int, int, int]:
    wire = worker.bytes_out + worker.bytes_in
    return worker.clock, worker.step_s, worker.wait_s, worker.moved_out, worker.moved_in, wire


def _earlier_counts(worker: WorkerStatus) -> tuple[int, float, float, int, int, int]:
    """Of earlier starts of the run: its processes of this start have not spent that time."""
    counts = worker.earlier
    wire = counts.get("wire_out", 0) + counts.get("wire_in", 0)
    return counts.get("steps", 0), 0.0, 0.0, counts.get("moved_out", 0), counts.get("moved_in", 0), wire


def _updates(server: ServerStatus) -> tuple[int, float]:
    return server.updates, server.update_s


def _grown(now: Sequence[float], before: Sequence[float]) -> list[float]:
    """By how much counts grew; a role that was replaced begins again at 0."""
    return [new - old if new >= old else new for new, old in zip(now, before, strict=True)]


def _all_grown(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    if any(seconds < before.get(phase, 0.0) for phase, seconds in now.items()):
        before = {}  # replaced
    found = {phase: seconds - before.get(phase, 0.0) for phase, seconds in now.items()}
    return {phase: seconds for phase, seconds in found.items() if seconds > 0}
