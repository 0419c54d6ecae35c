"""Runs that this machine knows: which there are, how each does, and what it recorded.

A run is named by its id, the beginning of one, its directory, or `last`; `find_run` turns that into the
RunDirectory that the other functions take. Nothing here changes a run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.control.rundir import RunDirectory, find_run, runs_root
from paceline.control.rundir import list_runs as run_directories
from paceline.exceptions import PacelineError, UsageError
from paceline.observe import RunStatus
from paceline.storage.atomic import write_text_atomically

if TYPE_CHECKING:
    from paceline.observe.analyse.run_data import RunData

__all__ = [
    "RunDirectory",
    "RunFacts",
    "find_run",
    "list_runs",
    "load_run",
    "prometheus_page",
    "run_ids",
    "run_status",
    "runs_root",
    "write_prometheus_page",
]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a list of runs says of one."""

    id: str
    path: str
    state: str
    created: str | None
    script: str | None
    args: list[str] | None
    mode: str | None
    workers: int | None
    servers: int | None
    seed: int | None
    updates: int
    steps: int
    epoch: int
    samples: int
    samples_per_s: float | None
    steps_per_s: float | None
    elapsed_s: float
    metrics: dict[str, float]
    checkpoints: list[str]
    resumes: int
    ended_early: str | None
    diverged: str | None
    error: str | None


def run_ids() -> list[str]:
    """The ids of all runs, the one that was started last first."""
    return [run.id for run in run_directories()]


def list_runs(newest: int | None = None) -> list[RunFacts]:
    """All runs, or the newest of them, the one that was started last first."""
    return [_facts(run) for run in run_directories()[:newest]]


def load_run(run: str | Path | RunDirectory) -> "RunData":
    """A run's tables as data frames: `.spans`, `.totals`, `.resources`, `.pushes`, `.metrics`.

    It may be going on, have ended, or have been killed. Columns: docs/observing.md.

    Args:
        run: its id, the beginning of one, `last`, or its directory.

    Raises:
        RunNotFound: there is none.
    """
    from paceline.observe.analyse.run_data import RunData

    return RunData((run if isinstance(run, RunDirectory) else find_run(str(run))).path)


def run_status(run: RunDirectory, before: RunStatus | None = None) -> RunStatus:
    """What a run says of itself, and the state `crashed` if it has no controller any more.

    Args:
        before: what it said last; the answer if it is just being written.

    Raises:
        UsageError: another version of Paceline wrote it.
    """
    # Asked first: a run that ends between the two is then seen to have ended.
    state = run.state()
    data = run.read_status()
    if not data and before is not None:
        return before
    try:
        status = RunStatus.from_json(data)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{run.path / 'status.json'} cannot be understood ({error}): another version of Paceline wrote it"
        ) from error
    if state == "crashed" and not status.ended:
        status.state = state
    return status


def prometheus_page(run: RunDirectory) -> str:
    """Where a run stands now, in Prometheus's text format."""
    from paceline.observe.show.exports import prometheus

    status = RunStatus.from_json(run.read_status())
    status.state, status.run_id = run.state(), run.id
    return prometheus(status)


def write_prometheus_page(run: RunDirectory, path: Path) -> None:
    """Write `prometheus_page` to a file, whole or not at all: a collector may read it at any time."""
    write_text_atomically(path, prometheus_page(run))


def _facts(run: RunDirectory) -> RunFacts:
    try:
        record = run.record()
    except PacelineError:
        record = {}
    status = RunStatus.from_json(run.read_status())
    job: dict[str, Any] = record.get("job", {})
    return RunFacts(
        id=run.id,
        path=str(run.path),
        state=run.state(),
        created=record.get("created"),
        script=job.get("script"),
        args=job.get("args"),
        mode=job.get("mode"),
        workers=job.get("workers"),
        servers=job.get("servers"),
        seed=job.get("seed"),
        updates=status.version,
        steps=status.steps,
        epoch=status.epoch,
        samples=status.samples,
        samples_per_s=status.samples_per_s or None,
        steps_per_s=status.steps_per_s or None,
        elapsed_s=status.elapsed_s,
        metrics=status.metrics,
        checkpoints=status.checkpoints,
        resumes=len(record.get("resumes") or ()),
        ended_early=status.ended_early,
        diverged=status.diverged,
        error=status.error,
    )
