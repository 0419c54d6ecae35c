"""paceline runs: what ran and runs here."""

import json
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from paceline.control.rundir import RunDirectory

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
    from paceline.control.rundir import list_runs, runs_root

    found = list_runs()
    if as_json:
        typer.echo(json.dumps([facts(run) for run in found], indent=2))
        return
    if not found:
        typer.echo(f"No runs yet in {runs_root()}. Start one:  paceline run train.py")
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from paceline.observe.display import style_of

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    shown = found if everything else found[:SHOWN]
    rows = [dict(zip(COLUMNS, _row(facts(run)), strict=True)) for run in shown]
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
    if len(shown) < len(found):
        typer.echo(f"… and {len(found) - len(shown)} older: paceline runs --all")


def fitting(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that fit side by side into a terminal so wide, with every id whole."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in COLUMNS}
    columns = list(COLUMNS)
    for spared in _SPARED:
        if sum(widths[name] + _BETWEEN for name in columns) - _BETWEEN <= width:
            break
        columns.remove(spared)
    return columns


def facts(run: "RunDirectory") -> dict[str, Any]:
    """What `--json` says of one run. One written by another version, or cut short by a crash, has gaps."""
    from paceline.exceptions import PacelineError
    from paceline.observe import RunStatus

    try:
        record = run.record()
    except PacelineError:
        record = {}
    status = RunStatus.from_json(run.read_status())
    job: dict[str, Any] = record.get("job", {})
    return {
        "id": run.id,
        "path": str(run.path),
        "state": run.state(),
        "created": record.get("created"),
        **{name: job.get(name) for name in ("script", "args", "mode", "workers", "servers", "seed")},
        "updates": status.version,
        "steps": status.steps,
        "epoch": status.epoch,
        "samples": status.samples,
        "samples_per_s": status.samples_per_s or None,
        "steps_per_s": status.steps_per_s or None,
        "elapsed_s": status.elapsed_s,
        "metrics": status.metrics,
        "checkpoints": status.checkpoints,
        "resumes": len(record.get("resumes") or ()),
        "ended_early": status.ended_early,
        "diverged": status.diverged,
        "error": status.error,
    }


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    """One run's cells."""
    from paceline.observe import words

    def said(name: str) -> str:
        return "–" if run[name] is None else str(run[name])

    return (
        run["id"],
        "diverged" if run["diverged"] and run["state"] == "succeeded" else run["state"],
        said("mode"),
        f"{said('workers')}×{said('servers')}",
        words.count(run["steps"]),
        _rate(run),
        _age(run["created"]),
    )


def _rate(run: dict[str, Any]) -> str:
    """Samples a second; `40 steps/s` of a run that counts no samples."""
    from paceline.observe import words

    if run["samples_per_s"]:
        return words.count(run["samples_per_s"])
    return f"{words.count(run['steps_per_s'])} steps/s" if run["steps_per_s"] else "–"


def _age(created: object) -> str:
    from paceline.observe import words

    try:
        return words.ago(time.time() - datetime.fromisoformat(str(created)).timestamp())
    except ValueError:
        return "–"
