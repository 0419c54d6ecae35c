"""The runs that this machine knows, and the one that a user means.

`last` and beginnings of ids mean runs of this user: where several users share a runs directory, a run that
another user planted there is never taken for one of them.
"""

import contextlib
import os
from collections import Counter
from difflib import get_close_matches
from pathlib import Path

from paceline.control.run_owner import check_trust, stranger_reason, user_name
from paceline.control.rundir import RunDirectory, runs_root
from paceline.exceptions import RunNotFound
from paceline.observe.record.run_files import read_record, unix_time

__all__ = ["find_run", "list_runs"]


def list_runs(*, everyone: bool = False) -> list[RunDirectory]:
    """Every run of this user in the runs directory once, the one that was started last first.

    Args:
        everyone: runs of other users, too, under the names of their directories. What they say is not read.
    """
    root = runs_root()
    found: dict[Path, tuple[tuple[float, int, str], str]] = {}
    others: list[tuple[int, RunDirectory]] = []
    for name, link in _entries(root):
        path = root / name
        # A link to a directory that was deleted, or something that is not a run: not listed.
        with contextlib.suppress(OSError):
            # A link of another user's could lead anywhere; a link to another user's directory is that user's.
            if link and path.lstat().st_uid != os.geteuid():
                continue
            directory = path.stat()
            try:
                written = (path / "run.json").lstat()
            except PermissionError:
                written = directory  # closed to this user
            path = path.resolve()
            if stranger_reason(directory, written) is not None:
                owner = written.st_uid if directory.st_uid == os.geteuid() else directory.st_uid
                others.append((written.st_mtime_ns, RunDirectory(path, name, owner=user_name(owner))))
            elif path not in found:
                started, run_id = _started(path, written.st_mtime, name)
                found[path] = ((started, written.st_mtime_ns, run_id), run_id)
    newest = sorted(found.items(), key=lambda each: each[1][0], reverse=True)
    number = Counter(run_id for _, (_, run_id) in newest)
    # A copied directory has the id of the original: its own name tells them apart.
    own = [
        RunDirectory(path, run_id if number[run_id] == 1 or path.name == run_id else path.name)
        for path, (_, run_id) in newest
    ]
    if not everyone:
        return own
    return own + [run for _, run in sorted(others, key=lambda each: each[0], reverse=True)]


def _entries(root: Path) -> list[tuple[str, bool]]:
    """Names in the runs directory, and whether they are links."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as entries:
        return sorted((entry.name, entry.is_symlink()) for entry in entries)
    return []


def _started(path: Path, written: float, name: str) -> tuple[float, str]:
    """When a run was started, and its id, as recorded; if that cannot be read, as the files tell."""
    try:
        record = read_record(path)
    except (OSError, ValueError):
        return written, name
    started = unix_time(record.get("created"))
    return written if started is None else started, record["id"]


def find_run(text: str, *, trust: bool = False) -> RunDirectory:
    """The run that a user means.

    Args:
        text: An id, the beginning of one, the path of a run directory, or `last`: the one of this user's
            runs that was started last.
        trust: it may be another user's.

    Raises:
        RunNotFound: with the runs that are close, or what else to do.
        UsageError: it is another user's.
    """
    runs = list_runs(everyone=True)
    own = [run for run in runs if run.owner is None]
    if text == "last" and own:
        return own[0]
    for run in runs:
        if run.id == text:
            return _trusted(run, trust)
    if text and (Path(text) / "run.json").is_file():
        return _trusted(RunDirectory(Path(text).resolve()), trust)
    # A run of another user must not make the beginning of an id ambiguous.
    matching = [run for run in own if text and run.id.startswith(text)]
    matching = matching or [run for run in runs if text and run.id.startswith(text)]
    if len(matching) == 1:
        return _trusted(matching[0], trust)
    if matching:
        raise RunNotFound(
            f"{text!r} is the beginning of {len(matching)} runs: {_listed([run.id for run in matching])}. "
            "Give more of the id, or `last` for the newest"
        )
    raise RunNotFound(_not_found(text, [run.id for run in own]))


def _trusted(run: RunDirectory, trust: bool) -> RunDirectory:
    if not trust:
        check_trust(run.path, "run" if run.owner is None else f"run {run.id}")
    return run


def _not_found(text: str, ids: list[str]) -> str:
    if not ids:
        what = "no run to take the last of" if text == "last" else f"no run {text!r}"
        return (
            f"there is {what}: {runs_root()} holds no runs. "
            "Start one with `paceline run`, or set PACELINE_RUNS to where they are"
        )
    if (looks := Path(text)).is_dir() and text:
        return f"{looks} is a directory but not a run's (it has no run.json). See `paceline runs`"
    close = [each for each in ids if text and text in each] or get_close_matches(text, ids, n=3)
    hint = f" Did you mean {_listed(close)}?" if close else f" The newest is {ids[0]}."
    return f"there is no run {text!r} in {runs_root()}.{hint} `paceline runs` lists all {len(ids)}"


def _listed(ids: list[str]) -> str:
    return ", ".join(ids[:3]) + (", …" if len(ids) > 3 else "")
