"""What roles write on another host (logs, spans, values), on its way to the run directory.

The agent sends what its files have got since; the controller's side writes it at the same position. A role
that ran on another host before goes on where its log files were: the agent begins them with a hole of that
size.
"""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from paceline.engines.agent_messages import CHUNK_BYTES
from paceline.exceptions import FrameError
from paceline.storage.plain_files import open_plain, plain_size

__all__ = ["OutgoingFiles", "ReceivedFiles"]

_DIRECTORIES = ("logs", "raw")
_NAME = re.compile(r"(logs|raw)/[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_NOT_SENT = (".ledger",)
"""A worker's reports have the same."""
_MOST_AT_ONCE = 4 << 20


class OutgoingFiles:
    """The agent's side: sends what is new in the files of a directory.

    Args:
        root: where roles write as in a run directory.
        send: path, position, bytes.
    """

    def __init__(self, root: Path, send: Callable[[str, int, bytes], None]) -> None:
        self._root = root
        self._send = send
        self._sent: dict[str, int] = {}
        for name in _DIRECTORIES:
            (root / name).mkdir(mode=0o700, exist_ok=True)

    def begin_at(self, sizes: dict[str, int]) -> None:
        """Files that are longer in the run directory begin there. Raises OSError."""
        for name, size in sizes.items():
            path = self._root / _checked(f"logs/{name}")
            with open(open_plain(path, os.O_WRONLY | os.O_CREAT), "ab") as file:
                if os.fstat(file.fileno()).st_size < size:
                    os.ftruncate(file.fileno(), size)
                    self._sent[f"logs/{name}"] = size

    def send_new(self, *, all_of_it: bool = False) -> None:
        """Send what is new.

        Args:
            all_of_it: not only the first megabytes.
        """
        room = float("inf") if all_of_it else _MOST_AT_ONCE
        for directory in _DIRECTORIES:
            for path in sorted((self._root / directory).iterdir()):
                name = f"{directory}/{path.name}"
                if path.suffix not in _NOT_SENT and _NAME.fullmatch(name) and room > 0:
                    room -= self._send_file(name, path, room)

    def _send_file(self, name: str, path: Path, room: float) -> int:
        done = 0
        with contextlib.suppress(OSError):
            at = self._sent.get(name, 0)
            end = min(plain_size(path), at + room)
            if end <= at:
                return 0
            with open(open_plain(path), "rb") as file:
                file.seek(at)
                while at < end and (data := file.read(int(min(CHUNK_BYTES, end - at)))):
                    self._send(name, at, data)
                    at += len(data)
                    done += len(data)
                    self._sent[name] = at
        return done


class ReceivedFiles:
    """The controller's side: writes what agents send into the run directory. One thread at a time for a file.

    Args:
        root: the run directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.broken: OSError | None = None
        """Why something could not be written; it is lost."""

    def write(self, name: str, at: int, data: bytes) -> None:
        """Write bytes of a file. Raises FrameError for a file that is no role's."""
        path = self._root / _checked(name)
        if at < 0:
            raise FrameError(f"position {at} of {name}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(open_plain(path, os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as file:
                os.pwrite(file.fileno(), data, at)
        except OSError as error:
            self.broken = error

    def sizes(self, paths: list[Path]) -> dict[str, int]:
        """Sizes of log files, by name; those that do not exist are left out."""
        found = {}
        for path in paths:
            with contextlib.suppress(OSError):
                found[path.name] = plain_size(path)
        return found


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise FrameError(f"a file named {name!r:.80}")
    return name
