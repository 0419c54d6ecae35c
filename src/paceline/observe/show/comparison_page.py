"""The page that compares several runs: a table, and their curves in the same plots."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np

from paceline.observe.analyse import curves, wording
from paceline.observe.analyse.comparison import Column, column_names, compare
from paceline.observe.analyse.facts import Series
from paceline.observe.show import markup, plots
from paceline.storage.atomic import write_text_atomically

__all__ = ["comparison_page", "write_comparison"]

MOST_BARS = 16
_MOST_METRICS = 12


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
    for metric in list(dict.fromkeys(name for each in by_time for name in each))[:_MOST_METRICS]:
        for what, data, label in (("over time", by_time, "seconds"), ("over steps", by_step, "steps")):
            lines = [
                _mean_curve(short, each[metric])
                for short, each in zip(names, data, strict=True)
                if metric in each
            ]
            found.append(plots.line_chart(f"{metric} {what}", lines, x_label=label))
    return found


def _curves_of(column: Column, over: str) -> dict[str, list[Series]]:
    """The metrics' curves of all runs of a column."""
    found: dict[str, list[Series]] = {}
    for each in column:
        for metric, series in curves.metric_curves(each.run, each.facts, _MOST_METRICS, over=over).items():
            found.setdefault(metric, []).extend(series)
    return found


def _mean_curve(name: str, series: Sequence[Series]) -> Series:
    """Of all workers' points together, in all repetitions: their mean in each part of the time."""
    at = np.concatenate([np.asarray(each.at, float) for each in series])
    values = np.concatenate([np.asarray(each.values, float) for each in series])
    order = np.argsort(at, kind="stable")
    points = max(8, min(120, 2 * max(len(each.at) for each in series) // 3))
    return curves.thinned(Series(name, at[order].tolist(), values[order].tolist()), points)


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
        "share of pushes at each staleness", labels, groups, x_label="staleness", y_text=wording.percent
    )
