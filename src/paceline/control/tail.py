"""What a role's log has got since it was read last.

A worker's log is several files: what the script wrote to its standard output (`worker-0.out`) and to its
standard error (`worker-0.err`), what Paceline says of it (`worker-0.log`), and `worker-0.order`: after each
write eight bytes: the stream and its new length. So each is whole in itself, and all
together are in the order in which they were written. What programs that the script starts write has no such
mark, and comes as soon as it is found.

Other roles, and runs of earlier versions, have the `.log` only.
"""

import collections
import contextlib
from collections.abc import Iterable
from pathlib import Path

from paceline.engines.streams import ORDER, SUFFIXES, paths_of
from paceline.observe.record.output import OutputPiece, Stream
from paceline.storage.plain_files import open_plain, plain_size

__all__ = ["Outputs", "Tail"]

_MOST_BYTES = 1 << 20
"""Read at once."""


class Tail:
    """What is new in a role's log.

    Args:
        log: path of the `.log`.
        at_end: begin with what is written from now on.
    """

    def __init__(self, log: Path, *, at_end: bool = False) -> None:
        paths = paths_of(log)
        self._paths = {stream: paths[suffix] for stream, suffix in SUFFIXES.items()}
        self._order_path = paths[ORDER]
        self._at = dict.fromkeys(Stream, 0)
        self._order_at = 0
        self._records: collections.deque[tuple[Stream, int]] = collections.deque()
        if at_end:
            self._at = {stream: _size(path) for stream, path in self._paths.items()}
            self._order_at = _size(self._order_path)

    def read(self) -> list[tuple[Stream, bytes]]:
        """What is new, in the order in which it was written; of very much the first part."""
        waited = len(self._records)
        # Sizes first: every mark that is found then and goes further is of something written since.
        sizes = {stream: _size(path) for stream, path in self._paths.items()}
        # Every mark is of a byte at least: a file with more of them was not written by a role.
        self._read_order(8 * sum(sizes.values()))
        found: list[tuple[Stream, bytes]] = []
        room = _MOST_BYTES
        while self._records and room > 0:
            stream, end = self._records[0]
            if end > sizes[stream] and not waited:
                return _joined(found)
            data = self._take(stream, min(end, sizes[stream]), room)
            room -= len(data)
            found.append((stream, data))
            if self._at[stream] < min(end, sizes[stream]):
                return _joined(found)  # the rest of it next time
            self._records.popleft()
            waited = max(0, waited - 1)
        for stream, size in sizes.items():
            data = self._take(stream, size, room)
            room -= len(data)
            found.append((stream, data))
        return _joined(found)

    def read_all(self) -> list[tuple[Stream, bytes]]:
        """All that is new."""
        found: list[tuple[Stream, bytes]] = []
        while (more := self.read()) or self._records:
            found += more
        return _joined(found)

    def _take(self, stream: Stream, end: int, room: int) -> bytes:
        start = self._at[stream]
        if min(end, start + room) <= start:
            return b""
        data = b""
        with contextlib.suppress(OSError), open(open_plain(self._paths[stream]), "rb") as file:
            file.seek(start)
            data = file.read(min(end - start, room))
        self._at[stream] += len(data)
        return data

    def _read_order(self, end: int) -> None:
        with contextlib.suppress(OSError), open(open_plain(self._order_path), "rb") as file:
            file.seek(self._order_at)
            data = file.read(max(0, min(end - self._order_at, _MOST_BYTES)))
            for at in range(0, len(data) - 7, 8):
                value = int.from_bytes(data[at : at + 8], "little")
                if value & 3 in SUFFIXES:
                    self._records.append((Stream(value & 3), value >> 2))
                self._order_at += 8


class Outputs:
    """What workers' scripts write from now on.

    Args:
        logs: directory of the logs.
        shown: rank of the worker of interest; None: all.
    """

    def __init__(self, logs: Path, shown: int | None) -> None:
        self._logs = logs
        self._shown = shown
        self._tails: dict[int, Tail] = {}
        for path in logs.glob("worker-*.log"):  # of a run that is resumed
            rank = path.stem.partition("-")[2]
            if rank.isdecimal() and len(rank) < 10:
                self._tails[int(rank)] = Tail(path, at_end=True)

    def new(self, workers: Iterable[int], *, final: bool = False) -> list[OutputPiece]:
        """What these have written since.

        Args:
            final: nothing more will come: all of it.
        """
        found = []
        for rank in [each for each in workers if self._shown in (None, each)]:
            tail = self._tails.setdefault(rank, Tail(self._logs / f"worker-{rank}.log"))
            read = tail.read_all() if final else tail.read()
            found += [OutputPiece(rank, stream, data) for stream, data in read if stream is not Stream.OWN]
        return found


def _joined(found: list[tuple[Stream, bytes]]) -> list[tuple[Stream, bytes]]:
    """Without what is empty; one piece where there are several of the same in a row."""
    joined: list[tuple[Stream, bytes]] = []
    for stream, data in found:
        if joined and joined[-1][0] is stream:
            joined[-1] = (stream, joined[-1][1] + data)
        elif data:
            joined.append((stream, data))
    return joined


def _size(path: Path) -> int:
    try:
        return plain_size(path)
    except OSError:
        return 0
