"""Figures from a run's tables: time by role and phase, waits between workers, staleness of pushes.

Sums come from `totals` and `pushes.csv`, which are exact; medians and percentiles from `spans`, which are
kept for every step at first and for some steps of a long run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.observe.analyse.device_facts import DeviceFacts, device_facts_of, of_threads
from paceline.observe.analyse.run_data import Columns, RunData
from paceline.observe.record.phase import COMMUNICATION, COMPUTATION, PHASES, Phase
from paceline.observe.record.tables import ROLES

__all__ = ["Facts", "LinkFacts", "Series", "ServerFacts", "Times", "WorkerFacts", "facts_of"]

_WORKER, _SERVER = ROLES.index("worker"), ROLES.index("server")
_POINTS = 240
"""Maximum number of points of a curve; a plot cannot show more."""


@dataclass(frozen=True)
class Times:
    """How long something took, in seconds."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, ns: npt.NDArray[np.int64]) -> "Times":
        """Of durations in ns."""
        if not len(ns):
            return cls()
        p50, p99 = np.percentile(ns, (50, 99))
        return cls(len(ns), float(ns.mean()) / 1e9, float(p50) / 1e9, float(p99) / 1e9)


@dataclass(frozen=True)
class Series:
    """A curve: seconds since the run began, and values."""

    name: str
    at: Sequence[float]
    values: Sequence[float]


@dataclass
class WorkerFacts:
    """One worker over the whole run."""

    rank: int
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase. They add up to the time from prepare() to the script's end."""
    step: Times = field(default_factory=Times)
    """From one step's end to the next's."""
    busy: float = 0.0
    """Median seconds of a step without waiting for others: loading, computing, sending."""
    blocked_on: dict[int, float] = field(default_factory=dict)
    """Seconds in which it waited for another worker, by rank."""
    bytes_out: int = 0
    bytes_in: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Of its pushes that were applied."""
    dropped: int = 0
    """Its pushes that came too late, or a second time, and were not applied."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def idleness(self) -> float:
        """The part of its time in which it waited for parameters."""
        return self.share("wait", "pull")

    def share(self, *phases: str) -> float:
        """The part of its time that it spent in these phases."""
        return sum(self.seconds.get(p, 0.0) for p in phases) / self.total_s if self.total_s else 0.0


@dataclass
class ServerFacts:
    """One server over the whole run."""

    rank: int
    updates: int = 0
    update_s: float = 0.0
    update: Times = field(default_factory=Times)
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True)
class LinkFacts:
    """What one worker and one server sent each other."""

    worker: int
    server: int
    bytes_out: int
    """Gradients."""
    bytes_in: int
    """Parameters."""


@dataclass
class Facts:
    """All facts of a run, see the module. Empty tables give zeros."""

    began: float = 0.0
    """Unix time of the first span, in seconds."""
    seconds: float = 0.0
    """From there to the last."""
    workers: list[WorkerFacts] = field(default_factory=list)
    servers: list[ServerFacts] = field(default_factory=list)
    links: list[LinkFacts] = field(default_factory=list)
    push: Times = field(default_factory=Times)
    """Collecting, compressing and sending gradients, by step."""
    pull: Times = field(default_factory=Times)
    """From the request to the parameters in place: waiting and receiving."""
    update: Times = field(default_factory=Times)
    updates: int = 0
    writes: int = 0
    """Pushes applied."""
    reads: int = 0
    """Times that a worker got fresh parameters."""
    samples: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    staleness_over_time: list[Series] = field(default_factory=list)
    """Mean of the pushes up to a version, by worker; `at` is the share of all updates."""
    phases_over_time: list[Series] = field(default_factory=list)
    """Share of the workers' time in each phase."""
    device: DeviceFacts = field(default_factory=DeviceFacts)
    """What the GPUs did. All other figures are those of threads."""

    @property
    def timed_s(self) -> float:
        """Seconds of all workers that there are spans of; 0 without spans."""
        return sum(worker.total_s for worker in self.workers)

    def share(self, *phases: str) -> float:
        """The part of all workers' time that they spent in these phases."""
        total = self.timed_s
        spent = sum(worker.seconds.get(p, 0.0) for worker in self.workers for p in phases)
        return spent / total if total else 0.0

    @property
    def idleness(self) -> float:
        """The part of all workers' time in which they waited for parameters."""
        return self.share("wait", "pull")

    @property
    def computation(self) -> float:
        """The part of their time in which workers computed."""
        return self.share(*(PHASES[p] for p in COMPUTATION))

    @property
    def communication(self) -> float:
        """The part of their time in which workers sent, received or waited for another role."""
        return self.share(*(PHASES[p] for p in COMMUNICATION))

    @property
    def blocked(self) -> float:
        """The part of their time in which workers waited for other workers."""
        total = sum(worker.total_s for worker in self.workers)
        return sum(sum(w.blocked_on.values()) for w in self.workers) / total if total else 0.0

    @property
    def straggler(self) -> tuple[WorkerFacts, float] | None:
        """The slowest worker and how many times longer than the median of the others a step takes it."""
        if len(self.workers) < 2 or not all(w.busy for w in self.workers):
            return None
        slowest = max(self.workers, key=lambda w: w.busy)
        others = float(np.median([w.busy for w in self.workers if w is not slowest]))
        return (slowest, slowest.busy / others) if others else None


def facts_of(run: RunData) -> Facts:
    """Compute all facts of a run."""
    everything, pushes = run.columns("spans"), run.push_columns
    facts = Facts(device=device_facts_of(everything, run.columns("resources")))
    # What follows adds up what threads did: a device did the same things again, later.
    totals, spans = of_threads(run.columns("totals")), of_threads(everything)
    _add_times(facts, totals, spans)
    workers = {rank: WorkerFacts(rank) for rank in _ranks(totals, _WORKER) | set(run.status.workers)}
    _add_totals(workers, totals)
    for rank, known in run.status.workers.items() if run.status.ended_s else ():
        workers[rank].steps = known.clock  # its own count, of all its processes
    _add_steps(workers, spans)
    for rank, told in run.status.workers.items():
        workers[rank].dropped = told.dropped
    servers = {rank: ServerFacts(rank) for rank in _ranks(totals, _SERVER) | set(run.status.servers)}
    _add_servers(facts, servers, totals, spans)
    facts.workers = [workers[rank] for rank in sorted(workers)]
    facts.servers = [servers[rank] for rank in sorted(servers)]
    _add_links(facts, totals)
    _add_pushes(facts, workers, pushes)
    facts.push = Times.of(_per_step(spans, (Phase.COMPRESS, Phase.PUSH)))
    facts.pull = Times.of(_per_step(spans, (Phase.WAIT, Phase.PULL)))
    main = (totals["role"] == _WORKER) & (totals["phase"] == Phase.PULL)
    facts.reads = int(totals["count"][main].sum()) or facts.writes
    facts.phases_over_time = _phases_over_time(facts, totals)
    return facts


def _ranks(table: Columns, role: int) -> set[int]:
    return {int(rank) for rank in np.unique(table["rank"][table["role"] == role])}


def _add_times(facts: Facts, totals: Columns, spans: Columns) -> None:
    starts = [float(spans["start"].min())] if len(spans["start"]) else []
    starts += [float((totals["time"] - totals["ns"]).min())] if len(totals["time"]) else []
    if starts:
        facts.began = min(starts) / 1e9
        ends = [float((spans["start"] + spans["ns"]).max())] if len(spans["start"]) else []
        ends += [float(totals["time"].max())] if len(totals["time"]) else []
        facts.seconds = max(ends) / 1e9 - facts.began


def _add_totals(workers: dict[int, WorkerFacts], totals: Columns) -> None:
    """Seconds by phase, and by the worker that was waited for."""
    main = (totals["role"] == _WORKER) & (totals["lane"] == 0)
    for rank, worker in workers.items():
        mine = main & (totals["rank"] == rank)
        if not mine.any():
            continue
        phases, ns, others = totals["phase"][mine], totals["ns"][mine], totals["other"][mine]
        spent = np.bincount(phases, ns, len(PHASES))
        worker.seconds = {PHASES[p]: float(spent[p]) / 1e9 for p in range(len(PHASES)) if spent[p]}
        worker.steps = int(totals["step"][mine].max())
        blocked = (phases == Phase.WAIT) & (others >= 0)
        for other in np.unique(others[blocked]):
            if other != rank:
                worker.blocked_on[int(other)] = float(ns[blocked & (others == other)].sum()) / 1e9


def _add_steps(workers: dict[int, WorkerFacts], spans: Columns) -> None:
    """Durations of the steps whose spans were kept."""
    main = (spans["role"] == _WORKER) & (spans["lane"] == 0)
    waiting = (spans["phase"] == Phase.WAIT) | (spans["phase"] == Phase.PULL)
    for rank, worker in workers.items():
        mine = main & (spans["rank"] == rank)
        steps = spans["step"][mine]
        if not len(steps):
            continue
        # The first step warms up, the last is the script's end, and neither is like the others.
        inside = (steps > steps.min()) & (steps < steps.max())
        if not inside.any():
            inside = np.ones_like(inside)
        _, at = np.unique(steps[inside], return_inverse=True)
        ns = spans["ns"][mine][inside]
        worker.step = Times.of(np.bincount(at, ns).astype(np.int64))
        busy = np.bincount(at, np.where(waiting[mine][inside], 0, ns))
        worker.busy = float(np.median(busy)) / 1e9


def _add_servers(facts: Facts, servers: dict[int, ServerFacts], totals: Columns, spans: Columns) -> None:
    for rank, server in servers.items():
        mine = (totals["role"] == _SERVER) & (totals["rank"] == rank)
        updates = mine & (totals["phase"] == Phase.UPDATE)
        server.updates = int(totals["count"][updates].sum())
        server.update_s = float(totals["ns"][updates].sum()) / 1e9
        server.bytes_in = int(totals["bytes"][mine & (totals["phase"] == Phase.PUSH)].sum())
        server.bytes_out = int(totals["bytes"][mine & (totals["phase"] == Phase.PULL)].sum())
        kept = (spans["role"] == _SERVER) & (spans["rank"] == rank) & (spans["phase"] == Phase.UPDATE)
        server.update = Times.of(spans["ns"][kept])
    kept = (spans["role"] == _SERVER) & (spans["phase"] == Phase.UPDATE)
    facts.update = Times.of(spans["ns"][kept])


def _add_links(facts: Facts, totals: Columns) -> None:
    carried = (totals["role"] == _WORKER) & (totals["bytes"] > 0) & (totals["other"] >= 0)
    if not carried.any():
        return
    pairs = np.unique(np.stack([totals["rank"][carried], totals["other"][carried]]), axis=1)
    for worker, server in pairs.T:
        mine = carried & (totals["rank"] == worker) & (totals["other"] == server)
        out = int(totals["bytes"][mine & (totals["phase"] == Phase.PUSH)].sum())
        back = int(totals["bytes"][mine & (totals["phase"] == Phase.PULL)].sum())
        facts.links.append(LinkFacts(int(worker), int(server), out, back))
    for each in facts.workers:
        each.bytes_out = sum(link.bytes_out for link in facts.links if link.worker == each.rank)
        each.bytes_in = sum(link.bytes_in for link in facts.links if link.worker == each.rank)


def _add_pushes(facts: Facts, workers: dict[int, WorkerFacts], pushes: Columns) -> None:
    weights = pushes["weight"]
    facts.writes = int(weights.sum())
    if not facts.writes:
        return
    last = int(pushes["version"].max())
    thinned = bool((weights > 1).any())
    facts.updates = last if thinned else len(np.unique(pushes["version"]))
    facts.samples = int((pushes["samples"] * weights).sum())
    facts.staleness = _counted(pushes["staleness"], weights)
    for rank in sorted(workers):
        mine = pushes["worker"] == rank
        if mine.any():
            staleness, version = pushes["staleness"][mine], pushes["version"][mine]
            workers[rank].staleness = _counted(staleness, weights[mine])
            at, values = _means(version / max(1, last), staleness)
            facts.staleness_over_time.append(Series(f"worker:{rank}", at, values))


def _counted(values: npt.NDArray[np.int64], weights: npt.NDArray[np.int64]) -> Counter[int]:
    found, places = np.unique(values, return_inverse=True)
    counts = np.bincount(places, weights, minlength=len(found))
    return Counter({int(value): int(count) for value, count in zip(found, counts, strict=True)})


def _means(at: npt.NDArray[np.float64], values: npt.NDArray[np.int64]) -> tuple[list[float], list[float]]:
    """Fewer points: the mean of the values in each of `_POINTS` equal parts of 0 to 1."""
    bins = np.minimum((at * _POINTS).astype(np.int64), _POINTS - 1)
    counts = np.bincount(bins, minlength=_POINTS)
    sums = np.bincount(bins, values, _POINTS)
    there = np.flatnonzero(counts)
    return [float(i + 0.5) / _POINTS for i in there], [float(sums[i] / counts[i]) for i in there]


def _per_step(spans: Columns, phases: Sequence[int]) -> npt.NDArray[np.int64]:
    """Time in these phases, by worker and step."""
    kept = (spans["role"] == _WORKER) & (spans["lane"] == 0) & np.isin(spans["phase"], phases)
    if not kept.any():
        return np.empty(0, np.int64)
    key = spans["rank"][kept].astype(np.int64) << 32 | spans["step"][kept].astype(np.int64)
    _, at = np.unique(key, return_inverse=True)
    return np.bincount(at, spans["ns"][kept]).astype(np.int64)


def _phases_over_time(facts: Facts, totals: Columns) -> list[Series]:
    main = (totals["role"] == _WORKER) & (totals["lane"] == 0)
    if not main.any() or not facts.seconds:
        return []
    points = max(1, min(60, int(facts.seconds)))
    at = (totals["time"][main] / 1e9 - facts.began) / facts.seconds
    bins = np.clip((at * points).astype(np.int64), 0, points - 1)
    spent = np.zeros((points, len(PHASES)))
    np.add.at(spent, (bins, totals["phase"][main]), totals["ns"][main])
    whole = spent.sum(axis=1)
    there = np.flatnonzero(whole)
    return [
        Series(
            PHASES[p],
            [float((i + 0.5) / points * facts.seconds) for i in there],
            [float(spent[i, p] / whole[i]) for i in there],
        )
        for p in range(len(PHASES))
        if spent[:, p].any()
    ]


def mean_staleness(staleness: Counter[int]) -> float:
    """Mean over all pushes."""
    pushes = sum(staleness.values())
    return sum(each * n for each, n in staleness.items()) / pushes if pushes else 0.0
