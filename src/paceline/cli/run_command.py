"""paceline run: start a script with servers and workers, and watch it."""

from typing import Annotated, Any

import typer

from paceline.cli import parameters
from paceline.cli.printing import note
from paceline.observe.record.output import parse_shown
from paceline.plan import make_plan

__all__ = ["run"]


@parameters.takes_job_options("run")
def run(
    ctx: typer.Context,
    script: Annotated[str, parameters.SCRIPT],
    args: Annotated[list[str] | None, parameters.ARGS] = None,
    *,
    live: Annotated[bool, parameters.LIVE] = False,
    output: Annotated[str, parameters.OUTPUT] = "worker:0",
    quiet: Annotated[bool, parameters.QUIET] = False,
    **_: Any,
) -> None:
    """Train with a script on several workers.

    Options stand before the script; everything after it is the script's own.

    [dim]paceline run --workers 4 --mode ssp:3 train.py --lr 0.1[/dim]
    """
    job = parameters.job_from(ctx.params)
    # Refuse what cannot be had before anything heavy is imported.
    plan = make_plan(job)
    parameters.note_late_flags(ctx)
    shown = parse_shown(output, job.workers)
    for warning in plan.warnings:
        note(warning)

    from paceline import api
    from paceline.cli.outcome import finish
    from paceline.observe import Progress

    with Progress(quiet=quiet, live=live, shown=shown) as progress:
        status = api.run_job(job, command=parameters.command_line(), progress=progress, lasting=True)
    finish(status)
