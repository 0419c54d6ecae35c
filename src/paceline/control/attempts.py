"""attempts.json: how often each worker of a run was started, over all replacements, go-backs and resumes."""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from paceline.storage.json_files import read_object
from paceline.storage.plain_files import open_plain
from paceline.storage.typed_json import checked

__all__ = ["Attempt", "Attempts"]

_MOST_BYTES = 1 << 20


class _KeptNumbers(TypedDict):
    """The file's content: numbers by worker."""

    started: dict[int, int]
    since: dict[int, int]


@dataclass(frozen=True)
class Attempt:
    """One start of a worker."""

    number: int
    """Counted from 0."""
    after: int | None
    """The attempt that it replaces and whose steps it continues; None: it starts the run or a checkpoint."""


class Attempts:
    """The file of one run directory. A full disk costs the numbers of later controllers, and nothing else.

    Args:
        resumes: how often the run was resumed, for one that has no such file yet.
    """

    def __init__(self, run: Path, resumes: int = 0) -> None:
        self._path = run / "attempts.json"
        self._first = resumes
        self._started: dict[int, int] = {}
        """How often each worker was started."""
        self._since: dict[int, int] = {}
        """The attempt with which each worker began, or went on from a checkpoint, last."""
        with contextlib.suppress(OSError, ValueError):
            known = checked(_KeptNumbers, read_object(self._path, most=_MOST_BYTES))
            self._started, self._since = known["started"], known["since"]

    def begin_anew(self) -> None:
        """The run starts, or all workers start again from a checkpoint: none replaces an earlier process."""
        self._since = dict(self._started)

    def start(self, rank: int) -> Attempt:
        """A worker is started now."""
        number = self._started.get(rank, self._first)
        since = self._since.setdefault(rank, number)
        self._started[rank] = number + 1
        self._write()
        return Attempt(number, number - 1 if number > since else None)

    def _write(self) -> None:
        text = json.dumps({"started": self._started, "since": self._since})
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        # Without fsync, at the start of every worker: after a power cut a number may be used again.
        with contextlib.suppress(OSError):
            with open(open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                file.write(text)
            os.replace(temporary, self._path)
