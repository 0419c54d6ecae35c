"""A finished run's record, kept aside while the run is resumed: if nothing is left to do, it is put back."""

import contextlib
import shutil
from pathlib import Path

__all__ = ["KeptRecord"]

_ASIDE = ".before-resume"
_NOT_KEPT = (_ASIDE, "checkpoints", "lock")


class KeptRecord:
    """A copy of all files of a run directory but its checkpoints.

    Args:
        path: the run directory.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aside = path / _ASIDE
        self.drop()  # of a resume that was killed
        self._aside.mkdir(mode=0o700)
        for entry in self._record():
            if entry.is_dir():
                shutil.copytree(entry, self._aside / entry.name)
            else:
                shutil.copy2(entry, self._aside / entry.name)

    def _record(self) -> list[Path]:
        return [entry for entry in self._path.iterdir() if entry.name not in _NOT_KEPT]

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
