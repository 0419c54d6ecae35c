"""Whose a run directory is, and that nothing in it leads elsewhere.

A run's record says which program to start, so to go on with a run is to trust its owner. A run is one's own
if its directory and its run.json belong to this user, and not every user may write there. A directory that a
new run is given must be one's own, too, and hold no link, pipe or file of another user under a name that the
run uses: it would be followed, written to, or believed.
"""

import contextlib
import os
import pwd
import stat
from pathlib import Path

from paceline.exceptions import PlanError, UsageError

__all__ = ["OWN_NAMES", "check_trust", "make_parents", "stranger_reason", "take_directory", "user_name"]

OWN_NAMES = frozenset(
    {
        *("run.json", "status.json", "control.json", "attempts.json", "summary.json", "lock"),
        *("events.jsonl", "pushes.csv", "report.html", ".before-resume", "join-token"),
        *("logs", "checkpoints", "raw", "requests", "snapshots"),
        *(f"{table}.parquet" for table in ("spans", "totals", "resources", "values")),
    }
)
"""What a run writes in its directory."""


def user_name(uid: int) -> str:
    """A user as people know it: `mallory`, or `number 1004` where it has no name here."""
    with contextlib.suppress(KeyError, OverflowError):
        return pwd.getpwuid(uid).pw_name
    return f"number {uid}"


def stranger_reason(found: os.stat_result, record: os.stat_result | None = None) -> str | None:
    """Why a directory is not one's own, in words; None: it is.

    Args:
        found: the directory.
        record: its run.json.
    """
    if found.st_uid != os.geteuid():
        return f"belongs to user {user_name(found.st_uid)}"
    if record is not None and record.st_uid != os.geteuid():
        return f"has a run.json of user {user_name(record.st_uid)}"
    if found.st_mode & stat.S_IWOTH:
        return (
            f"can be written by every user (mode {stat.S_IMODE(found.st_mode):04o}; `chmod go-w` ends that)"
        )
    return None


def check_trust(path: Path, what: str) -> None:
    """Refuse a run or a study that is not one's own.

    Args:
        what: for the message: `run 20261115-081502-digits-4f2a`.

    Raises:
        UsageError: it is another user's.
    """
    try:
        found, record = path.stat(), None
        with contextlib.suppress(FileNotFoundError, PermissionError):
            record = (path / "run.json").lstat()
    except FileNotFoundError:
        return  # there is nothing to trust; its reader says so
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if (reason := stranger_reason(found, record)) is not None:
        raise UsageError(
            f"{what} ({path}) {reason}. What it says may be that user's: a program to start, a model, texts. "
            "--trust uses it all the same"
        )


def make_parents(path: Path) -> None:
    """Make the directories above `path` that are missing. No other user may write there."""
    if not path.parent.exists():
        make_parents(path.parent)
        path.parent.mkdir(mode=0o755, exist_ok=True)


def take_directory(path: Path, setting: str) -> bool:
    """Make a run's directory, or take one that exists for the run; other users can then not write there.

    Args:
        setting: for the message: what named it.

    Returns:
        Whether it was made.

    Raises:
        OSError: it cannot be made, or is not a directory.
        PlanError: it is another user's, or holds what leads elsewhere.
    """
    make_parents(path)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        return True
    link, found = path.lstat(), path.stat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise _refused(path, f"is a link of user {user_name(link.st_uid)}", setting)
    if not stat.S_ISDIR(found.st_mode):
        raise FileExistsError(17, os.strerror(17), str(path))
    if found.st_uid != os.geteuid():
        raise _refused(path, f"belongs to user {user_name(found.st_uid)}", setting)
    if found.st_mode & 0o022:
        path.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    # Only now: nobody can add anything any more.
    check_entries(path, setting)
    return False


def check_entries(path: Path, setting: str) -> None:
    """Refuse a run directory in which a name of the run's is not what the run would make there.

    Raises:
        PlanError: a link, a pipe, a file of another user, or one that has a second name.
    """
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name not in OWN_NAMES:
                continue
            found = entry.stat(follow_symlinks=False)
            directory = stat.S_ISDIR(found.st_mode)
            if stat.S_ISLNK(found.st_mode):
                wrong = "is a link, and a run follows none in its directory"
            elif not directory and not stat.S_ISREG(found.st_mode):
                wrong = "is neither a plain file nor a directory"
            elif found.st_uid not in (path.stat().st_uid, os.geteuid()):
                wrong = f"belongs to user {user_name(found.st_uid)}"
            elif not directory and found.st_nlink > 1:
                wrong = "has a second name, under which it may be another file"
            else:
                continue
            raise _refused(path, f"holds {entry.name!r}, which {wrong}", setting)


def _refused(path: Path, why: str, setting: str) -> PlanError:
    return PlanError(
        f"the run directory {path} {why}. Set by {setting}; name a new directory, or one of your own "
        "without it"
    )
