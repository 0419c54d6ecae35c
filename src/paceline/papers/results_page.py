"""The results of a paper's repetition as one page and one JSON file."""

import json
from html import escape
from pathlib import Path

from paceline.observe.analyse.facts import Series
from paceline.observe.show import markup, plots
from paceline.papers.results import Chart, Experiment, ResultRow, Results
from paceline.storage.atomic import write_text_atomically

__all__ = ["HEAD", "cells", "results_page", "write_results"]

HEAD = ("case", "unit", "paper", "ours", "ours / paper", "")
"""Of the table of an experiment."""


def cells(row: ResultRow) -> tuple[str, ...]:
    """A row of such a table, as text."""
    ratio = "–" if row.ratio is None else f"{row.ratio:.3g}"
    paper = "–" if row.paper is None else f"{row.paper:,g}"  # as it is printed there
    return row.case, row.unit, paper, _number(row.ours), ratio, row.note


def results_page(results: Results) -> str:
    """One self-contained page."""
    failed = [
        f"{check.text}: {check.found}"
        for each in results.experiments
        for check in each.checks
        if not check.ok
    ]
    count = sum(len(each.checks) for each in results.experiments)
    verdict = f"{count - len(failed)} of {count} checks passed." if count else "This paper has no checks."
    header = (
        f"<h1>{escape(results.paper)}, repeated with Paceline</h1>\n"
        f'<p class="verdict">{escape(verdict)} Trained on {escape(results.data)}.</p>\n'
    )
    header += markup.tiles(
        (
            ("scale", results.scale),
            ("data", results.data),
            ("machine", results.machine),
            ("date", results.date),
            ("time", f"{results.seconds / 60:.1f} min"),
        )
    )
    if failed:
        header += markup.box("Checks that failed:", failed)
    main = "\n".join(map(_section, results.experiments))
    return markup.document(f"{results.paper}, repeated", header, main)


def write_results(results: Results, folder: Path) -> Path:
    """Write results.html and results.json; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / "results.json", json.dumps(results.to_json(), indent=1) + "\n")
    write_text_atomically(folder / "results.html", results_page(results))
    return folder / "results.html"


def _section(each: Experiment) -> str:
    checks = [(check.text, check.found, "yes" if check.ok else "NO") for check in each.checks]
    return markup.section(
        each.title + (" · emulated" if each.emulated else ""),
        each.how,
        markup.plot_grid(*map(_chart, each.charts)),
        markup.table(HEAD, map(cells, each.rows)),
        markup.table(("check", "found", "passed"), checks, classes="words"),
        markup.paragraph(f"Why ours differs: {each.why}"),
    )


def _chart(chart: Chart) -> str:
    curves = [Series(name, xs, ys) for name, xs, ys in chart.curves]
    return plots.line_chart(chart.title, curves, x_label=chart.x_label, y_label=chart.y_label, from_zero=True)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
