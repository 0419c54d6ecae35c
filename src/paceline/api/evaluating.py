"""Evaluates a run's model with a script's @paceline.evaluation: later, or beside the run while it goes on."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.api.jobs import latest_checkpoint
from paceline.control import RunDirectory
from paceline.exceptions import CheckpointError, LinkError, UsageError
from paceline.observe.record.values import EVALUATION, ValueWriter, read_values
from paceline.plan import Job
from paceline.plan.program_check import check_program, search_path
from paceline.reading import ReaderSession, RunSnapshots, SavedSnapshot, Snapshot
from paceline.reading.snapshots import SnapshotSource
from paceline.storage.checkpoint import committed, load
from paceline.worker.program_runner import exit_code, run_program
from paceline.worker.session import enter_session

__all__ = ["Evaluated", "evaluate_run"]


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of a run's model."""

    version: int
    values: Mapping[str, float]
    seconds: float


def evaluate_run(
    run: RunDirectory,
    *,
    script: str | None = None,
    args: Sequence[str] = (),
    every: int | None = None,
    version: int | None = None,
    shown: Callable[[Evaluated], None],
    say: Callable[[str], None],
) -> None:
    """Run the script up to prepare() in this process, and evaluate the run's model there.

    A run that goes on writes a snapshot for it. Of one that is over, the last checkpoint is evaluated. The
    values are kept with the run.

    Args:
        script: another script than the run's own, with its arguments `args`. It must make the same model.
        every: of a run that goes on: evaluate again after every so many updates, until it is over.
        version: of the checkpoint to evaluate.
        shown: called with each evaluation.
        say: told of each checkpoint or snapshot that cannot be read.

    Raises:
        UsageError: the run was started by fit(), or the script has no evaluation or never prepares.
        CheckpointError: there is no checkpoint.
        LayoutMismatch: the script's model is not the run's.
    """
    job = run.read_job()
    if script is not None:
        job = dataclasses.replace(job, script=script, args=tuple(args), module=False)
    elif job.script is None:
        raise UsageError(
            f"run {run.id} was started by paceline.fit() from Python, so it has no script to evaluate with. "
            f"Name one that makes the same model: paceline eval {run.id} script.py"
        )
    goes_on = run.alive() and version is None
    if every is not None and not goes_on:
        raise UsageError(f"--every {every}: run {run.id} does not go on, so there is one model to evaluate.")
    saved = None if goes_on else _checkpoint(run, version, say)
    with contextlib.ExitStack() as stack:
        if script is None:
            stack.enter_context(contextlib.chdir(run.started_in))
        check_program(job)
        number = 1 + max(
            (s.attempt for s in read_values(run.path).starts if s.worker == EVALUATION), default=-1
        )
        writer = ValueWriter(run.path / "raw", EVALUATION, number)
        stack.callback(writer.close)

        def measured(snapshot: Snapshot, values: Mapping[str, float], seconds: float) -> None:
            writer.at_version(snapshot.version)
            writer.add(values, snapshot.version, snapshot.samples, -1)
            shown(Evaluated(snapshot.version, values, seconds))

        source = RunSnapshots(run.path, alive=run.alive, log=say) if saved is None else saved
        try:
            _evaluate(job, source, every, measured)
        except LinkError:
            if every is None:  # the run ended before it wrote a snapshot
                _evaluate(job, _checkpoint(run, None, say), None, measured)


def _checkpoint(run: RunDirectory, version: int | None, say: Callable[[str], None]) -> SavedSnapshot:
    if version is None:
        return SavedSnapshot(latest_checkpoint(run, say=say))
    paths = {
        int(path.name.partition(".")[0].rpartition("-")[2]): path for path in committed(run.checkpoints_path)
    }
    if version not in paths:
        there = ", ".join(f"{each:,}" for each in sorted(paths)) or "none"
        raise CheckpointError(f"run {run.id} has no checkpoint of version {version:,}; it has {there}")
    return SavedSnapshot(load(paths[version]))


def _evaluate(
    job: Job,
    source: SnapshotSource,
    every: int | None,
    measured: Callable[[Snapshot, Mapping[str, float], float], None],
) -> None:
    script, search = job.script, search_path(job)
    assert script is not None and search is not None
    once = every is None
    enter_session(ReaderSession(source, workers=job.workers, every=every, measured=measured, once=once))
    name = script if job.module else str(Path(script).resolve())
    try:
        run_program(name, job.args, search=os.path.abspath(search), module=job.module)
    except SystemExit as error:
        if code := exit_code(error):
            raise UsageError(f"{script} exited with code {code} before it was evaluated") from None
        return
    raise UsageError(f"{script} ended without calling paceline.prepare(…): nothing was evaluated.")
