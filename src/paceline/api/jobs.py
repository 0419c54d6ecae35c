"""What the commands do: run a job, resume a run, look into a script."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.api.host_runs import hosts_engine
from paceline.control import Controller, RunDirectory, find_run
from paceline.control.kept_record import KeptRecord
from paceline.core.modes import parse_mode
from paceline.engines import Engine, LocalEngine
from paceline.exceptions import CheckpointError, PlanError, RoleFailed, UsageError
from paceline.observe import Progress, RunStatus, write_report
from paceline.observe.record.output import OutputPiece
from paceline.plan import Job, ModelFacts, Plan, make_plan
from paceline.plan.program_check import search_path
from paceline.storage import checkpoint as checkpoints
from paceline.storage.checkpoint_meta import check_meta

__all__ = [
    "ResumableRun",
    "check_goes_on",
    "execute",
    "inspect_script",
    "resumable",
    "resume_run",
    "run_job",
    "write_last",
]

_HEIR = "paceline.api.successor_process:take_over"
"""The function that goes on with a run whose controller was killed."""


def run_job(
    job: Job,
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    lasting: bool = False,
) -> RunStatus:
    """Plan a job and run it to the end. A failed run is a status with `error`, not an exception.

    Args:
        lasting: the run goes on, in the background, when this process is killed.

    Raises:
        UsageError, PlanError: refused before anything started.
    """
    plan = make_plan(job)
    run = RunDirectory.create(job, plan=plan, command=command)
    return execute(plan, run, command=command, progress=progress, lasting=lasting)


@dataclass(frozen=True)
class ResumableRun:
    """A run that can be gone on with."""

    run: RunDirectory
    job: Job
    started_in: Path
    """Relative paths in the job mean this directory."""


def resumable(run: str, *, trust: bool = False) -> ResumableRun:
    """A run to go on with: no controller runs it, and it has a script.

    Args:
        trust: it may be another user's: that user chose the program.

    Raises:
        RunNotFound: there is no such run.
        UsageError: it is going on, was started by `fit`, or is another user's.
    """
    found = find_run(run, trust=trust)
    job = found.read_job()
    if found.alive():
        raise found.refusal()
    if job.script is None:
        raise UsageError(
            f"run {found.id} was started by paceline.fit() from Python, so there is no script to "
            f"start again; go on with it there: paceline.fit(…, resume={found.id!r})"
        )
    return ResumableRun(found, job, found.started_in)


def resume_run(
    run: RunDirectory,
    overrides: Mapping[str, Any],
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    lasting: bool = False,
) -> RunStatus:
    """Go on from a run's last whole checkpoint, with other settings where `overrides` says so.

    If the run has finished and its script finds nothing left to do, its record stays as it was.

    Raises:
        UsageError: the run is alive, or was started by fit().
        CheckpointError: there is no checkpoint to go on from.
    """
    if overrides.get("hosts") == 1:  # where the others joined means nothing any more
        overrides = {"listen": None, **overrides}
    if "mode" in overrides and parse_mode(overrides["mode"]).inner is None:
        overrides = {"groups": None, **overrides}  # they were the old mode's
    earlier = run.read_job()
    job = dataclasses.replace(earlier, **overrides)
    if job.script is None:
        raise UsageError(f"run {run.id} was started by paceline.fit(); call fit(…, resume={run.id!r}).")
    plan = make_plan(job, run_id=run.id)
    found = latest_checkpoint(run, progress)
    check_goes_on(job, found)
    before = run.known_status()
    kept = _kept_record(run) if before.state == "succeeded" else None
    run.record_resume(job, plan=plan, command=command)
    if job.args != earlier.args:
        run.append_event({"kind": "arguments", "was": list(earlier.args), "now": list(job.args)})
    lost = max(0, before.version - found.version)
    if lost and progress is not None:
        progress.print_line(
            f"going on from {found.path.name}: {lost:,} updates after it are lost and are computed again"
        )
    status = execute(plan, run, resume=found.path, command=command, progress=progress, lasting=lasting)
    if kept is None:
        return status
    if status.state != "succeeded" or status.version != found.version:
        kept.drop()
        return status
    kept.put_back()
    if progress is not None:
        progress.print_line(
            "nothing was left to do: the script made no step. The run's record is as it was before. To train "
            f"on, give the script more epochs, as in: paceline resume {run.id} -- --epochs N"
        )
    return before


def _kept_record(run: RunDirectory) -> KeptRecord | None:
    try:
        return KeptRecord(run.path)
    except OSError:  # a full disk: the run itself will say so
        return None


def check_goes_on(job: Job, found: checkpoints.Checkpoint) -> None:
    """Refuse to resume from a checkpoint that is at the job's limit already."""
    if job.max_updates is not None and found.version >= job.max_updates:
        raise UsageError(
            f"the run has made {found.version:,} updates, and max_updates={job.max_updates} ends it after "
            f"{job.max_updates:,}: give a higher limit (--max-updates) to go on"
        )
    samples = int(found.meta["lead"]["samples"])
    if job.max_samples is not None and samples >= job.max_samples:
        raise UsageError(
            f"the run has trained on {samples:,} samples, and max_samples={job.max_samples} ends it after "
            f"{job.max_samples:,}: give a higher limit (--max-samples) to go on"
        )


def latest_checkpoint(
    run: RunDirectory,
    progress: Progress | None = None,
    *,
    say: Callable[[str], None] | None = None,
    check: Callable[[checkpoints.Checkpoint], object] = lambda _: None,
) -> checkpoints.Checkpoint:
    """The newest checkpoint of a run that is whole and that a run can go on from; refused ones are named.

    Args:
        say: told of each that is refused, and why; if not given, `progress` shows it.
        check: one for which it raises CheckpointError is refused, too.
    """
    refused: list[str] = []

    def on_refused(path: Path, error: CheckpointError) -> None:
        refused.append(f"{path.name}: {error}")
        text = f"checkpoint refused, the one before it is used: {error}"
        if say is not None:
            say(text)
        elif progress is not None:
            progress.print_line(text)

    def both(found: checkpoints.Checkpoint) -> None:
        check_meta(found)
        check(found)

    found = checkpoints.latest(run.path / "checkpoints", on_refused=on_refused, check=both)
    if found is None:
        why = "; ".join(refused) or "it has written none yet (see --checkpoint-every)"
        raise CheckpointError(f"run {run.id} has no checkpoint to go on from: {why}")
    return found


def execute(
    plan: Plan,
    run: RunDirectory,
    *,
    resume: Path | None = None,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    program: Callable[[], None] | None = None,
    lasting: bool = False,
) -> RunStatus:
    """Run a plan in its run directory, show it, and write its report."""

    def watch(status: RunStatus, pieces: list[OutputPiece]) -> None:
        if progress is not None:
            progress.pass_on(pieces)
            progress.show(status)

    def finish(status: RunStatus) -> None:
        write_last(run, status, plan.job, command)

    def tell(text: str) -> None:
        if progress is not None:
            progress.print_line(text)

    with contextlib.ExitStack() as stack:
        engine: Engine
        if plan.job.hosts == 1:
            engine = LocalEngine(program)
        else:
            engine = stack.enter_context(hosts_engine(plan, run, tell))
        controller = Controller(
            plan,
            engine,
            run,
            resume=resume,
            watch=watch,
            shown=0 if progress is None else progress.shown,
            finish=finish,
            heir=_HEIR if lasting else None,
        )
        try:
            return controller.run()
        except RoleFailed:
            return controller.status


def write_last(run: RunDirectory, status: RunStatus, job: Job, command: Sequence[str]) -> None:
    """What is written when all else of a run is: its report."""
    try:
        write_report(run.path, status, job.to_json(), command)
    except OSError as error:
        status.messages.append(f"the report cannot be written: {error.strerror or error} ({run.path})")


def _torchrun_env(job: Job) -> dict[str, str]:
    """As worker 0 finds it, but for a place to meet others: there are none."""
    return {"WORLD_SIZE": str(job.workers), "RANK": "0", "LOCAL_RANK": "0"} if job.torchrun_env else {}


def inspect_script(plan: Plan) -> ModelFacts:
    """Run the plan's script up to prepare(), alone, to see what it would train.

    Raises:
        PlanError: the script failed, or never called prepare(); with what it printed.
    """
    job = plan.job
    assert job.script is not None
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "paceline.worker.inspect", str(len(plan.servers)), str(writer)]
    how = [job.compress, "overlap" if job.overlap else "-"]
    what = ["module" if job.module else "script", search_path(job) or "", job.script, *job.args]
    try:
        done = subprocess.run(
            [*command, ",".join(job.optimizers), *how, *what],
            pass_fds=[writer],
            capture_output=True,
            text=True,
            timeout=job.deadline_s,
            env={**os.environ, **_torchrun_env(job)},
        )
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"{job.script} did not reach paceline.prepare() within {job.deadline_s:g} s (--deadline)"
        ) from None
    finally:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
    if text:
        facts = json.loads(text)
        return ModelFacts(**{**facts, "shards": tuple(map(tuple, facts["shards"]))})
    if done.returncode == 0:
        raise PlanError(f"{job.script} ended without calling paceline.prepare(): nothing to plan for.")
    tail = "\n".join(done.stderr.strip().splitlines()[-12:])
    raise PlanError(f"{job.script} failed before paceline.prepare():\n{tail}")
