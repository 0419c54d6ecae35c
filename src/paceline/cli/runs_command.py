"""paceline runs: what ran and runs here."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.api.runs import RunFacts

__all__ = ["runs"]

SHOWN = 20

COLUMNS = ("id", "state", "mode", "w×s", "steps", "samples/s", "age")
_SPARED = ("samples/s", "w×s", "mode", "steps")
"""Columns that a narrow terminal does without, the first of them first."""
_BETWEEN = 2


def runs(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help=f"Show all, not only the newest {SHOWN}.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="All of them, as a JSON list for programs.", show_default=False)
    ] = False,
) -> None:
    """List runs, the one that was started last first."""
    from paceline.api.runs import list_runs, run_ids, runs_root

    if as_json:
        typer.echo(json.dumps([asdict(run) for run in list_runs()], indent=2))
        return
    found = list_runs(None if everything else SHOWN)
    if not found:
        typer.echo(f"No runs yet in {runs_root()}. Start one:  paceline run train.py")
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from paceline.observe.show.display import style_of

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    rows = [dict(zip(COLUMNS, _row(run), strict=True)) for run in found]
    columns = fitting(rows, console.width)
    table = Table(box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0), header_style="dim")
    for name in columns:
        # The id is what people copy: it folds rather than lose its end.
        fold = name == "id"
        table.add_column(
            name,
            overflow="fold" if fold else "ellipsis",
            no_wrap=not fold,
            justify="left" if name in ("id", "state", "mode") else "right",
        )
    for row in rows:
        table.add_row(
            *(Text(row[name], style=style_of(row[name]) if name == "state" else "") for name in columns)
        )
    console.print(table)
    if not everything and (older := len(run_ids()) - len(found)) > 0:
        typer.echo(f"… and {older} older: paceline runs --all")


def fitting(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that fit side by side into a terminal so wide, with every id whole."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in COLUMNS}
    columns = list(COLUMNS)
    for spared in _SPARED:
        if sum(widths[name] + _BETWEEN for name in columns) - _BETWEEN <= width:
            break
        columns.remove(spared)
    return columns


def _row(run: "RunFacts") -> tuple[str, ...]:
    """One run's cells."""
    from paceline.observe.analyse import wording

    def said(name: str) -> str:
        return "–" if getattr(run, name) is None else str(getattr(run, name))

    return (
        run.id,
        "diverged" if run.diverged and run.state == "succeeded" else run.state,
        said("mode"),
        f"{said('workers')}×{said('servers')}",
        wording.count(run.steps),
        _rate(run),
        _age(run.created),
    )


def _rate(run: "RunFacts") -> str:
    """Samples a second; `40 steps/s` of a run that counts no samples."""
    from paceline.observe.analyse import wording

    if run.samples_per_s:
        return wording.count(run.samples_per_s)
    return f"{wording.count(run.steps_per_s)} steps/s" if run.steps_per_s else "–"


def _age(created: object) -> str:
    from paceline.observe.analyse import wording

    try:
        return wording.ago(time.time() - datetime.fromisoformat(str(created)).timestamp())
    except ValueError:
        return "–"
