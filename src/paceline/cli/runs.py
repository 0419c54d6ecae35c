"""paceline runs: what ran and runs here."""

import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from paceline.control.rundir import RunDirectory

__all__ = ["runs"]

SHOWN = 20


def runs(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help=f"Show all, not only the newest {SHOWN}.")
    ] = False,
) -> None:
    """List runs, newest first."""
    from paceline.control.rundir import list_runs, runs_root

    found = list_runs()
    if not found:
        typer.echo(f"No runs yet in {runs_root()}. Start one:  paceline run train.py")
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from paceline.observe.display import style_of

    shown = found if everything else found[:SHOWN]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    # The id is what people copy: it folds rather than lose its end.
    table.add_column("id", overflow="fold")
    for name in ("state", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("w×s", "steps", "samples/s", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in shown:
        run_id, state, *rest = _row(run)
        table.add_row(run_id, Text(state, style=style_of(state)), *rest)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    if len(shown) < len(found):
        typer.echo(f"… and {len(found) - len(shown)} older: paceline runs --all")


def _row(run: "RunDirectory") -> tuple[str, ...]:
    """One run's cells; a run that another version wrote, or a crash cut short, has gaps."""
    from paceline.exceptions import PacelineError
    from paceline.observe import RunStatus, words

    try:
        record = run.record()
    except PacelineError:
        record = {}
    status = RunStatus.from_json(run.read_status())
    job: dict[str, Any] = record.get("job", {})
    return (
        run.id,
        run.state(),
        str(job.get("mode", "–")),
        f"{job.get('workers', '–')}×{job.get('servers', '–')}",
        words.count(status.version),
        words.count(status.samples_per_s) if status.samples_per_s else "–",
        _age(record.get("created")),
    )


def _age(created: object) -> str:
    from paceline.observe import words

    try:
        return words.ago(time.time() - datetime.fromisoformat(str(created)).timestamp())
    except ValueError:
        return "–"
