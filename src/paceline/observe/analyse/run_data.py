"""A run's tables, read back: while it runs, after its end, or after it was killed."""

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from paceline.core.json_types import JsonObject
from paceline.observe.record.parquet_files import read_parquet
from paceline.observe.record.phase import PHASES
from paceline.observe.record.run_files import AskedFor, read_events, read_record, read_status, unix_time
from paceline.observe.record.status import RunStatus
from paceline.observe.record.tables import ROLES, TABLES, Table, columns, read_raw
from paceline.observe.record.thinning import pushes_thinning
from paceline.observe.record.values import COLUMNS, Values, read_values, standing
from paceline.storage.plain_files import read_bytes, reason_of
from paceline.storage.typed_json import AnyFloat, checked

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["RunData"]

Columns = Mapping[str, npt.NDArray[Any]]

PUSH_COLUMNS = ("version", "worker", "incarnation", "sequence", "read_version", "staleness", "samples")
_MOST_PUSHES = 1 << 30
"""Bytes of pushes.csv; half of --records-mb is for it."""
_LONGEST_HEADER = 1000
_NUMBER = re.compile(rb"-?[0-9]{1,17}")


class _ToldMetrics(TypedDict):
    """Metrics as versions before values.parquet kept them in events.jsonl."""

    worker: int
    clock: int | None
    metrics: dict[str, AnyFloat]


class RunData:
    """What a run directory holds, as data frames (docs/observing.md has their columns).

    Nothing is read before it is asked for. What is damaged or not there is an empty table, and `missing` says
    so in words.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.missing: list[str] = []
        """What could not be read, for people."""

    @functools.cached_property
    def record(self) -> AskedFor:
        """run.json: what was asked for; empty if it cannot be read."""
        with self._lacking("run.json"):
            return read_record(self.path)
        return {}

    @functools.cached_property
    def status(self) -> RunStatus:
        """status.json: where it stands."""
        data: JsonObject = {}
        with self._lacking("status.json"):
            data = read_status(self.path)
        try:
            return RunStatus.from_json({**data, "run_dir": str(self.path)})
        except ValueError as error:
            self._lacks(f"status.json cannot be understood ({reason_of(error)})")
            return RunStatus(run_dir=str(self.path))

    @functools.cached_property
    def job(self) -> JsonObject:
        """The job, as `Job.to_json()` made it."""
        return self.record.get("job", {})

    @functools.cached_property
    def hyperparameters(self) -> JsonObject:
        """What a `paceline.Task` recorded; empty for a script's run."""
        found = self.record.get("task", {}).get("hyperparameters")
        return found if isinstance(found, dict) else {}

    # --- tables as data frames ----------------------------------------------------------------------

    @functools.cached_property
    def spans(self) -> "pd.DataFrame":
        """Every span that was kept: start (Unix ns), ns, role, rank, lane, phase, step, slice, …"""
        return self._frame("spans")

    @functools.cached_property
    def totals(self) -> "pd.DataFrame":
        """Time, number and bytes of every phase, added up about twice a second. Exact."""
        return self._frame("totals")

    @functools.cached_property
    def resources(self) -> "pd.DataFrame":
        """CPU, memory, threads, disk, network and GPU of every role and of the host, over time."""
        return self._frame("resources")

    @functools.cached_property
    def pushes(self) -> "pd.DataFrame":
        """Every applied push, as the lead server wrote it down."""
        import pandas as pd

        return pd.DataFrame(self.push_columns)

    @functools.cached_property
    def metrics(self) -> "pd.DataFrame":
        """Every value that the script logged: time (Unix s), worker, attempt, step, version, epoch, samples,
        name, value. Runs of older versions have no version, epoch and samples."""
        import pandas as pd

        found = pd.DataFrame(dict(self.values.columns))
        found["time"] = found["time"] / 1e9
        frame = pd.concat([self._old_metrics(), found], ignore_index=True) if self._has_old_metrics else found
        for name in ("version", "epoch", "samples"):
            frame[name] = frame[name].astype("Int64")
            frame[name] = frame[name].mask(frame[name] < 0)
        return frame.sort_values("time", kind="stable", ignore_index=True)

    @functools.cached_property
    def standing_metrics(self) -> "pd.DataFrame":
        """As `metrics`, without values of steps that the worker made again later, from a checkpoint."""
        frame = self.metrics
        columns = {name: frame[name].to_numpy() for name in ("worker", "attempt", "step")}
        return frame[standing(columns, self.values.starts)].reset_index(drop=True)

    @functools.cached_property
    def values(self) -> Values:
        """Logged values as columns, and the attempts of the workers."""
        found = read_values(self.path)
        for text in found.damaged:
            self._lacks(text)
        return found

    @property
    def left_out(self) -> dict[str, int]:
        """Number of records left out, by kind."""
        values = self.values.left_out
        return {**self.status.left_out, **({"metrics": values} if values else {})}

    @functools.cached_property
    def _has_old_metrics(self) -> bool:
        return any(event.get("kind") == "metrics" for event in self.events)

    def _old_metrics(self) -> "pd.DataFrame":
        """Metrics of a run of an older version, which kept them in events.jsonl with fewer labels."""
        import pandas as pd

        times = [unix_time(each.get("at")) for each in self.record.get("resumes", ())]
        resumed = [at for at in times if at is not None]
        found, damaged = [], 0
        for event in self.events:
            if event.get("kind") != "metrics":
                continue
            at = unix_time(event["at"])
            try:
                told = checked(_ToldMetrics, {"clock": None, **event})
            except ValueError:
                at = None
            if at is None:
                damaged += 1
                continue
            attempt = sum(at > each for each in resumed)
            for name, value in told["metrics"].items():
                found.append(
                    (at, told["worker"], attempt, told["clock"] or 0, -1, -1, -1, name, float(value))
                )
        if damaged:
            self._lacks(f"events.jsonl: {damaged:,} damaged lines of metrics are left out")
        return pd.DataFrame(found, columns=list(COLUMNS))

    @functools.cached_property
    def events(self) -> list[JsonObject]:
        """events.jsonl; a line that was cut short is left out."""
        return read_events(self.path, self._lacks)

    # --- tables as columns --------------------------------------------------------------------------

    @functools.cached_property
    def push_columns(self) -> Columns:
        """As `pushes`."""
        found: list[npt.NDArray[np.int64]] = []
        path = self.path / "pushes.csv"
        try:
            first, _, rest = read_bytes(path, most=_MOST_PUSHES).partition(b"\n")
            header = first[:_LONGEST_HEADER].decode().strip().split(",")
            lines = rest.split(b"\n")[:-1]  # what follows the last newline was cut short
            if header[: len(PUSH_COLUMNS)] != list(PUSH_COLUMNS):
                raise ValueError(f"columns {header}")
            whole = [fields for line in lines if (fields := _whole_push(line, len(header))) is not None]
            if len(whole) < len(lines):
                self._lacks(f"pushes.csv: {len(lines) - len(whole):,} damaged lines are left out")
            rows = np.array(whole, dtype="S18").reshape(len(whole), len(header)).astype(np.int64)
            found = list(rows.T)
        except FileNotFoundError:
            if self.record:
                self._lacks("pushes.csv is not there")
        except (OSError, ValueError) as error:
            self._lacks(f"pushes.csv cannot be read ({reason_of(error)[:80]})")
        if len(found) < len(PUSH_COLUMNS):
            found = [np.empty(0, np.int64) for _ in PUSH_COLUMNS]
        columns = dict(zip(PUSH_COLUMNS, found, strict=False))
        return {**columns, "weight": self._push_weights(len(found[0]))}

    def _push_weights(self, rows: int) -> npt.NDArray[np.int64]:
        """How many pushes each row of pushes.csv stands for: later ones are thinned (--records-mb)."""
        budget = self.job.get("records_mb")
        if not isinstance(budget, int) or not 0 < budget < 1 << 31:
            return np.ones(rows, np.int64)
        weights = np.array(pushes_thinning(budget).weights(rows), np.int64)
        return np.concatenate([weights, np.ones(max(0, rows - len(weights)), np.int64)])

    def columns(self, name: str) -> Columns:
        """A table's columns; `role` and `phase` as positions in ROLES and PHASES. Small."""
        return self._columns[name]

    @functools.cached_property
    def _columns(self) -> dict[str, Columns]:
        return {name: self._read(table) for name, table in TABLES.items()}

    def _read(self, table: Table) -> Columns:
        parts = list(read_raw(self.path / "raw", table))
        for part in parts:
            if part.torn is not None:
                self._lacks(part.torn)
        found = columns(table, parts)
        path = self.path / f"{table.name}.parquet"
        if os.path.lexists(path):
            older = self._read_parquet(path, found)
            found = {name: np.concatenate([older[name], found[name]]) for name in found} if older else found
        if table.name != "resources" and not len(found["phase"]) and self.job.get("spans", True):
            self._lacks(f"there are no {table.name}: the run is of an older version, or never began to train")
        return found

    def _read_parquet(self, path: Path, like: Columns) -> dict[str, npt.NDArray[Any]]:
        import pyarrow as pa

        try:
            table = read_parquet(path)
            found = {}
            for name, values in like.items():
                if name not in table.column_names:  # of an older version
                    found[name] = np.zeros(len(table), values.dtype)
                elif name in ("role", "phase"):
                    found[name] = _numbered(table.column(name), ROLES if name == "role" else PHASES, values)
                else:
                    column = table.column(name).cast(pa.from_numpy_dtype(values.dtype))
                    if column.null_count and values.dtype.kind != "f":
                        raise ValueError(f"{name} is not there in every row")
                    found[name] = column.to_numpy().astype(values.dtype)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            self._lacks(f"{path.name} is damaged and left out ({reason_of(error)[:80]})")
            return {}
        return found

    def _frame(self, name: str) -> "pd.DataFrame":
        import pandas as pd

        found = dict(self.columns(name))
        for column, words in (("role", ROLES), ("phase", PHASES)):
            if column in found:
                found[column] = pd.Categorical.from_codes(found[column].astype(np.int8), list(words))
        return pd.DataFrame(found)

    @contextlib.contextmanager
    def _lacking(self, name: str) -> Iterator[None]:
        """Context manager that notes a file which cannot be read."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._lacks(f"{name} cannot be read ({reason_of(error)[:80]})")

    def _lacks(self, text: str) -> None:
        if text not in self.missing:
            self.missing.append(text)


def _whole_push(line: bytes, columns: int) -> list[bytes] | None:
    """The numbers of a line; None if the line is torn or was merged with another one."""
    fields = line.split(b",")
    whole = len(fields) == columns and all(_NUMBER.fullmatch(field) for field in fields)
    return fields if whole else None


def _numbered(column: "pa.ChunkedArray", words: Sequence[str], like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column of words as their positions. Raises ValueError."""
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        raise ValueError(f"its words are {column.type}")
    joined = column.combine_chunks()
    if isinstance(joined, pa.ChunkedArray):
        joined = joined.chunk(0) if joined.num_chunks else pa.array([]).dictionary_encode()
    places = {word: i for i, word in enumerate(words)}
    codes = np.array([places.get(word, 0) for word in joined.dictionary.to_pylist()], like.dtype)
    if joined.null_count or (len(joined) and not len(codes)):
        raise ValueError("its words are not there in every row")
    return codes[joined.indices.to_numpy()] if len(codes) else np.empty(0, like.dtype)
