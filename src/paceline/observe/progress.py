"""Showing a run while it goes on: a live picture in a terminal, plain lines anywhere else."""

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TextIO

from paceline.observe import words
from paceline.observe.status import RunStatus
from paceline.observe.window import Window

if TYPE_CHECKING:
    from paceline.observe.display import Display

__all__ = ["Progress"]

log = logging.getLogger("paceline.progress")

PLAIN_EVERY_S = 2.0
LIVE_EVERY_S = 0.1
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
                        display.close()

    return guarded


class Progress:
    """Shows one status after another; a context manager, which leaves the last one standing.

    Never raises and never blocks longer than the terminal does: a display that fails (a closed
    pipe, a terminal that is gone) falls silent, and the run goes on. Thread-safe. Starts no thread:
    it draws when it is called, so call `show` a few times a second.

    Args:
        quiet: Show no progress, only what the script itself prints; messages go to stderr.
        live: The full picture, with resources, bytes and servers, where there is a terminal.
        stream: Where to write; stdout unless told. A terminal gets the live picture.
    """

    def __init__(self, *, quiet: bool = False, live: bool = False, stream: TextIO | None = None) -> None:
        self._quiet = quiet
        self._full = live
        self._stream = stream if stream is not None else sys.stdout
        self._live = not quiet and _is_terminal(self._stream)
        self._display: Display | None = None
        self._lock = threading.RLock()
        self._silent = False
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
        every = LIVE_EVERY_S if self._live else PLAIN_EVERY_S
        now = time.monotonic()
        if self._quiet or not (changed or now - self._shown_at >= every):
            return
        self._shown_at = now
        if self._live:
            self._open().draw(status, self._window)
        else:
            self._write(plain_line(status, self._window))

    @_guarded
    def print_line(self, text: str) -> None:
        """Print a line of the script's own output, above the live picture if there is one."""
        if self._display is not None:
            self._display.print(text)
        else:
            self._write(text)

    @_guarded
    def close(self) -> None:
        """Draw the last status once more and give the terminal back; it can be called again."""
        if self._display is not None:
            if self._latest is not None:
                whole = Window(RATE_WINDOW_S)  # of one status: means over the whole run
                whole.see(self._latest)
                self._display.draw(self._latest, whole)
            display, self._display = self._display, None
            display.close()

    def _say(self, message: str) -> None:
        if self._quiet:
            print(message, file=sys.stderr, flush=True)  # noqa: T201 - this is the display
        elif self._live:
            self._open().print(message, style="yellow")
        else:
            self._write(message)

    def _open(self) -> "Display":
        if self._display is None:
            # rich takes a tenth of a second to import: only where it is used.
            from paceline.observe.display import Display

            self._display = Display(self._stream, full=self._full)
        return self._display

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def plain_line(status: RunStatus, window: Window) -> str:
    """A status in one line, for logs and pipes; rates are the window's."""
    parts = [f"{words.clock(status.elapsed_s)} {status.state}", *words.saving(status)]
    if status.version:
        parts.append(words.progress(status))
        parts += words.rates(status, window.samples_per_s, window.steps_per_s)
        parts.append(f"version {words.count(status.version)}")
        parts.append(words.staleness(status))
        parts += [f"{name} {words.metric(value)}" for name, value in status.metrics.items()]
        parts.append(f"waiting {words.percent(status.idleness)}")
        parts += words.trouble(status)
    return " · ".join(parts)


def _is_terminal(stream: TextIO) -> bool:
    # A dumb terminal cannot move the cursor; Emacs and some editors' consoles say so.
    dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
    try:
        return stream.isatty() and not dumb
    except ValueError:  # closed
        return False
