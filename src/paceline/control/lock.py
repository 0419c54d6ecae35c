"""The lock of a run directory: the process that holds it owns the run.

The lock belongs to the open file and not to a process, so it passes with its descriptor from a controller
that dies to the next one and is never free in between. The kernel releases it with its last holder.
"""

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path

from paceline.storage.plain_files import open_plain, read_bytes

__all__ = ["RunLock"]

_LOOKS_S = 0.5
"""A process that only tests the lock holds it for a moment."""
_MOST_BYTES = 64


class RunLock:
    """The lock of one run directory. On a disk without locks every process gets it."""

    def __init__(self, run: Path) -> None:
        self._path = run / "lock"
        self._file: int | None = None
        self._release = lambda: None

    @property
    def descriptor(self) -> int | None:
        """The descriptor to hand to another process; None: this process does not hold it."""
        return self._file

    def take(self) -> bool:
        """Acquire it. False: another process holds it. Raises OSError if the directory cannot be written."""
        if self._file is not None:
            return True
        file = open_plain(self._path, os.O_RDWR | os.O_CREAT)
        until = time.monotonic() + _LOOKS_S
        while not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() > until:
                os.close(file)
                return False
            time.sleep(0.01)
        self.inherit(file)
        return True

    def inherit(self, file: int) -> None:
        """Take it over with a descriptor of another process. The file names the process that holds it."""
        self._file = file
        with contextlib.suppress(OSError):
            os.pwrite(file, b"%-10d\n" % os.getpid(), 0)  # as long as the last: no reader finds a part
        self._release = weakref.finalize(self, os.close, file)

    def give_back(self) -> None:
        """Release it; nothing if it is not held."""
        self._file = None
        self._release()

    def held(self) -> bool:
        """Whether any process holds it."""
        try:
            file = open_plain(self._path)
        except OSError:
            return False
        try:
            return not _locked(file, fcntl.LOCK_SH)
        finally:
            os.close(file)

    def holder(self) -> int | None:
        """Process id of its last holder."""
        with contextlib.suppress(OSError, ValueError):
            return int(read_bytes(self._path, most=_MOST_BYTES))
        return None


def _locked(file: int, how: int) -> bool:
    """Lock an open file without waiting. True on a disk without locks."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
