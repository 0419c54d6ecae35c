"""paceline runs: what ran and runs here."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.printing import cell, say
from paceline.observe.show.visible import in_one_line

if TYPE_CHECKING:
    from paceline.api.runs import RunFacts

__all__ = ["runs"]

SHOWN = 20

COLUMNS = ("id", "user", "state", "mode", "w×s", "steps", "samples/s", "age")
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
    everyone: Annotated[
        bool, typer.Option("--everyone", help="Also runs of other users.", show_default=False)
    ] = False,
) -> None:
    """List your runs, the one that was started last first. One that cannot be read is `damaged`."""
    from paceline.api.runs import newest_runs, runs_root

    listed = newest_runs(None if everything or as_json else SHOWN, everyone=everyone)
    found = listed.runs
    if as_json:
        say(json.dumps([asdict(run) for run in found], indent=2))
        return
    if not found:
        say(f"No runs yet in {runs_root()}. Start one:  paceline run train.py")
        _tell_others(listed.others)
        return

    from rich.console import Console
    from rich.table import Table

    from paceline.observe.show.display import style_of

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    rows = [dict(zip(COLUMNS, map(in_one_line, _row(run)), strict=True)) for run in found]
    columns = fitting(rows, console.width)
    if not everyone:
        columns.remove("user")
    table = Table(box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0), header_style="dim")
    for name in columns:
        # The id is what people copy: it folds rather than lose its end.
        fold = name == "id"
        table.add_column(
            name,
            overflow="fold" if fold else "ellipsis",
            no_wrap=not fold,
            justify="left" if name in ("id", "user", "state", "mode") else "right",
        )
    for row in rows:
        table.add_row(*(cell(row[name], style_of(row[name]) if name == "state" else "") for name in columns))
    console.print(table)
    if listed.older:
        say(f"… and {listed.older} older: paceline runs --all")
    _tell_others(listed.others)


def _tell_others(number: int) -> None:
    if number:
        whose = "1 run of another user" if number == 1 else f"{number} runs of other users"
        say(f"… and {whose}: paceline runs --everyone")


def fitting(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that fit side by side into a terminal so wide, with every id whole."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in COLUMNS}
    if not any(row["user"] for row in rows):
        widths["user"] = -_BETWEEN  # it is not shown
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
        run.owner or "",
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
    from paceline.observe.record.run_files import unix_time

    began = unix_time(created)
    return "–" if began is None else wording.ago(time.time() - began)
