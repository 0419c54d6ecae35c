"""paceline report: a run as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import say

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
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Say what limited a run, and write a page that shows where its time went.

    Works while the run goes on, after its end, and with what a killed one left.

    [dim]paceline report last --open[/dim]
    """
    from paceline.api.reports import write_report
    from paceline.api.runs import find_run

    written = write_report(
        find_run(run, trust=trust), output, warn=lambda text: say(f"  {text}", fg="yellow"), tell=say
    )
    if written.raw_kept is not None:
        say(written.raw_kept, err=True)
    say(written.diagnosis, bold=True)
    say()
    for name, value in written.figures:
        say(f"  {name:16} {value}")
    for text in written.missing:
        say(f"  missing: {text}", fg="yellow")
    say(f"  {'report':16} {written.path}")
    if open_it:
        typer.launch(written.path.as_uri())
