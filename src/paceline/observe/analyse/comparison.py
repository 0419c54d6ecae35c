"""Several runs side by side: a table, and their curves in the same plots.

Runs that differ by their seed only are repetitions: they share a column, as mean ± standard deviation.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.observe.analyse import wording
from paceline.observe.analyse.diagnosis import Diagnosis
from paceline.observe.analyse.facts import Facts, mean_staleness
from paceline.observe.analyse.repetitions import (
    arguments_of,
    differing_settings,
    repetitions,
    script_of,
    seed_of,
)
from paceline.observe.analyse.run_data import RunData
from paceline.observe.analyse.summary import diagnosis_of, known_facts
from paceline.observe.record.tables import ROLES

__all__ = [
    "Column",
    "ComparedRun",
    "Row",
    "better",
    "column_names",
    "columns_of",
    "compare",
]

_MOST_METRICS = 100
_UP = frozenset({"accuracy", "acc", "top1", "top5", "f1", "auc", "precision", "recall", "reward"})
_DOWN = frozenset({"loss", "error", "perplexity", "mse", "mae", "rmse"})
LONGEST_NAME = 40
LEAST_SAMPLES = 3
"""Minimum number of memory samples during training; with fewer, no peak is shown."""


@dataclass(frozen=True)
class ComparedRun:
    """A run and everything that a comparison needs of it."""

    name: str
    run: RunData
    facts: Facts
    diagnosis: Diagnosis
    state: str

    @classmethod
    def of(cls, run: RunData, state: str | None = None) -> "ComparedRun":
        """Compute the facts of a run."""
        facts = known_facts(run)
        name = run.status.run_id or str(run.record.get("id") or run.path.name)
        return cls(name, run, facts, diagnosis_of(run, facts), state or run.status.state)

    @property
    def timed(self) -> bool:
        """Whether the run recorded spans."""
        return any(worker.total_s for worker in self.facts.workers)

    @property
    def staleness(self) -> Counter[int]:
        """Number of pushes at each staleness, from the tables or else from the status."""
        return self.facts.staleness or Counter(self.run.status.staleness)


Column = Sequence[ComparedRun]
"""A run, or the repetitions of one."""


def columns_of(runs: Sequence[ComparedRun], *, group: bool = True) -> list[Column]:
    """The columns of a comparison: repetitions together, unless `group` is False."""
    if not group:
        return [[each] for each in runs]
    return [[runs[i] for i in places] for places in repetitions([each.run.job for each in runs])]


def column_names(columns: Sequence[Column]) -> list[str]:
    """Names of the columns: `short_names`, with the number of repetitions."""
    names = short_names([column[0] for column in columns])
    return [
        name if len(column) == 1 else f"{name}, {len(column)} runs"
        for name, column in zip(names, columns, strict=True)
    ]


@dataclass(frozen=True)
class Row:
    """One line of the comparison: one cell for each column."""

    name: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()
    """Positions of the best cells; empty if the row has no better or worse, or all are equal."""


def short_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Names that fit a legend: mode and sizes if they differ, else the ids without what they share."""
    said = [f"{_mode(each)} {_sizes(each)}" for each in runs]
    if len(set(said)) == len(said):
        return said
    with_arguments = [f"{text} {arguments_of(each.run.job)}" for text, each in zip(said, runs, strict=True)]
    if len(set(with_arguments)) == len(said) and max(map(len, with_arguments)) <= LONGEST_NAME:
        return with_arguments
    names = [each.name for each in runs]
    if len(set(names)) != len(names):
        return [f"{i + 1}: {name}" for i, name in enumerate(names)]
    parts = [name.split("-") for name in names]
    shared = 0
    while all(len(each) > shared + 1 for each in parts) and len({each[shared] for each in parts}) == 1:
        shared += 1
    return ["-".join(each[shared:]) for each in parts]


def compare(runs: Sequence[Column]) -> list[Row]:
    """The table: one column for each run or group of repetitions. Shares of time need spans."""
    # A run is not better for being shorter, unless it did the same.
    every = [each for column in runs for each in column]
    done = {(each.state, each.run.status.samples) for each in every}
    shorter = "low" if len(done) == 1 else ""
    jobs = [column[0].run.job for column in runs]
    rows = [
        Row("run", tuple("\n".join(each.name for each in column) for column in runs)),
        Row("script", tuple(map(script_of, jobs))),
        Row("arguments", tuple(map(arguments_of, jobs))),
        _said("seed", runs, lambda each: seed_of(each.run.job)),
        _said("state", runs, lambda each: wording.state(each.run.status, each.state)),
        _said("mode", runs, _mode),
        Row("workers", tuple(str(job.get("workers", "–")) for job in jobs)),
        Row("servers", tuple(str(job.get("servers", "–")) for job in jobs)),
        *(Row(name, tuple(values)) for name, values in differing_settings(jobs).items()),
        _row("samples a push", runs, _batch, wording.count),
        _row("duration", runs, lambda each: each.run.status.elapsed_s or None, wording.duration, shorter),
        _row(
            "samples a second",
            runs,
            lambda each: each.run.status.samples_per_s or None,
            wording.count,
            "high",
        ),
        _row("steps a second", runs, _steps_per_s, wording.count, "high"),
    ]
    logged = {id(each): each.run.status.metrics for each in every}
    for name in list(dict.fromkeys(name for each in logged.values() for name in each))[:_MOST_METRICS]:
        rows.append(_row(name, runs, _metric(name, logged), wording.metric, better(name)))
    rows += [
        _row("idleness", runs, _share(lambda facts: facts.idleness), wording.percent, "low"),
        _row("computation", runs, _share(lambda facts: facts.computation), wording.percent, "high"),
        _row("communication", runs, _share(lambda facts: facts.communication), wording.percent, "low"),
        _row("waiting for data", runs, _share(lambda facts: facts.share("load")), wording.percent, "low"),
        _row("mean staleness", runs, _mean_staleness, _two_digits, "low"),
        _row("highest staleness", runs, _max_staleness, wording.count, "low"),
        _row("updates", runs, lambda each: each.facts.updates or each.run.status.version, wording.count),
        _row("update, ms", runs, lambda each: 1e3 * each.facts.update.mean or None, _two_digits, "low"),
        _row("push, ms", runs, lambda each: 1e3 * each.facts.push.mean or None, _two_digits, "low"),
        _row("pull, ms", runs, lambda each: 1e3 * each.facts.pull.mean or None, _two_digits, "low"),
        _row("bytes moved", runs, _moved, wording.size, shorter),
        _row("bytes on the wire", runs, _on_wire, wording.size, shorter),
        _row("CPU, cores", runs, _cores_used, _two_digits),
        _row("memory of all roles, peak", runs, _peak_memory, wording.size, "low"),
        _said("limited by", runs, lambda each: each.diagnosis.limit),
    ]
    return [row for row in rows if any(cell != "–" for cell in row.cells)]


def _steps_per_s(each: ComparedRun) -> float | None:
    """Steps a second of a run without a prepared loader; None for other runs, whose samples count."""
    return None if each.run.status.loader else each.run.status.steps_per_s or None


# --- rows -------------------------------------------------------------------------------------------

Value = Callable[[ComparedRun], float | None]


def _said(name: str, runs: Sequence[Column], text: Callable[[ComparedRun], str]) -> Row:
    """A row of words. Where the runs of a column differ, all their values are listed."""
    return Row(name, tuple(", ".join(dict.fromkeys(map(text, column))) for column in runs))


def _row(
    name: str, runs: Sequence[Column], value: Value, text: Callable[[float], str], better: str = ""
) -> Row:
    """A row of numbers. Repetitions show mean and standard deviation."""
    found = [[v for each in column if (v := value(each)) is not None] for column in runs]
    values = [statistics.fmean(each) if each else None for each in found]
    means = tuple("–" if v is None else "nan" if math.isnan(v) else text(v) for v in values)
    cells = tuple(
        mean
        if len(set(each)) < 2 or not all(map(math.isfinite, each))
        else f"{mean} ± {text(statistics.stdev(each))}"
        for mean, each in zip(means, found, strict=True)
    )
    known = {i: v for i, v in enumerate(values) if v is not None and math.isfinite(v)}
    best: frozenset[int] = frozenset()
    # A run that diverged is not good at anything, and another one not for being compared with it.
    good = {i: v for i, v in known.items() if not any(each.run.status.diverged for each in runs[i])}
    if better and len({text(v) for v in good.values()}) > 1:
        top = (min if better == "low" else max)(good.values())
        # What reads the same is as good.
        best = frozenset(i for i in good if means[i] == text(top))
    return Row(name, cells, best)


def better(metric: str) -> str:
    """Whether a metric of this name is better `high` or `low`; empty if the name does not tell."""
    parts = set(metric.lower().replace("/", "_").replace("-", "_").split("_"))
    return "high" if parts & _UP else "low" if parts & _DOWN else ""


def _metric(name: str, logged: Mapping[int, Mapping[str, float]]) -> Value:
    return lambda each: logged[id(each)].get(name)


def _share(of: Callable[[Facts], float]) -> Value:
    return lambda each: of(each.facts) if each.timed else None


def _mode(each: ComparedRun) -> str:
    return each.run.status.mode or str(each.run.job.get("mode") or "–")


def _sizes(each: ComparedRun) -> str:
    return f"{each.run.job.get('workers', '–')}×{each.run.job.get('servers', '–')}"


def _batch(each: ComparedRun) -> float | None:
    return each.facts.samples / each.facts.writes if each.facts.samples and each.facts.writes else None


def _mean_staleness(each: ComparedRun) -> float | None:
    return mean_staleness(each.staleness) if each.staleness else None


def _max_staleness(each: ComparedRun) -> float | None:
    return float(max(each.staleness)) if each.staleness else None


def _moved(each: ComparedRun) -> float | None:
    """Logical bytes that all workers moved."""
    workers = each.run.status.workers.values()
    return sum(worker.moved_out + worker.moved_in for worker in workers) or None


def _on_wire(each: ComparedRun) -> float | None:
    status = each.run.status
    if status.ended_s:
        return float(sum(worker.bytes_out + worker.bytes_in for worker in status.workers.values()))
    if not each.timed:  # a run of an older version
        return None
    return float(sum(link.bytes_out + link.bytes_in for link in each.facts.links))


def _cores_used(each: ComparedRun) -> float | None:
    """Cores used: the sum over roles of each role's mean over time."""
    table = each.run.columns("resources")
    roles = table["role"] != ROLES.index("host")
    if not roles.any():
        return None
    keys = table["role"][roles].astype(np.int64) << 32 | table["rank"][roles].astype(np.int64)
    _, at = np.unique(keys, return_inverse=True)
    values = np.nan_to_num(table["cpu"][roles].astype(float))
    return float((np.bincount(at, values) / np.bincount(at)).sum())


def _peak_memory(each: ComparedRun) -> float | None:
    """Peak of the memory of all roles together during training; None if the training was too short."""
    table, facts = each.run.columns("resources"), each.facts
    kept = table["role"] != ROLES.index("host")
    if facts.began:
        kept = kept & (table["time"] >= facts.began * 1e9)
    _, at = np.unique(table["time"][kept], return_inverse=True)
    if not len(at) or at.max() + 1 < LEAST_SAMPLES:
        return None
    return float(np.bincount(at, table["memory"][kept].astype(float)).max())


def _two_digits(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"
