"""What a role's log has got since it was read last."""

import contextlib
from pathlib import Path

from paceline.observe import FAILURE_MARK

__all__ = ["Tail"]


class Tail:
    """New lines that a worker's script wrote to its log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0
        self._rest = ""
        self._ended = False

    def new_lines(self, *, flush: bool = False) -> list[str]:
        """Whole lines, up to the traceback of a failure; with `flush` also the last one, whole or not."""
        with contextlib.suppress(OSError), self._path.open(errors="replace") as file:
            file.seek(self._position)
            self._rest += file.read(1 << 20)
            self._position = file.tell()
        *lines, self._rest = self._rest.split("\n")
        if flush and self._rest:
            lines.append(self._rest)
            self._rest = ""
        if FAILURE_MARK in lines:
            self._ended = True
            return lines[: lines.index(FAILURE_MARK)]
        return [] if self._ended else lines
