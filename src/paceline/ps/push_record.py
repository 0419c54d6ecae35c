"""PushRecord: the record of applied pushes, pushes.csv in the run directory.

Which pushes are kept depends on their numbers alone, so any leader can go on with the file.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from paceline.core.totals import Applied
from paceline.observe.record.thinning import Thinning
from paceline.storage.atomic import write_text_atomically

__all__ = ["PushRecord", "open_pushes"]

_PUSHES = "version,worker,incarnation,sequence,read_version,staleness,samples\n"
_PUSH = re.compile(r"(-?\d+,){6}-?\d+\n")
"""A whole line of it: a full disk may have torn one."""


class PushRecord:
    """The file, and the pushes that are not in it yet.

    Args:
        file: unbuffered: what a full disk refuses is not kept in memory.
        thinning: which pushes the record has.
        pending: applied pushes that are still to be written.
    """

    def __init__(self, file: IO[bytes], thinning: Thinning, pending: Iterable[Applied] = ()) -> None:
        self._file = file
        self._thinning = thinning
        self.pending: list[Applied] = [*pending]

    @classmethod
    def begin(cls, path: Path, applied: int, thinning: Thinning) -> "PushRecord":
        """The record of a run that begins, or goes on from a checkpoint with so many applied pushes."""
        return cls(open_pushes(path, applied, thinning), thinning)

    @classmethod
    def take_over(cls, path: Path, total: int, recent: Iterable[Applied], thinning: Thinning) -> "PushRecord":
        """The record of another leader. What that one had written and told nobody of is done again.

        Args:
            total: number of pushes applied so far.
            recent: the last of them; those that the other leader has not written are among them.
        """
        pending = [*recent]
        written, first = 0, total - len(pending)
        with contextlib.suppress(OSError):
            lines = path.read_bytes().splitlines(keepends=True)
            if not lines[-1].endswith(b"\n"):  # it died while it wrote
                del lines[-1]
            lines = lines[: 1 + thinning.rows_of(total)]
            written = max(0, len(lines) - 1)
            os.truncate(path, sum(map(len, lines)))
        if thinning.rows_of(first) > written:
            pending = []  # it had not written some of those that we do not remember any more
        else:
            done = sum(thinning.rows_of(first + at + 1) <= written for at in range(len(pending)))
            del pending[:done]
        return cls(path.open("ab", buffering=0), thinning, pending)

    def write(self, total: int) -> None:
        """Write what is pending.

        Args:
            total: number of pushes applied so far.

        Raises:
            OSError: it cannot be written; there is a gap.
        """
        first, kept = total - len(self.pending), self._thinning.kept
        lines = [
            f"{r.version + 1},{r.push.id.worker},{r.push.id.incarnation},{r.push.id.sequence},"
            f"{r.push.read_version},{r.staleness},{r.push.samples}\n"
            for number, r in enumerate(self.pending, first)
            if kept(number)
        ]
        self.pending.clear()
        data = "".join(lines).encode()
        written = self._file.write(data)
        if written != len(data):
            torn = written - (data.rfind(b"\n", 0, written) + 1)  # half a line would spoil the next one
            self._file.truncate(self._file.tell() - torn)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_pushes(path: Path, applied: int, thinning: Thinning) -> IO[bytes]:
    """The file, unbuffered.

    Args:
        applied: how many the run goes on from: what came after them is undone, and no part of the record.
        thinning: which pushes the record has.
    """
    kept: list[str] = []
    with contextlib.suppress(OSError):
        lines = path.read_text().splitlines(keepends=True)[1:]
        kept = [line for line in lines if _PUSH.fullmatch(line)][: thinning.rows_of(applied)]
    write_text_atomically(path, "".join([_PUSHES, *kept]))
    return path.open("ab", buffering=0)
