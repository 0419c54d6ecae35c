"""paceline logs: what a run's roles wrote."""

from typing import Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import note
from paceline.observe.record.output import label
from paceline.observe.show.visible import with_colours

__all__ = ["logs"]

COLOURS = ("cyan", "green", "magenta", "blue", "yellow")


def logs(
    run: Annotated[str, parameters.RUN],
    role: Annotated[
        str | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="Only this one: controller, server:0, worker:1, or worker for all workers.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Show the logs of a run's roles: what scripts wrote, and what Paceline says of them.

    Of a progress bar, only its last state.

    [dim]paceline logs last --role worker:1 --follow[/dim]
    """
    from paceline.api.logs import read_logs
    from paceline.api.runs import find_run

    for line in read_logs(find_run(run, trust=trust), role, follow=follow, warn=note):
        _print(line.role, line.text, alone=line.alone)


def _print(name: str, line: str, *, alone: bool) -> None:
    text = with_colours(line)
    if not alone:
        rank = int(name.partition(":")[2] or 0)
        colour = None if name == "controller" else COLOURS[rank % len(COLOURS)]
        text = typer.style(label(name), fg=colour) + text
    typer.echo(text)
