"""paceline run: start a script with servers and workers, and watch it."""

from typing import Annotated

import typer

from paceline.cli import options
from paceline.observe.output import parse_shown
from paceline.plan import Job, make_plan

__all__ = ["run"]


def run(
    ctx: typer.Context,
    script: Annotated[str, options.SCRIPT],
    args: Annotated[list[str] | None, options.ARGS] = None,
    module: Annotated[bool, options.MODULE] = False,
    workers: Annotated[int, options.WORKERS] = Job.workers,
    servers: Annotated[int, options.SERVERS] = Job.servers,
    groups: Annotated[int | None, options.GROUPS] = None,
    threads: Annotated[int | None, options.THREADS] = None,
    link: Annotated[str, options.LINK] = Job.link,
    tls: Annotated[bool, options.TLS] = False,
    certs: Annotated[str | None, options.CERTS] = None,
    mode: Annotated[str, options.MODE] = Job.mode,
    staleness: Annotated[int | None, options.STALENESS] = None,
    period: Annotated[int | None, options.PERIOD] = None,
    quorum: Annotated[int | None, options.QUORUM] = None,
    damping: Annotated[str | None, options.DAMPING] = None,
    schedule: Annotated[list[str] | None, options.SCHEDULE] = None,
    guard: Annotated[bool, options.GUARD] = False,
    compress: Annotated[str, options.COMPRESS] = Job.compress,
    compress_replies: Annotated[bool, options.COMPRESS_REPLIES] = False,
    overlap: Annotated[bool, options.OVERLAP] = False,
    prefetch: Annotated[int, options.PREFETCH] = Job.prefetch,
    clip_norm: Annotated[float | None, options.CLIP_NORM] = None,
    norm_bound: Annotated[float | None, options.NORM_BOUND] = None,
    seed: Annotated[int, options.SEED] = Job.seed,
    optimizers: Annotated[list[str] | None, options.OPTIMIZERS] = None,
    deadline_s: Annotated[float, options.DEADLINE] = Job.deadline_s,
    max_time_s: Annotated[float | None, options.MAX_TIME] = None,
    max_updates: Annotated[int | None, options.MAX_UPDATES] = None,
    max_samples: Annotated[int | None, options.MAX_SAMPLES] = None,
    max_restarts: Annotated[int, options.MAX_RESTARTS] = Job.max_restarts,
    replicas: Annotated[int, options.REPLICAS] = Job.replicas,
    checkpoint_every: Annotated[int, options.CHECKPOINT_EVERY] = Job.checkpoint_every,
    keep_checkpoints: Annotated[int, options.KEEP_CHECKPOINTS] = Job.keep_checkpoints,
    records_mb: Annotated[int, options.RECORDS_MB] = Job.records_mb,
    run_dir: Annotated[str | None, options.RUN_DIR] = None,
    spans: Annotated[bool, options.SPANS] = Job.spans,
    torchrun_env: Annotated[bool, options.TORCHRUN_ENV] = Job.torchrun_env,
    live: Annotated[bool, options.LIVE] = False,
    output: Annotated[str, options.OUTPUT] = "worker:0",
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
    shown = parse_shown(output, job.workers)
    for warning in plan.warnings:
        options.note(warning)

    from paceline import api
    from paceline.cli.outcome import finish
    from paceline.observe import Progress

    with Progress(quiet=quiet, live=live, shown=shown) as progress:
        status = api.run_job(job, command=options.command_line(), progress=progress, lasting=True)
    finish(status)
