"""paceline report: a run as one HTML page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import parameters
from paceline.exceptions import UsageError

if TYPE_CHECKING:
    from paceline.control.rundir import RunDirectory

__all__ = ["report"]


def report(
    run: Annotated[str, parameters.RUN],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write the page. [dim]Default: report.html in the run directory.[/dim]",
            show_default=False,
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Say what limited a run, and write a page that shows where its time went.

    Works while the run goes on, after its end, and with what a killed one left.

    [dim]paceline report last --open[/dim]
    """
    from paceline.control.rundir import find_run
    from paceline.observe.page import key_figures
    from paceline.observe.report import write_html
    from paceline.observe.run_data import RunData

    found = find_run(run)
    state = found.state()
    if not found.alive():
        _to_parquet(found)
    data = RunData(found.path)
    target = output if output is not None else found.path / "report.html"
    if target.is_dir():
        target = target / "report.html"
    try:
        facts, diagnosis = write_html(data, target, state=state)
    except OSError as error:
        reason = error.strerror or str(error)
        if output is not None:
            raise UsageError(
                f"--output {output} cannot be written: {reason}. Name a file in a directory that exists and "
                "that you may write to"
            ) from error
        target = Path.cwd() / f"report-{found.id}.html"
        typer.echo(f"{found.path} cannot be written ({reason}), so the page goes here; --output says where.")
        try:
            facts, diagnosis = write_html(data, target, state=state)
        except OSError as second:
            raise UsageError(
                f"neither {found.path} nor {target.parent} can be written: {second.strerror or second}. Name "
                "a file that can with --output FILE"
            ) from second
    typer.secho(diagnosis.text, bold=True)
    typer.echo()
    for name, value in key_figures(data, facts, state):
        typer.echo(f"  {name:16} {value}")
    for text in data.missing:
        typer.secho(f"  missing: {text}", fg="yellow")
    typer.echo(f"  {'report':16} {target.absolute()}")
    if open_it:
        typer.launch(target.absolute().as_uri())


def _to_parquet(run: "RunDirectory") -> None:
    """A run that was killed left raw records: they are small and quick to read as Parquet."""
    from paceline.observe.tables import to_parquet

    if not (run.path / "raw").is_dir():
        return
    try:
        to_parquet(run.path, lambda text: typer.secho(f"  {text}", fg="yellow"))
    except OSError as error:
        typer.echo(f"{run.path}/raw stays as it is: {error.strerror or error}", err=True)
