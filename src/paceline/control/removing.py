"""Which runs to remove, and removing one. A run that is going on, or still writes its report, stays."""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.control.run_owner import OWN_NAMES
from paceline.control.rundir import DAMAGED, RunDirectory, runs_root
from paceline.exceptions import PlanError, UsageError
from paceline.observe.record.run_files import AskedFor, unix_time

__all__ = ["KEPT_STATES", "Candidate", "candidate", "choose", "refusal", "remove"]

KEPT_STATES = ("succeeded", "failed", "stopped", "crashed", DAMAGED)
"""States of runs that have no controller."""

_LAST = ("run.json", "lock")
"""What makes it a run: as long as they are there it is listed, and can be removed again."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run that may be removed."""

    run: RunDirectory
    state: str
    alive: bool
    changed: float
    """Unix time at which it last said something: when it ended."""
    nbytes: int
    """What it takes on its disk."""


def candidate(run: RunDirectory) -> Candidate:
    """What there is to know of a run before it is removed. Reads the size of every file."""
    changed = unix_time(run.read_status().get("updated"))
    if changed is None:
        changed = run.path.stat().st_mtime
    look = run.look()
    return Candidate(
        run=run, state=look.state, alive=look.alive, changed=changed, nbytes=_size(_contents(run))
    )


def choose(
    candidates: Sequence[Candidate],
    *,
    now: float,
    older_than_s: float | None = None,
    larger_than: int | None = None,
    states: Collection[str] = KEPT_STATES,
    keep: int = 0,
) -> list[Candidate]:
    """Those that fulfil all conditions. One that is going on never does.

    Args:
        candidates: the newest first.
        now: Unix time.
        older_than_s: since it ended.
        larger_than: bytes.
        keep: so many of the newest stay, whatever they are.
    """
    return [
        each
        for each in candidates[keep:]
        if not each.alive
        and each.state in states
        and (older_than_s is None or now - each.changed > older_than_s)
        and (larger_than is None or each.nbytes > larger_than)
    ]


def remove(run: RunDirectory) -> list[str]:
    """Delete a run's files, its directory and the link to it.

    A directory that was there before the run (--run-dir) may hold what is not the run's: that stays.

    Returns:
        The names of what was left in the directory.

    Raises:
        UsageError: the run is going on.
        PlanError: a file cannot be deleted.
    """
    if run.alive():
        raise refusal(run)
    target = run.path.resolve()
    try:
        if not run.lock.take():
            raise refusal(run)
        try:
            for path in _contents(run):
                _delete(path)
            for name in _LAST:
                _delete(run.path / name)
        finally:
            run.lock.give_back()
        left = sorted(path.name for path in run.path.iterdir())
        if not left:
            run.path.rmdir()
        root = runs_root()
        for entry in root.iterdir() if root.is_dir() else ():
            if entry.is_symlink() and entry.resolve() == target:
                entry.unlink()
    except OSError as error:
        raise PlanError(
            f"run {run.id} cannot be removed: {error.strerror or error} ({error.filename}). Some of its "
            "files may be gone; remove it as the user whose run it is"
        ) from error
    return left


def refusal(run: RunDirectory) -> UsageError:
    """The error for a user who wants to remove a run in progress."""
    state = str(run.read_status().get("state", "unknown"))
    if run.alive():
        return UsageError(
            f"run {run.id} is going on (state {state}), and is not removed. `paceline stop {run.id}` stops it"
        )
    return UsageError(f"run {run.id} {state}, and its report is being written: remove it in a moment")


def _contents(run: RunDirectory) -> Iterator[Path]:
    """All of a run but what makes it one."""
    record: AskedFor = {}
    with contextlib.suppress(UsageError):
        record = run.record()
    own = record.get("made", run.path.name == run.id)
    for path in sorted(run.path.iterdir()):
        ours = path.name in OWN_NAMES or path.suffix == ".parquet" or ".tmp-" in path.name
        if path.name not in _LAST and (own or ours):
            yield path


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _size(paths: Iterator[Path]) -> int:
    """Bytes on the disk, not those that the files say they have."""
    total = 0
    for path in paths:
        inside = (os.path.join(at, name) for at, _, names in os.walk(path) for name in names)
        for each in (str(path), *inside):
            with contextlib.suppress(OSError):
                total += os.lstat(each).st_blocks * 512
    return total
