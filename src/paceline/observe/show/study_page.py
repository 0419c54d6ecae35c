"""A study as one page: a table, and curves with mean and deviation over seeds."""

import math
from collections.abc import Callable
from html import escape
from typing import Any

from paceline.observe.analyse import wording
from paceline.observe.analyse.comparison import better
from paceline.observe.analyse.study_data import FIGURES, OVER, StudyData
from paceline.observe.show import markup, plots
from paceline.storage.atomic import write_text_atomically

__all__ = ["study_page", "table_rows", "write_study_page"]

_MOST_METRICS = 6


def table_rows(study: StudyData) -> tuple[list[str], list[list[str]], list[tuple[int, int]]]:
    """The table: its head, its cells, and which of them (row, column) are the best of their column."""
    cells = study.cells
    columns: list[tuple[str, str, Callable[[float], str], str]] = []
    for metric in study.metrics[:_MOST_METRICS]:
        for kind in ("final", "best"):
            columns.append((f"{kind} {metric}", f"{kind}_{metric}", wording.metric, better(metric)))
    directions = {"samples_per_s": "high", "idleness": "low", "bytes": "low"}
    for name, text in FIGURES.items():
        columns.append((name.replace("_per_", "/").replace("_", " "), name, text, directions.get(name, "")))
    columns = [column for column in columns if column[1] in cells and cells[column[1]].notna().any()]
    head = [*study.axes, "runs", *(title for title, *_ in columns)]
    planned = len(study.trials) // max(1, len(cells))
    rows, best = [], []
    for i, row in enumerate(cells.to_dict("records")):
        line = [str(row[name]) for name in study.axes]
        line.append(f"{row['runs']} of {planned}" if row["runs"] != planned else str(planned))
        for j, (_, name, text, direction) in enumerate(columns):
            line.append(_with_deviation(row[name], row[f"{name}_sd"], text))
            known = cells[name].dropna()
            if direction and known.nunique() > 1:
                top = known.max() if direction == "high" else known.min()
                if row[name] == top:
                    best.append((i, len(study.axes) + 1 + j))
        rows.append(line)
    return head, rows, best


def _with_deviation(mean: float, spread: float, text: Callable[[float], str]) -> str:
    if not math.isfinite(mean):
        return "–"
    return text(mean) if not math.isfinite(spread) else f"{text(mean)} ± {text(spread)}"


def study_page(study: StudyData) -> str:
    """The whole page."""
    head, rows, best = table_rows(study)
    job = study.plan.get("job", {})
    states = study.runs["state"].value_counts().to_dict()
    seeds = sorted(study.runs["seed"].unique().tolist())
    script = " ".join([str(job.get("script") or ""), *job.get("args", [])])
    said = ", ".join(f"{number} {state}" for state, number in states.items())
    header = f"<h1>Study of {escape(script)}</h1>\n"
    each = wording.plural(len(seeds), "seed")
    header += markup.paragraph(
        f"{len(study.trials)} runs: {len(rows)} combinations with {each} each; {said}."
    )
    bad = study.runs[study.runs["state"].isin(["failed", "diverged"])]
    if len(bad):
        named = [f"{trial}: {state}" for trial, state in zip(bad["trial"], bad["state"], strict=True)]
        header += markup.box("These runs are in no mean:", named)
    figures = []
    for metric in study.metrics[:_MOST_METRICS]:
        for over, label in OVER.items():
            figures.append(
                plots.band_chart(f"{metric} over {label}", study.curves(metric, over), x_label=label)
            )
    sections = [
        markup.section(
            "Side by side",
            "Mean ± standard deviation over seeds. final: the mean of what each worker logged last; best: "
            "the best value that any worker logged. The best of a column stands out where it is clear what "
            "is better.",
            markup.table(head, rows, best=best),
        ),
        markup.section(
            "What they learned",
            "The mean over seeds, and one standard deviation around it: against samples, which shows what a "
            "sample was worth; against updates; and against seconds of training, which shows the fastest.",
            markup.plot_grid(*figures),
        ),
        markup.section(
            "The runs",
            "Each is a run like any other: paceline report and compare take its directory.",
            _runs_table(study),
        ),
    ]
    return markup.document(f"Study of {script}", header, "\n".join(filter(None, sections)))


def _runs_table(study: StudyData) -> str:
    frame = study.runs
    columns = [*study.axes, "seed", "state", *(name for name in FIGURES if name in frame), "trial"]
    rows = []
    for row in frame[columns].to_dict("records"):
        rows.append([_written(name, value) for name, value in row.items()])
    return markup.table([name.replace("_per_", "/") for name in columns], rows)


def _written(name: str, value: Any) -> str:
    if name not in FIGURES:
        return str(value)
    return FIGURES[name](value) if math.isfinite(value) else "–"


def write_study_page(study: StudyData) -> None:
    """Write study.html, atomically. Raises OSError."""
    write_text_atomically(study.page_path, study_page(study))
