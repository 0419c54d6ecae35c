"""A worker's own count of what it did: steps, when they began and ended, bytes that it moved.

The worker writes it down at every step, in a file of one record that is mapped to memory: what a process that
was killed had done is known to the last step. Every report to the controller has it, too, for a run
whose disk is full or elsewhere.

    raw/worker-1.0.ledger      rank, incarnation
"""

import contextlib
import mmap
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from time import perf_counter_ns

from paceline.storage.plain_files import check_directory, open_plain, read_bytes

__all__ = ["Ledger", "LedgerKeeper", "Ledgers", "together"]

_NAME = re.compile(r"worker-(\d{1,9})\.(\d{1,9})\.ledger", re.ASCII)


@dataclass(slots=True)
class Ledger:
    """What a worker has done so far: one process, or several in a row (`together`). Times are Unix time."""

    steps: int = 0
    """Steps finished: calls of optimizer.step()."""
    began_ns: int = 0
    """When it began its first step: it asked for the batch; 0: not yet."""
    first_ns: int = 0
    """When that step ended."""
    ended_ns: int = 0
    """When its last step ended."""
    moved_out: int = 0
    """Logical bytes: what its steps sent, over any carrier (docs/observing.md)."""
    moved_in: int = 0
    wire_out: int = 0
    """Payload bytes that left over a socket."""
    wire_in: int = 0

    @property
    def age(self) -> tuple[int, int]:
        """Of two ledgers of one process, the newer has the higher one."""
        return self.steps, self.moved_out + self.moved_in + self.wire_out + self.wire_in

    @property
    def seconds(self) -> float:
        """From the first step's begin to the last step's end."""
        return max(0, self.ended_ns - self.began_ns) / 1e9 if self.began_ns else 0.0

    @property
    def first_step_extra_s(self) -> float:
        """How much longer the first step took than the mean of the others (compiling, caches): 0 if it did
        not, or is the only one."""
        if self.steps < 2:
            return 0.0
        others_ns = (self.ended_ns - self.first_ns) / (self.steps - 1)
        return max(0.0, self.first_ns - self.began_ns - others_ns) / 1e9


_RECORD = struct.Struct(f"<{len(fields(Ledger))}q")


def together(ledgers: Iterable[Ledger]) -> Ledger:
    """The ledger of several processes together: counts add up."""
    found = Ledger()
    for each in ledgers:
        found.steps += each.steps
        found.moved_out += each.moved_out
        found.moved_in += each.moved_in
        found.wire_out += each.wire_out
        found.wire_in += each.wire_in
        found.ended_ns = max(found.ended_ns, each.ended_ns)
        if each.began_ns and not 0 < found.began_ns <= each.began_ns:
            found.began_ns, found.first_ns = each.began_ns, each.first_ns
    return found


class LedgerKeeper:
    """Keeps a worker's ledger. One clock reading and one write to mapped memory a step.

    Args:
        directory: the run's `raw/`; None: kept in memory only.
        clock_ns: from this host's monotonic clock to the run's Unix time.
    """

    def __init__(
        self, directory: Path | None = None, rank: int = 0, incarnation: int = 0, *, clock_ns: int = 0
    ) -> None:
        self.ledger = Ledger()
        self._incarnation = incarnation
        self._clock_ns = clock_ns
        self._asked_ns = 0
        self._drawing = False
        self._memory: mmap.mmap | None = None
        if directory is not None:
            with contextlib.suppress(OSError):  # its reports tell the same, less often
                directory.mkdir(mode=0o700, exist_ok=True)
                self._memory = _map(directory / f"worker-{rank}.{incarnation}.ledger")

    def _now(self) -> int:
        return perf_counter_ns() + self._clock_ns

    def joined(self) -> None:
        """prepare() returns. Without a prepared loader the first step begins here."""
        if not self.ledger.began_ns:
            self._asked_ns = self._now()

    def draws(self) -> None:
        """The script asks for the first batch of an epoch."""
        if not self.ledger.began_ns and not self._drawing:
            self._asked_ns, self._drawing = self._now(), True

    def drew_nothing(self) -> None:
        """The epoch had no batch: a resumed run had finished it already."""
        self._drawing = False

    def got_batch(self) -> None:
        """If it is the first one, the first step began when the script asked for it."""
        if not self.ledger.began_ns:
            self.ledger.began_ns = self._asked_ns or self._now()

    def peeked(self) -> None:
        """The script only peeked at a batch: the first step has not begun."""
        if not self.ledger.steps:
            self.ledger.began_ns, self._drawing = 0, False

    def stepped(self) -> None:
        """A step has ended."""
        ledger, now = self.ledger, perf_counter_ns() + self._clock_ns
        ledger.steps += 1
        ledger.ended_ns = now
        if ledger.steps == 1:
            ledger.first_ns = now
            self.got_batch()
        self.write()

    def moved(self, out: int, back: int) -> None:
        """Add the logical bytes that a step sent and received."""
        self.ledger.moved_out += out
        self.ledger.moved_in += back

    def write(self) -> None:
        """Let it survive this process."""
        if self._memory is None:
            return
        ledger = self.ledger
        _RECORD.pack_into(
            self._memory,
            0,
            ledger.steps,
            ledger.began_ns,
            ledger.first_ns,
            ledger.ended_ns,
            ledger.moved_out,
            ledger.moved_in,
            ledger.wire_out,
            ledger.wire_in,
        )

    def told(self) -> list[int]:
        """As a report has it: the incarnation, and the ledger's fields."""
        return [self._incarnation, *astuple(self.ledger)]

    def close(self) -> None:
        """Write it once more, and no further."""
        self.write()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _map(path: Path) -> mmap.mmap:
    """A new file of one record, with room on the disk: a write to it cannot fail later. Raises OSError."""
    file = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(file, 0, _RECORD.size)
        return mmap.mmap(file, _RECORD.size)
    finally:
        os.close(file)


class Ledgers:
    """All workers' ledgers of one start of a run, as the controller knows them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[int, dict[int, Ledger]] = {}
        """By rank and incarnation."""

    def hear(self, rank: int, told: Sequence[int]) -> None:
        """What a worker's report has of it: see `LedgerKeeper.told`."""
        self._take(rank, int(told[0]), [int(value) for value in told[1:]])

    def read(self) -> None:
        """Look at the files: they are newer than the reports."""
        for rank, incarnation, path in self._files():
            with contextlib.suppress(OSError, struct.error):
                self._take(rank, incarnation, _RECORD.unpack(read_bytes(path, most=_RECORD.size)))

    def _take(self, rank: int, incarnation: int, values: Sequence[int]) -> None:
        if len(values) != len(fields(Ledger)):
            return
        of_rank = self._known.setdefault(rank, {})
        known = of_rank.get(incarnation)
        new = Ledger(*values)
        if known is None or new.age >= known.age:
            of_rank[incarnation] = new

    @property
    def each(self) -> list[Ledger]:
        """One a process."""
        return [ledger for of_rank in self._known.values() for ledger in of_rank.values()]

    def of(self, rank: int) -> Ledger:
        """All processes of a rank."""
        return together(self._known.get(rank, {}).values())

    @property
    def ranks(self) -> set[int]:
        return set(self._known)

    def _files(self) -> list[tuple[int, int, Path]]:
        with contextlib.suppress(OSError):
            check_directory(self._directory)
            return [
                (int(match[1]), int(match[2]), path)
                for path in self._directory.iterdir()
                if (match := _NAME.fullmatch(path.name))
            ]
        return []

    def remove(self) -> None:
        """Delete the files: the status has their numbers."""
        for _, _, path in self._files():
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self._directory.rmdir()
