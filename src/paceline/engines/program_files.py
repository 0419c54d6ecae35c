"""The program that other hosts are sent: the script with the modules and small files beside it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from paceline.exceptions import FrameError, PlanError

__all__ = ["ProgramFiles", "checked_path"]

_MOST_FILES = 5_000
_MOST_BYTES = 64 << 20
_MOST_BYTES_BESIDE = 1 << 20
"""Of a file that is no Python source."""
_ENDINGS = (".py", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt")
_NOT_OURS = ("__pycache__", "node_modules", "site-packages")


@dataclass(frozen=True)
class ProgramFiles:
    """Files below one directory, which stands first in the program's `sys.path`."""

    root: Path
    paths: tuple[str, ...]
    """Relative to it, with `/`."""

    @classmethod
    def below(cls, root: Path, script: Path | None) -> "ProgramFiles":
        """What a program needs: Python sources, and small text files of settings.

        Hidden files and directories, and virtual environments, are left out. Data is not sent: every host
        must have it.

        Args:
            script: sent whatever its name is.

        Raises:
            PlanError: these are too many.
        """
        found, size = [] if script is None else [script], 0
        for path in _files(root):
            if path != script:
                found.append(path)
            size += path.stat().st_size
            if len(found) > _MOST_FILES or size > _MOST_BYTES:
                raise PlanError(
                    f"{root} holds more than {_MOST_FILES:,} sources or {_MOST_BYTES >> 20} MB of them, and "
                    "all "
                    "of them would be sent to the other hosts: give the script a directory of its own, with "
                    "what it imports"
                )
        return cls(root, tuple(sorted(path.relative_to(root).as_posix() for path in found)))

    def chunks(self, most: int) -> Iterator[tuple[str, int, bytes]]:
        """Path, position and bytes of every file, in pieces of at most so many bytes. Raises OSError."""
        for path in self.paths:
            at = 0
            with (self.root / path).open("rb") as file:
                while (data := file.read(most)) or not at:
                    yield path, at, data
                    at += max(1, len(data))


def checked_path(path: str) -> PurePosixPath:
    """A relative path that leads nowhere else. Raises FrameError."""
    found = PurePosixPath(path)
    odd = found.is_absolute() or ".." in found.parts or not found.parts or "\0" in path or len(path) > 1000
    if odd or str(found) != path:
        raise FrameError(f"a file named {path!r:.80}")
    return found


def _files(root: Path) -> Iterator[Path]:
    for where, directories, names in os.walk(root):
        directories[:] = sorted(
            each
            for each in directories
            if not each.startswith(".")
            and each not in _NOT_OURS
            and not os.path.exists(os.path.join(where, each, "pyvenv.cfg"))
            and not os.path.exists(os.path.join(where, each, "run.json"))
        )
        for name in sorted(names):
            path = Path(where, name)
            if name.startswith(".") or not name.endswith(_ENDINGS) or not path.is_file():
                continue
            if name.endswith(".py") or path.stat().st_size <= _MOST_BYTES_BESIDE:
                yield path
