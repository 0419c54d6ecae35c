"""Showing a run while it goes on: a live picture in a terminal, plain lines anywhere else."""

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TextIO

from paceline.observe.analyse import wording
from paceline.observe.analyse.window import Window
from paceline.observe.record.output import OutputPiece, Screen, Stream, label
from paceline.observe.record.status import RunStatus
from paceline.observe.show.passing import Passing
from paceline.observe.show.visible import in_one_line, visible

if TYPE_CHECKING:
    from paceline.observe.show.display import Display

__all__ = ["Progress"]

log = logging.getLogger("paceline.progress")

PLAIN_EVERY_S = 2.0
LIVE_EVERY_S = 0.1
IN_PLACE_EVERY_S = 0.5
RATE_WINDOW_S = 5.0


_P = ParamSpec("_P")


def _guarded(
    method: Callable[Concatenate["Progress", _P], None],
) -> Callable[Concatenate["Progress", _P], None]:
    """One call at a time. A failure costs the live picture, then the display, never the run."""

    @functools.wraps(method)
    def guarded(self: "Progress", /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        with self._lock:
            if self._silent:
                return
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                self._silent = not self._live
                self._live = False
                log.warning("the progress display failed, the run goes on: %r", error)
                display, self._display = self._display, None
                with contextlib.suppress(Exception):
                    if display is not None:
                        display.erase()

    return guarded


class Progress:
    """Shows one status after another, and what scripts write; a context manager, which leaves the last status
    standing.

    A script's output goes where it would go alone, byte by byte: to standard output or standard error. What
    is ours has a stream of its own, which may be the same terminal or file as one of those. There, ours gives
    way while a line of the script is unfinished: a progress bar, a prompt.

    Never raises and never blocks longer than the terminal does: a display that fails (a closed
    pipe, a terminal that is gone) falls silent, and the run goes on. Thread-safe. Starts no thread:
    it draws when it is called, so call `show` a few times a second.

    Args:
        quiet: Show no progress, only what the script itself prints; messages go to stderr.
        live: The full picture, with resources, bytes and servers, where there is a terminal. It stays: of
            scripts' output only lines that are finished are shown.
        stream: Where ours is written; stderr unless told. A terminal gets the live picture.
        shown: The worker whose output is passed on; None: all, in whole lines with the worker's name.
        in_place: Shows a line in the place of the one before, where the stream cannot: a notebook.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        live: bool = False,
        stream: TextIO | None = None,
        shown: int | None = 0,
        in_place: Callable[[str], None] | None = None,
    ) -> None:
        self._quiet = quiet
        self._in_place = in_place
        self._full = live
        self.shown = shown
        self._stream = stream if stream is not None else sys.stderr
        self._script = Passing({Stream.OUT: sys.stdout, Stream.ERR: sys.stderr}, beside=self._stream)
        self._screens: dict[tuple[int, Stream], Screen] = {}
        self._live = not quiet and _is_terminal(self._stream)
        self._display: Display | None = None
        self._lock = threading.RLock()
        self._silent = False
        self._erased = False
        """Whether there was a picture, and is none now."""
        self._messages = 0
        self._state = ""
        self._shown_at = -float("inf")
        self._latest: RunStatus | None = None
        self._window = Window(RATE_WINDOW_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @_guarded
    def show(self, status: RunStatus) -> None:
        """Take a newer status. Draws at once if the state changed or there is a new message."""
        self._latest = status
        self._window.see(status)
        news = status.messages[self._messages :]
        self._messages = len(status.messages)
        for message in news:
            self._say(message)
        changed = status.state != self._state
        self._state = status.state
        every = LIVE_EVERY_S if self._live else PLAIN_EVERY_S if self._in_place is None else IN_PLACE_EVERY_S
        now = time.monotonic()
        due = changed or self._erased or now - self._shown_at >= every
        if self._quiet or self._script.unfinished or not due:
            return
        self._shown_at, self._erased = now, False
        if self._live:
            self._open().draw(status, self._window)
        elif self._in_place is not None:
            self._in_place(plain_line(status, self._window))
        else:
            self._write(plain_line(status, self._window))

    def pass_on(self, pieces: Sequence[OutputPiece]) -> None:
        """Pass on what scripts wrote; also when ours has fallen silent."""
        with self._lock:
            for piece in pieces:
                if self.shown is None or (self._full and self._live):
                    screen = self._screens.setdefault((piece.worker, piece.stream), Screen())
                    lines = [*screen.feed(piece.data), *screen.settled()]
                    self._pass_lines(piece.worker, piece.stream, lines)
                else:
                    self._pass(piece.stream, piece.data)

    def _pass_lines(self, worker: int, stream: Stream, lines: Sequence[str]) -> None:
        before = label(f"worker:{worker}") if self.shown is None else ""
        self._pass(stream, "".join(f"{before}{line}\n" for line in lines).encode())

    def _pass(self, stream: Stream, data: bytes) -> None:
        if data and self._display is not None and self._script.beside(stream):
            self._erased = True
            with contextlib.suppress(OSError, ValueError):  # found out when it is drawn
                self._display.erase()
        self._script.write(stream, data)

    @_guarded
    def print_line(self, text: str) -> None:
        """Print a line of ours."""
        self._write_line(text)

    @_guarded
    def close(self) -> None:
        """Draw the last status once more and give the terminal back; it can be called again."""
        for (worker, stream), screen in self._screens.items():
            self._pass_lines(worker, stream, screen.end())
        self._script.end_line()
        if self._display is not None:
            if self._latest is not None:
                whole = Window(RATE_WINDOW_S)  # of one status: means over the whole run
                whole.see(self._latest)
                self._display.draw(self._latest, whole)
            self._display = None

    def _say(self, message: str) -> None:
        self._write_line(message, style="yellow")

    def _write_line(self, text: str, style: str = "") -> None:
        self._script.end_line()
        text = visible(text)
        if self._live:
            self._open().print(text, style=style)
            self._erased = True
        else:
            self._write(text)

    def _open(self) -> "Display":
        if self._display is None:
            # rich takes a tenth of a second to import: only where it is used.
            from paceline.observe.show.display import Display

            self._display = Display(self._stream, full=self._full)
        return self._display

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def plain_line(status: RunStatus, window: Window) -> str:
    """A status in one line, for logs and pipes; recent rates are the window's."""
    parts = [f"{wording.clock(status.elapsed_s)} {status.state}", *wording.saving(status)]
    if status.version:
        parts.append(wording.progress(status))
        parts += wording.rates(status, window)
        parts.append(f"version {wording.count(status.version)}")
        parts.append(wording.staleness(status))
        parts += wording.metrics(status.metrics)
        parts.append(f"waiting {wording.percent(status.idleness)}")
        parts += wording.trouble(status)
    return in_one_line(" · ".join(parts))


def _is_terminal(stream: TextIO) -> bool:
    # A dumb terminal cannot move the cursor; Emacs and some editors' consoles say so.
    dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
    try:
        return stream.isatty() and not dumb
    except ValueError:  # closed
        return False
