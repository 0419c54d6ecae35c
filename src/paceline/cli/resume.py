"""paceline resume: go on with a run from its last checkpoint."""

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.exceptions import UsageError

__all__ = ["resume"]


def resume(
    ctx: typer.Context,
    run: Annotated[str, options.RUN],
    workers: Annotated[int | None, options.WORKERS] = None,
    servers: Annotated[int | None, options.SERVERS] = None,
    groups: Annotated[int | None, options.GROUPS] = None,
    threads: Annotated[int | None, options.THREADS] = None,
    link: Annotated[str | None, options.LINK] = None,
    tls: Annotated[bool | None, options.TLS] = None,
    certs: Annotated[str | None, options.CERTS] = None,
    mode: Annotated[str | None, options.MODE] = None,
    staleness: Annotated[int | None, options.STALENESS] = None,
    compress: Annotated[str | None, options.COMPRESS] = None,
    prefetch: Annotated[int | None, options.PREFETCH] = None,
    clip_norm: Annotated[float | None, options.CLIP_NORM] = None,
    norm_bound: Annotated[float | None, options.NORM_BOUND] = None,
    optimizers: Annotated[list[str] | None, options.OPTIMIZERS] = None,
    deadline_s: Annotated[float | None, options.DEADLINE] = None,
    max_time_s: Annotated[float | None, options.MAX_TIME] = None,
    max_updates: Annotated[int | None, options.MAX_UPDATES] = None,
    max_restarts: Annotated[int | None, options.MAX_RESTARTS] = None,
    replicas: Annotated[int | None, options.REPLICAS] = None,
    checkpoint_every: Annotated[int | None, options.CHECKPOINT_EVERY] = None,
    keep_checkpoints: Annotated[int | None, options.KEEP_CHECKPOINTS] = None,
    quiet: Annotated[bool, options.QUIET] = False,
) -> None:
    """Go on with a run from its last good checkpoint.

    Options change the run's settings; those left out stay as they were.

    [dim]paceline resume last --servers 3[/dim]
    """
    from paceline.control.rundir import find_run

    found = find_run(run)
    job = found.read_job()
    if found.alive():
        raise found.refusal()
    if job.script is None:
        raise UsageError(
            f"run {found.id} was started by paceline.fit() from Python, so there is no script to "
            f"start again; go on with it there: paceline.fit(…, resume={found.id!r})"
        )
    _go_to(found.started_in)

    from paceline import api
    from paceline.cli.outcome import finish
    from paceline.observe import Progress

    with Progress(quiet=quiet) as progress:
        status = api.resume_run(
            found,
            options.settings_from(ctx.params),
            command=options.command_line(),
            progress=progress,
            lasting=True,
        )
    finish(status)


def _go_to(directory: Path) -> None:
    """Relative paths in the script's arguments mean the directory where the run was started."""
    if directory == Path.cwd():
        return
    try:
        os.chdir(directory)
    except OSError as error:
        raise UsageError(
            f"the run was started in {directory}, which cannot be entered now: "
            f"{error.strerror or error}. The script's relative paths mean that directory"
        ) from error
    options.note(f"working in {directory}, where the run was started")
