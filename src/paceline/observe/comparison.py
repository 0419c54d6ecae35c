"""Several runs side by side: a table, and their curves in the same plots.

Runs that differ by their seed only are repetitions: they share a column, as mean ± standard deviation.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np

from paceline.observe import curves, markup, plots, words
from paceline.observe.diagnosis import Diagnosis
from paceline.observe.facts import Facts, Series
from paceline.observe.page import mean_staleness
from paceline.observe.repetitions import (
    arguments_of,
    differing_settings,
    repetitions,
    script_of,
    seed_of,
)
from paceline.observe.report import diagnosis_of, known_facts
from paceline.observe.run_data import RunData
from paceline.observe.tables import ROLES
from paceline.storage.atomic import write_text_atomically

__all__ = [
    "Column",
    "ComparedRun",
    "Row",
    "better",
    "column_names",
    "columns_of",
    "compare",
    "comparison_page",
    "write_comparison",
]

_UP = frozenset({"accuracy", "acc", "top1", "top5", "f1", "auc", "precision", "recall", "reward"})
_DOWN = frozenset({"loss", "error", "perplexity", "mse", "mae", "rmse"})
MOST_BARS = 16
LONGEST_NAME = 40
LEAST_SAMPLES = 3
"""Of memory, while a run trains: fewer say nothing about the most that it needs."""


@dataclass(frozen=True)
class ComparedRun:
    """A run, and all that is compared of it."""

    name: str
    run: RunData
    facts: Facts
    diagnosis: Diagnosis
    state: str

    @classmethod
    def of(cls, run: RunData, state: str | None = None) -> "ComparedRun":
        """Work its facts out."""
        facts = known_facts(run)
        name = run.status.run_id or str(run.record.get("id") or run.path.name)
        return cls(name, run, facts, diagnosis_of(run, facts), state or run.status.state)

    @property
    def timed(self) -> bool:
        """Whether there are spans."""
        return any(worker.total_s for worker in self.facts.workers)

    @property
    def staleness(self) -> Counter[int]:
        """Pushes by staleness, from whoever counted them."""
        return self.facts.staleness or Counter(self.run.status.staleness)


Column = Sequence[ComparedRun]
"""A run, or the repetitions of one."""


def columns_of(runs: Sequence[ComparedRun], *, group: bool = True) -> list[Column]:
    """The columns of a comparison: repetitions together, unless `group` is False."""
    if not group:
        return [[each] for each in runs]
    return [[runs[i] for i in places] for places in repetitions([each.run.job for each in runs])]


def column_names(columns: Sequence[Column]) -> list[str]:
    """As `short_names`; with the number of repetitions."""
    names = short_names([column[0] for column in columns])
    return [
        name if len(column) == 1 else f"{name}, {len(column)} runs"
        for name, column in zip(names, columns, strict=True)
    ]


@dataclass(frozen=True)
class Row:
    """One line of the comparison: a cell a column."""

    name: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()
    """Positions of the best, where that means something and they are not all the same."""


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
    """The table: a column a run, or a group of repetitions. Shares of time are there for runs with spans."""
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
        _said("state", runs, lambda each: words.state(each.run.status, each.state)),
        _said("mode", runs, _mode),
        Row("workers", tuple(str(job.get("workers", "–")) for job in jobs)),
        Row("servers", tuple(str(job.get("servers", "–")) for job in jobs)),
        *(Row(name, tuple(values)) for name, values in differing_settings(jobs).items()),
        _row("samples a push", runs, _batch, words.count),
        _row("duration", runs, lambda each: each.run.status.elapsed_s or None, words.duration, shorter),
        _row(
            "samples a second", runs, lambda each: each.run.status.samples_per_s or None, words.count, "high"
        ),
        _row("steps a second", runs, _steps_per_s, words.count, "high"),
    ]
    names = dict.fromkeys(name for each in every for name in each.run.status.metrics)
    for name in names:
        rows.append(_row(name, runs, _metric(name), words.metric, better(name)))
    rows += [
        _row("idleness", runs, _share(lambda facts: facts.idleness), words.percent, "low"),
        _row("computation", runs, _share(lambda facts: facts.computation), words.percent, "high"),
        _row("communication", runs, _share(lambda facts: facts.communication), words.percent, "low"),
        _row("waiting for data", runs, _share(lambda facts: facts.share("load")), words.percent, "low"),
        _row("mean staleness", runs, _mean_staleness, _two_digits, "low"),
        _row("highest staleness", runs, _max_staleness, words.count, "low"),
        _row("updates", runs, lambda each: each.facts.updates or each.run.status.version, words.count),
        _row("update, ms", runs, lambda each: 1e3 * each.facts.update.mean or None, _two_digits, "low"),
        _row("push, ms", runs, lambda each: 1e3 * each.facts.push.mean or None, _two_digits, "low"),
        _row("pull, ms", runs, lambda each: 1e3 * each.facts.pull.mean or None, _two_digits, "low"),
        _row("bytes moved", runs, _moved, words.size, shorter),
        _row("bytes on the wire", runs, _on_wire, words.size, shorter),
        _row("CPU, cores", runs, _cores_used, _two_digits),
        _row("memory of all roles, peak", runs, _peak_memory, words.size, "low"),
        _said("limited by", runs, lambda each: each.diagnosis.limit),
    ]
    return [row for row in rows if any(cell != "–" for cell in row.cells)]


def _steps_per_s(each: ComparedRun) -> float | None:
    """Of runs without a prepared loader: of the others the samples count, whatever a batch has."""
    return None if each.run.status.loader else each.run.status.steps_per_s or None


def comparison_page(runs: Sequence[Column]) -> str:
    """The table and the plots as one self-contained page."""
    rows, names = compare(runs), column_names(runs)
    every = [(short, each) for short, column in zip(names, runs, strict=True) for each in column]
    best = [(i, j + 1) for i, row in enumerate(rows) for j in row.best]
    links = "".join(
        f"<li><b>{escape(short)}</b> · {escape(each.name)}: {escape(each.diagnosis.text, quote=False)}</li>"
        for short, each in every
    )
    missing = [f"{short}: {text}" for short, each in every for text in each.run.missing]
    sections = [
        markup.section(
            "Side by side",
            "One column a run (workers×servers where that tells them apart). Runs that differ by their seed "
            "only share one, as mean ± standard deviation. The best of a row stands out where it is clear "
            "what is better.",
            markup.table(("", *names), [(row.name, *row.cells) for row in rows], best=best),
        ),
        markup.section(
            "What they learned",
            "Each metric's mean over a run's workers: against seconds, which shows the faster run, and "
            "against steps of a worker, which shows what a step was worth.",
            markup.plot_grid(*_metric_plots(runs, names)),
        ),
        markup.section(
            "Throughput and staleness",
            "Samples a second over time, and the share of the pushes that were applied at each staleness.",
            markup.plot_grid(_throughput_plot(runs, names), _staleness_plot(runs, names)),
        ),
    ]
    title = f"{len(every)} runs compared"
    header = f"<h1>{title}</h1>\n<ul>{links}</ul>"
    if missing:
        header += markup.box("Not everything could be read; what follows is without it:", missing)
    return markup.document(title, header, "\n".join(filter(None, sections)))


def write_comparison(runs: Sequence[Column], target: Path) -> None:
    """Write the page, atomically. Raises OSError if the target cannot be written."""
    write_text_atomically(target, comparison_page(runs))


# --- plots ------------------------------------------------------------------------------------------


def _metric_plots(runs: Sequence[Column], names: Sequence[str]) -> list[str]:
    found = []
    by_time = [_curves_of(column, "time") for column in runs]
    by_step = [_curves_of(column, "step") for column in runs]
    for metric in dict.fromkeys(name for each in by_time for name in each):
        for what, data, label in (("over time", by_time, "seconds"), ("over steps", by_step, "steps")):
            lines = [
                _mean_curve(short, each[metric])
                for short, each in zip(names, data, strict=True)
                if metric in each
            ]
            found.append(plots.line_chart(f"{metric} {what}", lines, x_label=label))
    return found[:24]


def _curves_of(column: Column, over: str) -> dict[str, list[Series]]:
    """The metrics' curves of all runs of a column."""
    found: dict[str, list[Series]] = {}
    for each in column:
        for metric, series in curves.metric_curves(each.run, each.facts, over=over).items():
            found.setdefault(metric, []).extend(series)
    return found


def _mean_curve(name: str, series: Sequence[Series]) -> Series:
    """Of all workers' points together, in all repetitions: their mean in each part of the time."""
    at = np.concatenate([np.asarray(each.at, float) for each in series])
    values = np.concatenate([np.asarray(each.values, float) for each in series])
    order = np.argsort(at, kind="stable")
    points = max(8, min(120, 2 * max(len(each.at) for each in series) // 3))
    return plots.thinned(Series(name, at[order].tolist(), values[order].tolist()), points)


def _throughput_plot(runs: Sequence[Column], names: Sequence[str]) -> str:
    lines = []
    for short, column in zip(names, runs, strict=True):
        found = [curves.throughput(each.run, each.facts) for each in column]
        if known := [curve for curve in found if curve is not None]:
            lines.append(_mean_curve(short, known) if len(known) > 1 else replace(known[0], name=short))
    return plots.line_chart("samples a second", lines, from_zero=True)


def _staleness_plot(runs: Sequence[Column], names: Sequence[str]) -> str:
    counts = [sum((each.staleness for each in column), Counter[int]()) for column in runs]
    highest = max((max(each, default=0) for each in counts), default=0)
    width = -(-(highest + 1) // MOST_BARS)
    groups = {}
    for short, staleness in zip(names, counts, strict=True):
        pushes = sum(staleness.values())
        if pushes:
            shares = [0.0] * (highest // width + 1)
            for value, number in staleness.items():
                shares[max(0, value) // width] += number / pushes
            groups[short] = shares
    labels = [
        str(i) if width == 1 else f"{i * width}–{(i + 1) * width - 1}" for i in range(highest // width + 1)
    ]
    return plots.bar_chart(
        "share of pushes at each staleness", labels, groups, x_label="staleness", y_text=words.percent
    )


# --- rows -------------------------------------------------------------------------------------------

Value = Callable[[ComparedRun], float | None]


def _said(name: str, runs: Sequence[Column], text: Callable[[ComparedRun], str]) -> Row:
    """A row of words: what the runs of a column do not have in common is listed."""
    return Row(name, tuple(", ".join(dict.fromkeys(map(text, column))) for column in runs))


def _row(
    name: str, runs: Sequence[Column], value: Value, text: Callable[[float], str], better: str = ""
) -> Row:
    """A row of numbers: of repetitions the mean and the standard deviation."""
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
    """Whether a metric is better `high`, `low`, or nobody knows (empty), by its name."""
    parts = set(metric.lower().replace("/", "_").replace("-", "_").split("_"))
    return "high" if parts & _UP else "low" if parts & _DOWN else ""


def _metric(name: str) -> Value:
    return lambda each: each.run.status.metrics.get(name)


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
    """Logical bytes."""
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
    """All roles together, the mean over time of each."""
    table = each.run.columns("resources")
    roles = table["role"] != ROLES.index("host")
    if not roles.any():
        return None
    keys = table["role"][roles].astype(np.int64) << 32 | table["rank"][roles].astype(np.int64)
    _, at = np.unique(keys, return_inverse=True)
    values = np.nan_to_num(table["cpu"][roles].astype(float))
    return float((np.bincount(at, values) / np.bincount(at)).sum())


def _peak_memory(each: ComparedRun) -> float | None:
    """The most that all roles had together while the run trained; None if that was too short to say."""
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
