"""Where a role's output goes: files of its own, so that it outlives its readers.

A server's standard output and error are its log. A worker's belong to its script: they go to files of their
own, apart from each other and from Paceline's log of that worker (paceline.control.tail reads them back).
"""

import contextlib
import io
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from paceline.observe.record.output import Stream
from paceline.storage.plain_files import append_to

__all__ = ["ORDER", "SUFFIXES", "log_to", "paths_of", "role_streams", "script_streams"]

SUFFIXES = {Stream.OUT: ".out", Stream.ERR: ".err", Stream.OWN: ".log"}
ORDER = ".order"


def paths_of(log: Path) -> dict[str, Path]:
    """The files of a role, by suffix."""
    return {suffix: log.with_suffix(suffix) for suffix in (*SUFFIXES.values(), ORDER)}


class _Ordered(io.FileIO):
    """A file whose every write leaves a mark: so the order of writes to several files is kept.

    Args:
        order: descriptor of the file of marks.
        terminal: whether what is written is shown in a terminal.
    """

    def __init__(self, descriptor: int, stream: Stream, order: int, *, terminal: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._stream = stream
        self._order = order
        self._terminal = terminal

    def isatty(self) -> bool:
        """Whether the stream of `paceline run` that shows this one was a terminal when the worker started."""
        return self._terminal

    def write(self, data: object, /) -> int:
        written = super().write(data)  # type: ignore[arg-type]
        with contextlib.suppress(OSError):  # a full disk: the order is lost, and nothing else
            end = os.lseek(self.fileno(), 0, os.SEEK_CUR)
            os.write(self._order, (end << 2 | self._stream).to_bytes(8, "little"))
        return written


def script_streams(log: Path) -> TextIO:
    """Standard input, output and error for a script, of this process and what it starts. Returns Paceline's
    own log, which is no business of the script."""
    _say_size()
    _flush()
    paths = paths_of(log)
    out_shown, err_shown = os.isatty(1), os.isatty(2)
    order = append_to(paths[ORDER])
    own = append_to(paths[".log"])
    _become(0, os.open(os.devnull, os.O_RDONLY))
    _become(1, append_to(paths[".out"]))
    _become(2, append_to(paths[".err"]))
    # New objects: a notebook's sys.stdout is not a file. As in a terminal, every line is written at once.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = _text(1, Stream.OUT, order, out_shown, like=sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, Stream.ERR, order, err_shown, like=sys.stderr)  # type: ignore[misc]
    return _text(own, Stream.OWN, order, False, like=sys.stdout)


def role_streams(log: Path) -> TextIO:
    """Standard output and error of this process go to its log, which is returned."""
    _flush()
    _become(0, os.open(os.devnull, os.O_RDONLY))
    _become(1, append_to(log))
    os.dup2(1, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    return sys.stderr


def log_to(file: TextIO, name: str) -> None:
    """Paceline's own loggers write here from now on. All others are the script's."""
    ours = logging.getLogger("paceline")
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
    for old in ours.handlers[:]:
        ours.removeHandler(old)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


def _say_size() -> None:
    """What a script writes is shown in the terminal of who started the run, if there is one: say its size to
    libraries that draw progress bars and tables. Some look at the environment, some (tqdm) ask for it."""
    ask = os.get_terminal_size
    for shown in (2, 1):
        with contextlib.suppress(OSError):
            size = ask(shown)
            break
    else:
        return
    if "COLUMNS" not in os.environ:
        os.environ.update(COLUMNS=str(size.columns), LINES=str(size.lines))

    def get_terminal_size(descriptor: int = 1, /) -> os.terminal_size:
        try:
            return ask(descriptor)
        except OSError:
            if descriptor in (1, 2):
                return size
            raise

    os.get_terminal_size = get_terminal_size


def _text(
    descriptor: int, stream: Stream, order: int, terminal: bool, *, like: TextIO | None
) -> io.TextIOWrapper:
    encoding = getattr(like, "encoding", None) or "utf-8"
    errors = "backslashreplace" if stream is Stream.ERR else getattr(like, "errors", None)
    buffer = io.BufferedWriter(_Ordered(descriptor, stream, order, terminal=terminal))
    return io.TextIOWrapper(buffer, encoding=encoding, errors=errors, line_buffering=True)


def _become(descriptor: int, file: int) -> None:
    os.dup2(file, descriptor)
    os.close(file)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
