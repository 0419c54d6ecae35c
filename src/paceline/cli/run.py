"""paceline run: start a script with servers and workers, and watch it."""

from typing import Annotated

import typer

from paceline.cli import options
from paceline.plan import Job, make_plan

__all__ = ["run"]


def run(
    ctx: typer.Context,
    script: Annotated[str, options.SCRIPT],
    args: Annotated[list[str] | None, options.ARGS] = None,
    workers: Annotated[int, options.WORKERS] = Job.workers,
    servers: Annotated[int, options.SERVERS] = Job.servers,
    threads: Annotated[int | None, options.THREADS] = None,
    link: Annotated[str, options.LINK] = Job.link,
    mode: Annotated[str, options.MODE] = Job.mode,
    staleness: Annotated[int | None, options.STALENESS] = None,
    clip_norm: Annotated[float | None, options.CLIP_NORM] = None,
    seed: Annotated[int, options.SEED] = Job.seed,
    optimizers: Annotated[list[str] | None, options.OPTIMIZERS] = None,
    deadline_s: Annotated[float, options.DEADLINE] = Job.deadline_s,
    max_restarts: Annotated[int, options.MAX_RESTARTS] = Job.max_restarts,
    checkpoint_every: Annotated[int, options.CHECKPOINT_EVERY] = Job.checkpoint_every,
    keep_checkpoints: Annotated[int, options.KEEP_CHECKPOINTS] = Job.keep_checkpoints,
    run_dir: Annotated[str | None, options.RUN_DIR] = None,
    quiet: Annotated[bool, options.QUIET] = False,
) -> None:
    """Train with a script on several workers.

    Options stand before the script; everything after it is the script's own.

    [dim]paceline run --workers 4 --mode ssp:3 train.py --lr 0.1[/dim]
    """
    job = options.job_from(ctx.params)
    # Refuse what cannot be had before anything heavy is imported.
    plan = make_plan(job)
    options.note_late_flags(ctx)
    for warning in plan.warnings:
        options.note(warning)

    from paceline import api
    from paceline.cli.outcome import finish
    from paceline.observe import Progress

    with Progress(quiet=quiet) as progress:
        status = api.run_job(job, command=options.command_line(), progress=progress)
    finish(status)
