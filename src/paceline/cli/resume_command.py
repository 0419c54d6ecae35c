"""paceline resume: go on with a run from its last checkpoint."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import parameters
from paceline.cli.arguments import change_arguments
from paceline.cli.printing import note
from paceline.exceptions import UsageError

__all__ = ["resume"]

_ARGS = typer.Argument(
    metavar="-- ARGS",
    help="Changes of the script's own arguments: an option takes the place of the same one before.",
    show_default=False,
)
_REPLACE_ARGS = typer.Option("--replace-args", help="What is behind -- are all of the script's arguments.")


@parameters.takes_job_options("resume")
def resume(
    ctx: typer.Context,
    run: Annotated[str, parameters.RUN],
    args: Annotated[list[str] | None, _ARGS] = None,
    *,
    output: Annotated[str, parameters.OUTPUT] = "worker:0",
    replace_args: Annotated[bool, _REPLACE_ARGS] = False,
    quiet: Annotated[bool, parameters.QUIET] = False,
    trust: Annotated[bool, parameters.TRUST] = False,
    **_: Any,
) -> None:
    """Go on with a run from its last good checkpoint.

    Options change the run's settings; those left out stay as they were. Behind -- stand changes of the
    script's own arguments.

    [dim]paceline resume last --servers 3[/dim]

    [dim]paceline resume last -- --epochs 20[/dim]
    """
    from paceline import api
    from paceline.api.jobs import resumable
    from paceline.observe.record.output import parse_shown

    found = resumable(run, trust=trust)
    job = found.job
    shown = parse_shown(output, ctx.params["workers"] or job.workers)
    overrides = parameters.settings_from(ctx.params)
    if args or replace_args:
        overrides["args"] = _changed(job.args, args or [], replace=replace_args)
    _go_to(found.started_in)

    from paceline.cli.outcome import finish
    from paceline.observe import Progress

    with Progress(quiet=quiet, shown=shown) as progress:
        status = api.resume_run(
            found.run,
            overrides,
            command=parameters.command_line(),
            progress=progress,
            lasting=True,
        )
    finish(status)


def _changed(before: Sequence[str], given: Sequence[str], *, replace: bool) -> tuple[str, ...]:
    """The script's arguments from now on; says what is different."""
    if replace:
        now, different = tuple(given), ["all are replaced"]
    else:
        now, different = change_arguments(before, given)
    if tuple(before) == now:
        note("the script's arguments are the same as before")
    else:
        gets = shlex.join(now) or "no arguments"
        note(f"the script's arguments change: {'; '.join(different)}. It gets: {gets}")
    return now


def _go_to(directory: Path) -> None:
    """Relative paths in the script's arguments mean the directory where the run was started."""
    if directory == Path.cwd():
        return
    try:
        os.chdir(directory)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the run was started in {directory}, which cannot be entered now: "
            f"{getattr(error, 'strerror', None) or error}. The script's relative paths mean that directory"
        ) from error
    note(f"working in {directory}, where the run was started")
