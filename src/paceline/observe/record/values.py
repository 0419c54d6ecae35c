"""Values that a run's script logged: every one of them, with its labels.

A worker writes each value into memory that is mapped to a file of its own, so a value that `paceline.log` has
taken survives any end of the worker. The file is a header and slots of one size; the last byte of a slot
is written last and says what it holds, so a slot that was being written is not one yet.

    raw/worker-1.0.values     rank, attempt
    raw/reader-0.0.values     what an evaluation measured; its `worker` is EVALUATION, its `step` the version
    values.parquet            all of them, once the run is over

    header   magic, step at which this attempt began, steps finished, values left out
    value    time, value, version, samples, step, epoch, number of its name, 1
    name     up to 46 bytes of UTF-8, how many, 2 (the name ends here) or 3 (it goes on in the next slot)

Names are numbered in the order in which they come.
"""

import contextlib
import json
import math
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.record.parquet_files import read_parquet, write_parquet
from paceline.observe.record.thinning import ValueThinning
from paceline.storage.json_files import parse_json
from paceline.storage.plain_files import check_directory, open_plain, plain_size, read_bytes, reason_of
from paceline.storage.typed_json import checked

__all__ = [
    "COLUMNS",
    "EVALUATION",
    "Start",
    "ValueWriter",
    "Values",
    "read_values",
    "standing",
    "steps_of",
    "values_left_out",
    "values_to_parquet",
]

MAGIC = b"pl-vals1"
_HEADER = struct.Struct("<8sqqq16x")
_VALUE = struct.Struct("<qdqqqiHxB")
_NAME = struct.Struct("<46sBB")
_SLOT = _VALUE.size
_IS_VALUE, _IS_NAME, _GOES_ON = 1, 2, 3
_RECORD = np.dtype(
    [
        ("time", "<i8"),  # Unix time, ns
        ("value", "<f8"),
        ("version", "<i8"),
        ("samples", "<i8"),
        ("step", "<i8"),
        ("epoch", "<i4"),
        ("name", "<u2"),
        ("pad", "u1"),
        ("kind", "u1"),
    ]
)
_FIRST = math.lcm(mmap.ALLOCATIONGRANULARITY, _SLOT)
"""Bytes that a file has at first: 256 slots."""
_CHUNK = 16 * _FIRST
"""Bytes by which it grows: 4096 slots."""
_RETRY_S = 1.0
"""How long a disk that was full is left alone."""
_MOST_WAITING = 20_000
"""Values that are kept in memory while the disk is full."""
_MOST_NAMES = 0xFFFF
_LONGEST_NAME = 1000
"""Bytes."""
_MOST_NAME_SLOTS = _MOST_NAMES * (_LONGEST_NAME // 46 + 2)
"""More are not of a writer: to read them would take minutes."""
_NUMBER = struct.Struct("<q")
EVALUATION = -1
"""In the column `worker`: the value is no worker's, an evaluation measured it."""
_FILE = re.compile(r"(worker|reader)-(\d{1,9})\.(\d{1,9})\.values", re.ASCII)
_MOST_BYTES = 1 << 30
"""Of one file. A quarter of --records-mb is for values."""
_MOST_STARTS = 100_000

COLUMNS = ("time", "worker", "attempt", "step", "version", "epoch", "samples", "name", "value")


@dataclass(frozen=True, slots=True)
class Start:
    """One attempt of a worker, as its file tells it."""

    worker: int
    attempt: int
    began: int
    """The worker's steps when this attempt began: 0, or those of the checkpoint or of its predecessor."""
    steps: int
    """Its steps at the end of this attempt, with those before it."""
    left_out: int
    """Values that it logged and that are not in the records."""


class ValueWriter:
    """Writes the values that one worker process logs. Any thread may log.

    Args:
        directory: the run's `raw/`; None: nothing is written.
        began: the worker's steps before this process.
        rows: the most values that are kept, see `ValueThinning`.
        clock_ns: from this host's monotonic clock to the run's Unix time.
    """

    def __init__(
        self,
        directory: Path | None = None,
        rank: int = 0,
        attempt: int = 0,
        *,
        began: int = 0,
        rows: int = 1 << 40,
        clock_ns: int = 0,
    ) -> None:
        self.began = self.steps = began
        self.broken: OSError | None = None
        """Why values are not written now, if so."""
        self.left_out = 0
        self._directory = directory
        self._rank, self.attempt = rank, attempt
        self._clock_ns = clock_ns
        self._thinning = ValueThinning(rows)
        self._all_kept = self._thinning.first
        """Values until they are thinned."""
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._unnamed: list[str] = []
        """Names that are not in the file yet."""
        self._file: int | None = None
        self._head: mmap.mmap | None = None
        self._memory: mmap.mmap | bytearray = bytearray()
        self._at = self._end = 0
        self._size = 0
        """Of the file."""
        self._waiting: list[tuple[Any, ...]] = []
        """Values that the disk had no room for."""
        self._retry_at = 0.0
        if directory is not None:
            with self._lock:
                self._grow()

    def begin_at(self, step: int) -> None:
        """The run continues from a checkpoint, at which this worker had finished `step` steps."""
        with self._lock:
            self.began = self.steps = step
            self._write_header()

    def at_version(self, version: int) -> None:
        """Of an evaluation, values have the version in place of a step."""
        self.steps = version
        if self._head is not None:
            _NUMBER.pack_into(self._head, 16, version)

    def stepped(self) -> None:
        """The script has finished a step."""
        self.steps += 1
        if self._head is not None:
            _NUMBER.pack_into(self._head, 16, self.steps)

    def add(self, values: Mapping[str, float], version: int, samples: int, epoch: int) -> None:
        """The script logs values, at the steps that it has finished now."""
        with self._lock:
            now, step = perf_counter_ns() + self._clock_ns, self.steps  # in order, whichever thread it is
            for name, value in values.items():
                number = self._numbers.get(name)
                if number is None:
                    number = self._new_name(name)
                if self._all_kept:
                    self._all_kept -= 1
                elif not self._thinning.keep(number):
                    self._leave_out()
                    continue
                if self._at < self._end and not self._waiting:
                    _VALUE.pack_into(
                        self._memory, self._at, now, value, version, samples, step, epoch, number, _IS_VALUE
                    )
                    self._at += _SLOT
                else:
                    self._add_slowly((now, value, version, samples, step, epoch, number, _IS_VALUE))

    def close(self) -> None:
        """Write what waits, if there is room, and give back what is not used."""
        with self._lock:
            if self._waiting:
                self._retry_at = 0.0
                self._write_waiting()
            self.left_out += len(self._waiting)
            self._waiting = []
            self._write_header()
            used = self._size - (self._end - self._at)
            for memory in {id(each): each for each in (self._memory, self._head)}.values():
                if isinstance(memory, mmap.mmap):
                    memory.close()
            self._head, self._memory, self._at, self._end = None, bytearray(), 0, 0
            if self._file is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, used)
                os.close(self._file)
            self._file = self._directory = None

    # --- what happens now and then ------------------------------------------------------------------

    def _new_name(self, name: str) -> int:
        number = self._numbers[name] = min(len(self._numbers), _MOST_NAMES)
        if number < _MOST_NAMES:
            self._unnamed.append(name)
            self._write_waiting()
        return number

    def _add_slowly(self, row: tuple[Any, ...]) -> None:
        """There is no room here: grow, or wait for room on the disk."""
        if self._directory is None or row[6] == _MOST_NAMES:
            self._leave_out()
            return
        self._waiting.append(row)
        self._write_waiting()
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[0]
            self._leave_out()

    def _leave_out(self) -> None:
        self.left_out += 1
        if self._head is not None:
            _NUMBER.pack_into(self._head, 24, self.left_out)

    def _write_waiting(self) -> None:
        """Names first: a value has the number of one that stands before it."""
        while self._unnamed:
            data = self._unnamed[0].encode(errors="replace")[:_LONGEST_NAME]
            parts = [data[at : at + 46] for at in range(0, len(data), 46)] or [b""]
            if not self._room(len(parts)):
                return
            for at, part in enumerate(parts, 1):
                kind = _IS_NAME if at == len(parts) else _GOES_ON
                _NAME.pack_into(self._memory, self._at, part, len(part), kind)
                self._at += _SLOT
            del self._unnamed[0]
        written = 0
        while written < len(self._waiting) and self._room(1):
            _VALUE.pack_into(self._memory, self._at, *self._waiting[written])
            self._at += _SLOT
            written += 1
        del self._waiting[:written]

    def _room(self, slots: int) -> bool:
        """Whether this number of slots fits into one chunk; begins a new chunk if necessary."""
        if self._at + slots * _SLOT > self._end:
            while self._at < self._end:  # the beginning of a name that has no letters here
                _NAME.pack_into(self._memory, self._at, b"", 0, _GOES_ON)
                self._at += _SLOT
            self._grow()
        return self._at + slots * _SLOT <= self._end

    def _grow(self) -> None:
        """Reserve room on the disk first: memory that is mapped to a full disk would kill the process."""
        if self._directory is None or time.monotonic() < self._retry_at:
            return
        nbytes = _CHUNK if self._size else _FIRST
        try:
            if self._file is None:
                self._file = self._open(self._directory)
            os.posix_fallocate(self._file, self._size, nbytes)
            memory = mmap.mmap(self._file, nbytes, offset=self._size)
        except OSError as error:
            self.broken = error
            self._retry_at = time.monotonic() + _RETRY_S
            return
        self.broken = None
        if isinstance(self._memory, mmap.mmap) and self._memory is not self._head:
            self._memory.close()
        self._memory, self._at, self._end = memory, 0, nbytes
        self._size += nbytes
        if self._head is None:
            self._head, self._at = memory, _SLOT
            self._write_header()

    def _open(self, directory: Path) -> int:
        """A new file: an attempt that has one already (its number could not be kept) is not overwritten."""
        directory.mkdir(mode=0o700, exist_ok=True)
        while True:
            who = "reader-0" if self._rank == EVALUATION else f"worker-{self._rank}"
            path = directory / f"{who}.{self.attempt}.values"
            try:
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                self.attempt += 1

    def _write_header(self) -> None:
        if self._head is not None:
            _HEADER.pack_into(self._head, 0, MAGIC, self.began, self.steps, self.left_out)


# --- reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """Values of a run, as columns (`COLUMNS`; `name` as text), and the attempts that logged them."""

    columns: Mapping[str, npt.NDArray[Any]]
    starts: Sequence[Start]
    damaged: Sequence[str] = ()
    """What could not be read, for people."""

    @property
    def left_out(self) -> int:
        """Values that the script logged and that are not in the records."""
        return sum(start.left_out for start in self.starts)


def steps_of(directory: Path, rank: int, attempt: int) -> int | None:
    """The steps that a worker's earlier process had finished; None if its file cannot be read."""
    with contextlib.suppress(OSError, struct.error):
        with open(open_plain(directory / f"worker-{rank}.{attempt}.values"), "rb") as file:
            magic, _, steps, _ = _HEADER.unpack(file.read(_HEADER.size))
        return int(steps) if magic == MAGIC else None
    return None


def read_values(run: Path) -> Values:
    """All values of a run: those of `values.parquet`, and those that workers write now."""
    parts, starts, damaged = [], [], []
    path = run / "values.parquet"
    if os.path.lexists(path):
        try:
            columns, older = _read_parquet(path)
            parts.append(columns)
            starts += older
        except (OSError, ValueError) as error:
            damaged.append(f"values.parquet is damaged and left out ({reason_of(error)[:80]})")
    for start, columns, said in _read_raw(run / "raw"):
        damaged += said
        if start is not None:
            parts.append(columns)
            starts.append(start)
    return Values(_joined(parts), starts, damaged)


def values_left_out(run: Path) -> int:
    """How many values the scripts of a run logged that are not in its records."""
    return read_values(run).left_out


def _raw_files(directory: Path) -> list[tuple[int, int, Path]]:
    found = []
    with contextlib.suppress(OSError):
        check_directory(directory)
        for path in directory.iterdir():
            if (match := _FILE.fullmatch(path.name)) is not None:
                who = EVALUATION if match[1] == "reader" else int(match[2])
                found.append((who, int(match[3]), path))
    return sorted(found)


def _read_raw(directory: Path) -> Iterable[tuple[Start | None, dict[str, npt.NDArray[Any]], list[str]]]:
    for worker, attempt, path in _raw_files(directory):
        try:
            data = read_bytes(path, most=_MOST_BYTES)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield None, {}, [f"raw/{path.name} is left out: {reason_of(error)}"]
            continue
        if len(data) < _SLOT or data[:8] != MAGIC:
            if any(data):  # else it was about to be begun
                yield None, {}, [f"raw/{path.name} has no header and is left out"]
            continue
        _, began, steps, left_out = _HEADER.unpack_from(data)
        records = np.frombuffer(data, _RECORD, count=len(data) // _SLOT)[1:]
        kinds = records["kind"]
        unknown = np.flatnonzero((kinds < _IS_VALUE) | (kinds > _GOES_ON))
        whole = int(unknown[0]) if len(unknown) else len(records)
        said = []
        if kinds[whole:].any() or len(data) % _SLOT:
            said.append(
                f"raw/{path.name} is torn: what follows its first {whole:,} whole records is left out"
            )
        records = records[:whole]
        names = _names(records[records["kind"] != _IS_VALUE][:_MOST_NAME_SLOTS])
        rows = records[records["kind"] == _IS_VALUE]
        known = rows["name"] < len(names)
        rows = rows[known]
        columns: dict[str, npt.NDArray[Any]] = {
            name: rows[name] for name in ("time", "step", "version", "epoch", "samples", "value")
        }
        columns["worker"] = np.full(len(rows), worker, np.int32)
        columns["attempt"] = np.full(len(rows), attempt, np.int32)
        columns["name"] = np.array(names, object)[rows["name"]] if len(rows) else np.empty(0, object)
        yield Start(worker, attempt, began, steps, left_out), columns, said


def _names(slots: npt.NDArray[np.void]) -> list[str]:
    names, parts = [], []
    for slot in slots:
        text, used, kind = _NAME.unpack(slot.tobytes())
        parts.append(text[:used])
        if kind == _IS_NAME:
            names.append(b"".join(parts).decode(errors="replace"))
            parts = []
    return names


def _joined(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    kinds = {"value": np.float64, "name": object, "worker": np.int32, "attempt": np.int32}
    return {
        name: np.concatenate([np.empty(0, kinds.get(name, np.int64)), *(part[name] for part in parts)])
        for name in COLUMNS
    }


def _read_parquet(path: Path) -> tuple[dict[str, npt.NDArray[Any]], list[Start]]:
    """Raises OSError and ValueError."""
    import pyarrow as pa

    table = read_parquet(path)
    wanted = {"value": pa.float64(), "name": pa.string(), "worker": pa.int32(), "attempt": pa.int32()}
    columns = {}
    try:
        for name in COLUMNS:
            column = table.column(name).cast(wanted.get(name, pa.int64()))
            if column.null_count and name != "value":
                raise ValueError(f"{name} is not there in every row")
            columns[name] = column.to_numpy()
    except (pa.ArrowException, KeyError) as error:
        raise ValueError(reason_of(error)) from error
    told = parse_json((table.schema.metadata or {}).get(b"paceline", b"[]"))
    if not isinstance(told, list) or len(told) > _MOST_STARTS:
        raise ValueError("its attempts are not a list")
    return columns, [checked(Start, start) for start in told]


def values_to_parquet(run: Path, say: Callable[[str], None] = lambda _: None) -> Path | None:
    """Turn the values in `raw/` into `values.parquet`, and remove them. Returns it, if there are values.

    Raises OSError if it cannot be written; what there is stays.

    Args:
        say: told of each file that is damaged.
    """
    import pyarrow as pa

    raw = _raw_files(run / "raw")
    if not raw:
        return None
    found, path = read_values(run), run / "values.parquet"
    for text in found.damaged:
        say(text)
    if any(text.startswith(path.name) for text in found.damaged):
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    starts = json.dumps([{name: getattr(s, name) for name in Start.__slots__} for s in found.starts])
    try:
        table = pa.table({name: pa.array(found.columns[name]) for name in COLUMNS if name != "name"})
        names = pa.array(found.columns["name"], pa.string())
        table = table.add_column(COLUMNS.index("name"), "name", names)
        table = table.replace_schema_metadata({"paceline": starts})
    except pa.ArrowException as error:
        raise OSError(str(error)) from error
    write_parquet(table, path)
    for _, _, each in raw:
        with contextlib.suppress(OSError):
            if plain_size(each) <= _MOST_BYTES:  # what was not read stays
                each.unlink()
    return path


def standing(columns: Mapping[str, npt.NDArray[Any]], starts: Iterable[Start]) -> npt.NDArray[np.bool_]:
    """Which values stand: not those of steps that a later attempt of the worker made again.

    When a run goes back to a checkpoint, or is resumed from one, steps after it are made twice. The values of
    the first time stay in the records; a curve over steps shows those of the last time.
    """
    found = np.ones(len(columns["step"]), bool)
    for start in starts:
        if start.worker == EVALUATION:
            continue  # an evaluation does not make steps again
        older = (columns["worker"] == start.worker) & (columns["attempt"] < start.attempt)
        found &= ~(older & (columns["step"] > start.began))
    return found
