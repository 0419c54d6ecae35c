"""A second user of this host, for tests. It is a number without a name, so nothing has to be set up for it.

Only root can act as another user: tests that need one carry `needs_root` and are skipped elsewhere.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MALLORY = 61_234
"""The second user."""
NAME = f"number {MALLORY}"
"""As messages call it."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """This process is another user meanwhile, for the kernel and for us."""
    groups, gid, me = os.getgroups(), os.getegid(), os.geteuid()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(me)
        os.setegid(gid)
        os.setgroups(groups)


@contextlib.contextmanager
def shared_place() -> Iterator[Path]:
    """A directory that every user reaches: those of pytest are closed to others."""
    path = Path(tempfile.mkdtemp(prefix="paceline-test-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def give(path: Path, uid: int = MALLORY) -> Path:
    """Make a file, or a directory with all that it holds, another user's."""
    for each in [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]:
        os.lchown(each, uid, uid)
    return path


def open_to_others(path: Path) -> list[str]:
    """What below a directory other users can read or write, with its mode."""
    return [
        f"{each.relative_to(path)} {stat.S_IMODE(each.lstat().st_mode):04o}"
        for each in sorted(path.rglob("*"))
        if not each.is_symlink() and each.lstat().st_mode & 0o077
    ]
