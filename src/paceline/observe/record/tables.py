"""The tables that a run leaves behind: their columns, and their two forms on disk.

While a run goes on every role appends fixed-size records to files of its own (`raw/`): an append survives a
kill of any process, and needs no library. A file that is torn (by a full disk, or a kill in mid-write) is cut
at its last whole record, and the run says so. When the run is over, the controller replaces them by one
Parquet file for each table.

    raw/worker-1.0.spans      role, rank, incarnation, and the table
    raw/controller.resources
    spans.parquet  totals.parquet  resources.parquet

What scripts logged is a table, too, in a form of its own: see values.py.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.observe.record.parquet_files import read_parquet, write_parquet
from paceline.observe.record.phase import PHASES
from paceline.observe.record.values import values_to_parquet
from paceline.storage.plain_files import append_to, check_directory, read_bytes, reason_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "RESOURCES",
    "ROLES",
    "SPANS",
    "TABLES",
    "TOTALS",
    "RawTable",
    "Table",
    "cut_torn",
    "read_raw",
    "to_parquet",
]

Records = npt.NDArray[np.void]

ROLES = ("controller", "server", "worker", "host")
"""As the `role` column has them: their position here."""


@dataclass(frozen=True)
class Table:
    """A table: its name, and what a record of it is."""

    name: str
    record: np.dtype[np.void]


SPANS = Table(
    "spans",
    np.dtype(
        [
            ("start", "<i8"),  # Unix time, ns
            ("ns", "<i8"),  # how long
            ("bytes", "<i8"),  # payload that a link carried
            ("step", "<i4"),  # the worker's clock, or the server's count of updates
            ("slice", "<i4"),  # -1: all, or none
            ("other", "<i2"),  # rank of the role that was waited for, or that the bytes went to
            ("phase", "u1"),
            ("lane", "u1"),  # 0: the role's main thread, whose phases add up to its time
        ]
    ),
)

TOTALS = Table(
    "totals",
    np.dtype(
        [
            ("time", "<i8"),  # Unix time, ns: of the end of what this adds up
            ("ns", "<i8"),  # time spent since the record before
            ("bytes", "<i8"),
            ("count", "<i4"),
            ("step", "<i4"),
            ("other", "<i2"),
            ("phase", "u1"),
            ("lane", "u1"),
        ]
    ),
)

RESOURCES = Table(
    "resources",
    np.dtype(
        [
            ("time", "<i8"),  # Unix time, ns
            ("role", "u1"),
            ("rank", "<i2"),
            ("cpu", "<f4"),  # cores in use since the record before
            ("memory", "<i8"),  # bytes of its own and its part of shared ones, with the role's own children
            ("threads", "<i4"),
            ("read", "<i8"),  # bytes from disk since the role began; of the host: since it booted
            ("written", "<i8"),
            ("sent", "<i8"),  # bytes over the network; host only, loopback apart
            ("received", "<i8"),
            ("iowait", "<f4"),  # cores that waited for a disk; host only
            ("gpu", "<f4"),  # share in use, 0 to 1; NaN without one
            ("gpu_memory", "<i8"),
        ]
    ),
)

TABLES = {table.name: table for table in (SPANS, TOTALS, RESOURCES)}

_LIFETIME_NS = 10**17
"""Times of one file are nearer to each other than this (three years)."""
_RAW = re.compile(r"(controller|server|worker)(?:-(\d{1,4})\.(\d{1,9}))?\.(spans|totals|resources)", re.ASCII)
_MOST_BYTES = 1 << 30
"""Of one role's records. A role writes 400,000 spans of 36 bytes before it thins them."""


class RawTable:
    """Appends records to a file. A disk that is full, or gone, costs records and never the run."""

    def __init__(self, directory: Path, owner: str, table: Table) -> None:
        self.table = table
        self.broken: OSError | None = None
        """Why nothing is written any more."""
        self._file: int | None = None
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            self._file = append_to(directory / f"{owner}.{table.name}")
        except OSError as error:
            self.broken = error

    def append(self, records: Records) -> None:
        """Write records, whole, in one go."""
        if self._file is None or not len(records):
            return
        data = records.tobytes()
        try:
            written = os.write(self._file, data)
            if written != len(data):  # the disk is full: a torn record would shift all that follow
                with contextlib.suppress(OSError):
                    torn = written % self.table.record.itemsize
                    os.ftruncate(self._file, os.fstat(self._file).st_size - torn)
                raise OSError(28, "No space left on device")
        except OSError as error:
            self.broken = error
            self.close()

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


@dataclass(frozen=True)
class Raw:
    """One role's records, as they are in its file."""

    role: str
    rank: int
    incarnation: int
    records: Records
    torn: str | None = None
    """What of the file is left out, for people."""
    path: Path = Path()
    readable: bool = True
    """False: it is a link, a pipe, too large, …, and is left where it is."""


def raw_files(directory: Path, table: Table) -> list[tuple[re.Match[str], Path]]:
    """The files of a table, by role and rank."""
    found = []
    with contextlib.suppress(OSError):
        check_directory(directory)
        for path in directory.iterdir():
            match = _RAW.fullmatch(path.name)
            if match is not None and match[4] == table.name:
                found.append((match, path))
    return sorted(found, key=lambda each: (each[0][1], int(each[0][2] or 0), int(each[0][3] or 0)))


def read_raw(directory: Path, table: Table) -> Iterator[Raw]:
    """What every role has written of a table so far."""
    for match, path in raw_files(directory, table):
        records, torn, readable = np.empty(0, table.record), None, True
        try:
            data = read_bytes(path, most=_MOST_BYTES)
            records = _whole_records(table, data)
            torn = _torn(path, table, len(records), len(data))
        except FileNotFoundError:
            continue
        except OSError as error:
            torn, readable = f"raw/{path.name} is left out: {reason_of(error)}", False
        yield Raw(match[1], int(match[2] or 0), int(match[3] or 0), records, torn, path, readable)


def cut_torn(directory: Path) -> list[str]:
    """Cut every file of `raw/` at its last whole record: what is appended then can be read. Only while no
    role of the run writes. Returns what was cut, for people."""
    said = []
    for table in TABLES.values():
        for _, path in raw_files(directory, table):
            with contextlib.suppress(OSError):
                data = read_bytes(path, most=_MOST_BYTES)
                whole = len(_whole_records(table, data))
                if (text := _torn(path, table, whole, len(data))) is not None:
                    os.truncate(path, whole * table.record.itemsize)
                    said.append(text)
    return said


def _whole_records(table: Table, data: bytes) -> Records:
    """The records before the first that cannot be one.

    Before that, versions that appended to a torn file shifted all that followed. Where a record is impossible
    the one before it may be made of two halves, and is left out, too.
    """
    records = np.frombuffer(data, table.record, count=len(data) // table.record.itemsize)
    if not len(records):
        return records
    names = table.record.names or ()
    possible = np.ones(len(records), bool)
    for name, words in (("phase", PHASES), ("role", ROLES)):
        if name in names:
            possible &= records[name] < len(words)
    for name in ("ns", "bytes", "count", "memory", "threads"):
        if name in names:
            possible &= records[name] >= 0
    at = records["start" if "start" in names else "time"]
    possible &= np.abs(at.astype(np.float64) - float(at[0])) < _LIFETIME_NS
    return records if possible.all() else records[: max(0, int(np.argmin(possible)) - 1)]


def _torn(path: Path, table: Table, whole: int, size: int) -> str | None:
    left = size - whole * table.record.itemsize
    if not left:
        return None
    return f"raw/{path.name} is torn: {left:,} bytes after its first {whole:,} whole records are left out"


def columns(table: Table, parts: Sequence[Raw]) -> dict[str, npt.NDArray[np.generic]]:
    """Records of all roles as columns, with `role`, `rank` and `incarnation` where the record has them not.

    Columns of small numbers that stand for words (`role`, `phase`) stay numbers here.
    """
    names = table.record.names or ()
    found = {
        name: np.concatenate([np.empty(0, table.record[name]), *(part.records[name] for part in parts)])
        for name in names
    }
    if "role" not in names:
        lengths = [len(part.records) for part in parts]
        for name, dtype, values in (
            ("role", "u1", [ROLES.index(part.role) for part in parts]),
            ("rank", "<i2", [part.rank for part in parts]),
            ("incarnation", "<i4", [part.incarnation for part in parts]),
        ):
            found[name] = np.repeat(np.asarray(values, dtype), lengths)
    return found


def to_parquet(run: Path, say: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Turn `raw/` of a run that is over into Parquet files, and remove it. Returns what was written.

    Raises OSError if the directory cannot be written; `raw/` then stays, and is read as well as Parquet.

    Args:
        say: told of each file that is damaged, and what became of it.
    """
    import pyarrow as pa

    raw = run / "raw"
    written: list[Path] = []
    for table in TABLES.values():
        parts = list(read_raw(raw, table))
        for part in parts:
            if part.torn is not None:
                say(part.torn)
        read = [part.path for part in parts if part.readable]
        parts = [part for part in parts if len(part.records)]
        path = run / f"{table.name}.parquet"
        if not parts and not os.path.lexists(path):
            continue
        try:
            found = _with_earlier(path, pa.table(_worded(columns(table, parts))), say)
        except pa.ArrowException as error:
            raise OSError(str(error)) from error
        write_parquet(found, path)
        written.append(path)
        for each in read:
            each.unlink()
    if (values := values_to_parquet(run, say)) is not None:
        written.append(values)
    with contextlib.suppress(OSError):
        raw.rmdir()
    return written


def _with_earlier(path: Path, found: "pa.Table", say: Callable[[str], None]) -> "pa.Table":
    """A table after the rows of earlier starts of the run. A file that cannot be read is kept beside it."""
    import pyarrow as pa

    if not os.path.lexists(path):
        return found
    try:
        return pa.concat_tables([read_parquet(path), found], promote_options="permissive")
    except (pa.ArrowException, OSError, ValueError) as error:
        aside = path.with_name(f"{path.name}.damaged")
        os.replace(path, aside)
        reason = reason_of(error)[:80]
        say(f"{path.name} of an earlier start is damaged ({reason}); it is kept as {aside.name} and not read")
        return found


def _worded(found: dict[str, npt.NDArray[np.generic]]) -> dict[str, object]:
    """Numbers that stand for words, as words."""
    import pyarrow as pa

    worded: dict[str, object] = dict(found)
    for name, words in (("role", ROLES), ("phase", PHASES)):
        if name in found:
            indices = pa.array(found[name].astype(np.int8))
            worded[name] = pa.DictionaryArray.from_arrays(indices, pa.array(list(words)))
    return worded
