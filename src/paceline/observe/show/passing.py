"""Passes a script's output on to this process's own, beside what is ours."""

import codecs
import contextlib
import os
from collections.abc import Mapping
from typing import TextIO

from paceline.observe.record.output import Stream

__all__ = ["Passing"]


class Passing:
    """Writes bytes as they are, and knows whether the script's line is unfinished where ours is written.

    Args:
        targets: where each of the script's streams goes.
        beside: where ours goes.
    """

    def __init__(self, targets: Mapping[Stream, TextIO], *, beside: TextIO) -> None:
        self._targets = dict(targets)
        self._ours = beside
        self._place = {stream: _place(target) for stream, target in targets.items()}
        self._decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in targets}
        self.unfinished = False

    def beside(self, stream: Stream) -> bool:
        """Whether this stream and ours are one terminal, file or pipe."""
        return self._targets.get(stream) is self._ours or self._place.get(stream) == _place(self._ours)

    def write(self, stream: Stream, data: bytes) -> None:
        """Pass this on at once."""
        target = self._targets.get(stream)
        if not data or target is None:
            return
        try:
            buffer = getattr(target, "buffer", None)
            if buffer is not None:
                target.flush()
                buffer.write(data)
            else:  # a notebook's
                target.write(self._decoders[stream].decode(data))
            target.flush()
        except (OSError, ValueError):
            del self._targets[stream]  # nobody reads it any more (`| head`); the run goes on
            return
        if self.beside(stream):
            self.unfinished = not data.endswith(b"\n")

    def end_line(self) -> None:
        """End the script's unfinished line, so that our text begins a line."""
        if self.unfinished:
            self.unfinished = False
            self._ours.write("\n")
            self._ours.flush()


def _place(stream: TextIO) -> tuple[int, int, int] | int:
    """The same for streams that lead to the same place."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found = os.fstat(stream.fileno())
        return found.st_dev, found.st_ino, found.st_rdev
    return id(stream)
