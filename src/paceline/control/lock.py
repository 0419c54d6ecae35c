"""Whose run it is: a lock on a file of the run directory.

The lock belongs to the open file and not to a process, so it passes with its descriptor from a controller
that dies to the next one and is never free in between. The kernel releases it with the last who holds it.
"""

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path

__all__ = ["RunLock"]

_LOOKS_S = 0.5
"""Somebody who only looks whether it is held holds it for a moment."""


class RunLock:
    """The lock of one run directory. A disk without locks has none: then nobody is kept out."""

    def __init__(self, run: Path) -> None:
        self._path = run / "lock"
        self._file: int | None = None
        self._release = lambda: None

    @property
    def descriptor(self) -> int | None:
        """What to hand to another process; None: it is not held here."""
        return self._file

    def take(self) -> bool:
        """Hold it. False: somebody else does. Raises OSError if the directory cannot be written."""
        if self._file is not None:
            return True
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        until = time.monotonic() + _LOOKS_S
        while not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() > until:
                os.close(file)
                return False
            time.sleep(0.01)
        self.inherit(file)
        return True

    def inherit(self, file: int) -> None:
        """Hold it by a descriptor that another process had; whoever holds it is named in the file."""
        self._file = file
        with contextlib.suppress(OSError):
            os.pwrite(file, b"%-10d\n" % os.getpid(), 0)  # as long as the last: no reader finds a part
        self._release = weakref.finalize(self, os.close, file)

    def give_back(self) -> None:
        """Hold it no more; nothing if it is not held."""
        self._file = None
        self._release()

    def held(self) -> bool:
        """Whether anybody holds it."""
        try:
            file = os.open(self._path, os.O_RDONLY)
        except OSError:
            return False
        try:
            return not _locked(file, fcntl.LOCK_SH)
        finally:
            os.close(file)

    def holder(self) -> int | None:
        """The process that took it last."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._path.read_text())
        return None


def _locked(file: int, how: int) -> bool:
    """Lock an open file at once, or not. A disk that knows no locks refuses nobody."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
