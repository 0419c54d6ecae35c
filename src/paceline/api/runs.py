"""Runs that this machine knows: which there are, how each does, and what it recorded.

A run is named by its id, the beginning of one, its directory, or `last`; `find_run` turns that into the
RunDirectory that the other functions take. Nothing here changes a run. A run of another user is refused
unless `trust` is given.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paceline.control.known_runs import find_run
from paceline.control.known_runs import list_runs as run_directories
from paceline.control.rundir import DAMAGED, PRIVATE, RunDirectory, RunLook, runs_root
from paceline.exceptions import UsageError
from paceline.observe import RunStatus
from paceline.storage.atomic import write_text_atomically

if TYPE_CHECKING:
    from paceline.observe.analyse.run_data import RunData

T = TypeVar("T")

__all__ = [
    "RunDirectory",
    "RunFacts",
    "RunList",
    "find_run",
    "list_runs",
    "load_run",
    "newest_runs",
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
    owner: str | None
    """Name of the user whose it is; None: this user's."""
    state: str
    damage: str | None
    """What of it cannot be understood."""
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


@dataclass(frozen=True)
class RunList:
    """Some of the runs."""

    runs: list[RunFacts]
    """The one that was started last first; behind them, if asked for, those of other users."""
    older: int
    """Number of this user's runs that are not in it."""
    others: int
    """Number of other users' runs that are not in it."""


def run_ids() -> list[str]:
    """The ids of all runs of this user, the one that was started last first."""
    return [run.id for run in run_directories()]


def list_runs() -> list[RunFacts]:
    """All runs of this user, the one that was started last first."""
    return newest_runs().runs


def newest_runs(newest: int | None = None, *, everyone: bool = False) -> RunList:
    """All runs, or the newest of them.

    Args:
        everyone: also runs of other users, as far as they can be read.
    """
    found = run_directories(everyone=True)
    own = [run for run in found if run.owner is None]
    others = found[len(own) :]
    shown = [*own[:newest], *(others if everyone else ())]
    return RunList(
        runs=[_facts(run) for run in shown],
        older=len(own) - len(own[:newest]),
        others=0 if everyone else len(others),
    )


def load_run(run: str | Path | RunDirectory, *, trust: bool = False) -> "RunData":
    """A run's tables as data frames: `.spans`, `.totals`, `.resources`, `.pushes`, `.metrics`.

    It may be going on, have ended, or have been killed. Columns: docs/observing.md.

    Args:
        run: its id, the beginning of one, `last`, or its directory.
        trust: it may be another user's.

    Raises:
        RunNotFound: there is none.
        UsageError: it is another user's.
    """
    from paceline.observe.analyse.run_data import RunData

    return RunData((run if isinstance(run, RunDirectory) else find_run(str(run), trust=trust)).path)


def run_status(run: RunDirectory, before: RunStatus | None = None) -> RunStatus:
    """What a run says of itself, and the state `crashed` if it has no controller any more.

    Args:
        before: what it said last; the answer if it is just being written.

    Raises:
        UsageError: it is damaged, or another version of Paceline wrote it.
    """
    look = run.look()
    if before is not None and (not look.told or look.state == DAMAGED):
        return before
    if look.state in (DAMAGED, PRIVATE):
        raise _not_understood(run, look)
    look.status.state = look.state
    return look.status


def prometheus_page(run: RunDirectory) -> str:
    """Where a run stands now, in Prometheus's text format. Raises UsageError if its status is damaged."""
    from paceline.observe.show.exports import prometheus

    look = run.look()
    if look.state in (DAMAGED, PRIVATE):
        raise _not_understood(run, look)
    look.status.state, look.status.run_id = look.state, run.id
    return prometheus(look.status)


def write_prometheus_page(run: RunDirectory, path: Path) -> None:
    """Write `prometheus_page` to a file, whole or not at all: a collector may read it at any time."""
    write_text_atomically(path, prometheus_page(run))


def _not_understood(run: RunDirectory, look: RunLook) -> UsageError:
    if look.state == PRIVATE:
        return UsageError(f"{run.path} may not be read by this user")
    return UsageError(f"{run.path}: {look.damage}. It is damaged, or another version of Paceline wrote it")


def _facts(run: RunDirectory) -> RunFacts:
    look = run.look()
    job, status = look.record.get("job", {}), look.status

    def asked(name: str, kind: type[T]) -> T | None:
        value = job.get(name)
        return value if isinstance(value, kind) else None

    args = job.get("args")
    words = [each for each in args if isinstance(each, str)] if isinstance(args, list) else []
    return RunFacts(
        id=run.id,
        path=str(run.path),
        owner=run.owner,
        state=look.state,
        damage=look.damage,
        created=look.record.get("created"),
        script=asked("script", str),
        args=words if isinstance(args, list) and len(words) == len(args) else None,
        mode=asked("mode", str),
        workers=asked("workers", int),
        servers=asked("servers", int),
        seed=asked("seed", int),
        updates=status.version,
        steps=status.steps,
        epoch=status.epoch,
        samples=status.samples,
        samples_per_s=status.samples_per_s or None,
        steps_per_s=status.steps_per_s or None,
        elapsed_s=status.elapsed_s,
        metrics=status.metrics,
        checkpoints=status.checkpoints,
        resumes=len(look.record.get("resumes") or ()),
        ended_early=status.ended_early,
        diverged=status.diverged,
        error=status.error,
    )
