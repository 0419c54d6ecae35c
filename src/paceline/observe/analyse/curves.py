"""What a run's plots show: its tables as a few curves and timeline rows, however long the run was."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.observe.analyse import wording
from paceline.observe.analyse.facts import Facts, Series
from paceline.observe.analyse.run_data import Columns, RunData
from paceline.observe.record.device_lane import DEVICE_LANE
from paceline.observe.record.phase import PHASES, Phase
from paceline.observe.record.tables import ROLES

__all__ = [
    "Bar",
    "TimelineRow",
    "few",
    "metric_curves",
    "resource_curves",
    "thinned",
    "throughput",
    "timeline_lanes",
]

MOST_LINES = 8
"""Maximum number of lines in a plot; of more workers the lowest, the mean and the highest are shown."""
MOST_LANES = 32
MOST_BARS = 6_000
STEPS_SHOWN = 4

_WORKER = ROLES.index("worker")
_POINTS = 120


@dataclass(frozen=True)
class Bar:
    """A rectangle of a timeline, in seconds from its left edge."""

    start: float
    end: float
    name: str
    """A phase: its colour."""
    title: str


@dataclass(frozen=True)
class TimelineRow:
    """A row of a timeline."""

    name: str
    bars: Sequence[Bar]


def thinned(series: Series, points: int = 240) -> Series:
    """The same curve with few points: means of equal parts of its length. A part that is all NaN is NaN."""
    at = np.asarray(series.at, float)
    values = np.asarray(series.values, float)
    kept = np.isfinite(at)
    at, values = at[kept], values[kept]
    if len(at) <= points:
        return Series(series.name, at.tolist(), values.tolist())
    low, high = float(at.min()), float(at.max())
    bins = np.minimum(((at - low) / ((high - low) or 1.0) * points).astype(np.int64), points - 1)
    finite = np.isfinite(values)
    counts = np.bincount(bins, finite, points)
    sums = np.bincount(bins, np.where(finite, values, 0.0), points)
    there = np.bincount(bins, minlength=points) > 0
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    places = np.bincount(bins, at, points)[there] / np.bincount(bins, minlength=points)[there]
    return Series(series.name, places.tolist(), means[there].tolist())


def few(series: Sequence[Series]) -> list[Series]:
    """At most `MOST_LINES` curves: the curves themselves, or their highest, mean and lowest."""
    series = [each for each in series if len(each.at)]
    if len(series) <= MOST_LINES:
        return list(series)
    grid = np.linspace(min(each.at[0] for each in series), max(each.at[-1] for each in series), _POINTS)
    rows = np.array([_on_grid(each, grid) for each in series])
    there = np.isfinite(rows).any(axis=0)
    rows, at = rows[:, there], grid[there].tolist()
    return [
        Series(f"highest of {len(series)}", at, np.nanmax(rows, axis=0).tolist()),
        Series("mean", at, np.nanmean(rows, axis=0).tolist()),
        Series("lowest", at, np.nanmin(rows, axis=0).tolist()),
    ]


def metric_curves(run: RunData, facts: Facts, most: int, *, over: str = "time") -> dict[str, list[Series]]:
    """What the script logged, by metric, one curve a worker; `loss` first.

    Args:
        most: number of metrics. A script may log tens of thousands, and nobody looks at so many curves.
        over: `time` (seconds since the first span) or `step` (of the worker; a step that was made again after
            the run went back has the value of the last time).
    """
    table = run.metrics if over == "time" else run.standing_metrics
    if not len(table):
        return {}
    began = facts.began or float(table["time"].min())
    found: dict[str, list[Series]] = {}
    names = sorted(table["name"].unique(), key=lambda each: (each != "loss", each))[:most]
    # One pass over the rows, however many metrics there are.
    for (name, worker), rows in table[table["name"].isin(names)].groupby(["name", "worker"], observed=True):
        at = (rows["time"] - began if over == "time" else rows["step"].astype(float)).to_numpy()
        order = np.argsort(at, kind="stable")
        values = rows["value"].to_numpy()[order]
        curve = Series(f"worker:{worker}", at[order].tolist(), values.tolist())
        found.setdefault(str(name), []).append(curve)
    return {str(name): found[str(name)] for name in names if str(name) in found}


def throughput(run: RunData, facts: Facts) -> Series | None:
    """Samples a second over time (steps a second of a run that counts no samples); None without totals.

    From each worker's clock at each flush: pushes have no time of their own.
    """
    totals = run.columns("totals")
    main = (totals["role"] == _WORKER) & (totals["lane"] == 0)
    if not main.any() or facts.seconds <= 0:
        return None
    pushes = run.push_columns
    points = int(np.clip(facts.seconds / 0.75, 2, _POINTS))
    edges = np.linspace(0.0, facts.seconds, points + 1)
    done = np.zeros(points + 1)
    for worker in facts.workers:
        mine = main & (totals["rank"] == worker.rank)
        if not mine.any():
            continue
        at = totals["time"][mine] / 1e9 - facts.began
        order = np.argsort(at, kind="stable")
        steps = _going_on(totals["step"][mine][order].astype(float))
        theirs = pushes["worker"] == worker.rank
        samples = float((pushes["samples"][theirs] * pushes["weight"][theirs]).sum())
        each = samples / steps[-1] if facts.samples and steps[-1] else 1.0
        first = max(0.0, float(at[order][0]) - 0.5)
        done += each * np.interp(edges, [first, *at[order]], [0.0, *steps])
    rate = np.diff(done) / np.diff(edges)
    name = "samples a second" if facts.samples else "steps a second"
    return Series(name, ((edges[1:] + edges[:-1]) / 2).tolist(), rate.tolist())


def _going_on(steps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Counts that restart at 0 with a worker's next process, made to rise through all its processes."""
    grown = np.diff(steps, prepend=0.0)
    return np.cumsum(np.where(grown < 0, steps, grown))


def resource_curves(run: RunData, facts: Facts) -> dict[str, list[Series]]:
    """CPU, memory, threads, disk, network and GPU over time, by what is measured; one curve a role."""
    table = run.columns("resources")
    if not len(table["time"]):
        return {}
    began = facts.began or float(table["time"].min()) / 1e9
    roles: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
    for role, rank in np.unique(np.stack([table["role"], table["rank"]]), axis=1).T:
        rows = np.flatnonzero((table["role"] == role) & (table["rank"] == rank))
        roles[int(role), int(rank)] = rows[np.argsort(table["time"][rows], kind="stable")]
    host = ROLES.index("host")
    found: dict[str, list[Series]] = {}

    def add(what: str, column: str, *, of: bool | None = None, rate: bool = False, name: str = "") -> None:
        """`of`: only the host (True), only the roles (False)."""
        curves = []
        for (role, rank), rows in roles.items():
            if of is not None and of != (role == host):
                continue
            at = table["time"][rows] / 1e9 - began
            values = table[column][rows].astype(float)
            if rate:
                spent = np.diff(at)
                values = np.clip(np.diff(values), 0, None) / np.where(spent > 0, spent, np.nan)
                at = at[1:]
            if len(values) and np.isfinite(values).any():
                curves.append(thinned(Series(name or _role_name(role, rank), at.tolist(), values.tolist())))
        if any(value for each in curves for value in each.values if np.isfinite(value)):
            found.setdefault(what, []).extend(_summed(curves))

    add("CPU: cores in use", "cpu")
    add("memory", "memory")
    add("threads", "threads", of=False)
    add("disk: bytes read a second", "read", rate=True)
    add("disk: bytes written a second", "written", rate=True)
    add("cores that waited for a disk", "iowait", of=True)
    add("network of the host, bytes a second", "sent", of=True, rate=True, name="sent")
    add("network of the host, bytes a second", "received", of=True, rate=True, name="received")
    add("GPU in use", "gpu")
    add("GPU memory", "gpu_memory")
    return found


def timeline_lanes(run: RunData, facts: Facts) -> tuple[list[TimelineRow], float]:
    """Timeline rows of all roles for a few steps in the middle of the run, and their length in seconds."""
    spans = run.columns("spans")
    main = np.flatnonzero((spans["role"] == _WORKER) & (spans["lane"] == 0))
    if not len(main):
        return [], 0.0
    first = main[spans["rank"][main] == spans["rank"][main].min()]
    starts = spans["start"][first]
    middle = first[np.argmin(np.abs(starts - (starts.min() // 2 + starts.max() // 2)))]
    low = int(starts[spans["step"][first] == spans["step"][middle]].min())
    step_s = max((worker.step.p50 for worker in facts.workers), default=0.0)
    wide = int(1e9 * (STEPS_SHOWN * step_s or facts.seconds or 1.0))
    ends = spans["start"] + spans["ns"]
    inside = np.flatnonzero((spans["start"] < low + wide) & (ends > low))
    if len(inside) > MOST_BARS:
        inside = inside[np.argsort(spans["ns"][inside])[-MOST_BARS:]]
    lanes: dict[tuple[int, int, int], list[int]] = {}
    for i in inside[np.argsort(spans["start"][inside])].tolist():
        lanes.setdefault((-int(spans["role"][i]), int(spans["rank"][i]), int(spans["lane"][i])), []).append(i)
    slowest = facts.straggler[0].rank if facts.straggler is not None else -1
    found: list[tuple[tuple[bool, bool, int], int, TimelineRow]] = []
    for (role, rank, lane), rows in sorted(lanes.items()):
        if lane and float(spans["ns"][rows].sum()) < 0.01 * wide:
            continue
        helper = f" ({lane})" if lane else ""
        name = _role_name(-role, rank) + (" GPU" if lane == DEVICE_LANE else helper)
        # Of too many lanes, those that say most: the slowest worker's, then everybody's main thread.
        matters = (lane > 0, -role == _WORKER and rank != slowest, rank)
        found.append((matters, len(found), TimelineRow(name, [_bar(spans, i, low) for i in rows])))
    chosen = sorted(sorted(found, key=lambda each: each[:2])[:MOST_LANES], key=lambda each: each[1])
    return [lane for _, _, lane in chosen], wide / 1e9


def _bar(spans: Columns, i: int, low: int) -> Bar:
    phase, other, ns = int(spans["phase"][i]), int(spans["other"][i]), int(spans["ns"][i])
    start = (int(spans["start"][i]) - low) / 1e9
    title = f"{PHASES[phase]}: {ns / 1e6:.3g} ms, step {int(spans['step'][i])}"
    if other >= 0:
        to_worker = phase == Phase.WAIT or spans["role"][i] != _WORKER
        title += f", {'worker' if to_worker else 'server'}:{other}"
    if nbytes := int(spans["bytes"][i]):
        title += f", {wording.size(nbytes)}"
    return Bar(start, start + ns / 1e9, PHASES[phase], title)


def _summed(curves: list[Series]) -> list[Series]:
    """At most `MOST_LINES` curves: if there are more, the sum of all workers and of all servers."""
    if len(curves) <= MOST_LINES:
        return curves
    found = []
    for kind in ("worker", "server", "controller", "host"):
        of_kind = [each for each in curves if each.name.partition(":")[0] == kind]
        if len(of_kind) < 2:
            found += of_kind
            continue
        grid = np.linspace(min(e.at[0] for e in of_kind), max(e.at[-1] for e in of_kind), _POINTS)
        total = np.nansum([_on_grid(each, grid) for each in of_kind], axis=0)
        found.append(Series(f"all {len(of_kind)} {kind}s", grid.tolist(), total.tolist()))
    return found


def _on_grid(series: Series, grid: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    at, values = np.asarray(series.at, float), np.asarray(series.values, float)
    finite = np.isfinite(values)
    if not finite.any():
        return np.full(len(grid), np.nan)
    return np.asarray(np.interp(grid, at[finite], values[finite], left=np.nan, right=np.nan))


def _role_name(role: int, rank: int) -> str:
    name = ROLES[role] if role < len(ROLES) else "role"
    return name if name in ("controller", "host") else f"{name}:{rank}"
