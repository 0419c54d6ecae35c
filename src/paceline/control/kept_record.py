"""A finished run's record, kept aside while the run is resumed: if nothing is left to do, it is put back."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

__all__ = ["KeptRecord"]

_ASIDE = ".before-resume"
_NOT_KEPT = (_ASIDE, "checkpoints", "lock")
_MOST_BYTES = 4 << 30
"""Of a larger record no copy is made."""


class KeptRecord:
    """A copy of all files of a run directory but its checkpoints.

    Args:
        path: the run directory.

    Raises:
        OSError: it cannot be written, or there is too much of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aside = path / _ASIDE
        self.drop()  # of a resume that was killed
        self._aside.mkdir(mode=0o700)
        entries = self._record()
        # As copying sees it: a file of zeros that takes no room on the disk is written in full.
        if sum(_size(entry) for entry in entries) > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"its record has more than {_MOST_BYTES:,} bytes", str(path))
        for entry in entries:
            if entry.is_dir():
                shutil.copytree(entry, self._aside / entry.name, symlinks=True)
            else:
                shutil.copy2(entry, self._aside / entry.name)

    def _record(self) -> list[Path]:
        """Plain files and directories: anything else is not the run's, and stays where it is."""
        return [
            entry
            for entry in self._path.iterdir()
            if entry.name not in _NOT_KEPT and not entry.is_symlink() and (entry.is_dir() or entry.is_file())
        ]

    def put_back(self) -> None:
        """Restore the record. Files are replaced one by one, so a reader finds the old or the new one."""
        for entry in self._record():
            if not (self._aside / entry.name).exists():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for kept in self._aside.iterdir():
            there = self._path / kept.name
            if kept.is_dir():
                shutil.rmtree(there, ignore_errors=True)
            kept.replace(there)
        self.drop()

    def drop(self) -> None:
        """Remove the copy: the run continues with its new record."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._aside)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    inside = (os.path.join(at, name) for at, _, names in os.walk(path) for name in names)
    return sum(os.lstat(each).st_size for each in (str(path), *inside))
