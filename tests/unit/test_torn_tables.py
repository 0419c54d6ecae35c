"""Files that a full disk or a kill tore: cut at their last whole record, and said."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from paceline.control.rundir import RunDirectory
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.phase import Phase
from paceline.observe.record.tables import (
    RESOURCES,
    ROLES,
    SPANS,
    TABLES,
    TOTALS,
    RawTable,
    Table,
    cut_torn,
    read_raw,
    to_parquet,
)
from paceline.observe.record.thinning import Thinning
from paceline.plan import Job
from paceline.ps.push_record import open_pushes

NOW = 1_794_746_394 * 10**9


def records(table: Table, n: int = 4) -> np.ndarray:
    found = np.zeros(n, table.record)
    found["start" if table is SPANS else "time"] = NOW + np.arange(n) * 7_000_001
    if table is RESOURCES:
        found["role"], found["memory"], found["gpu"] = ROLES.index("worker"), 250_000_000, np.nan
        return found
    found["ns"], found["phase"], found["other"] = 5_000_123, Phase.PULL, -1
    found["step"] = np.arange(n)
    return found


def owner(table: Table) -> str:
    return "controller" if table is RESOURCES else "worker-0.0"


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_a_table_torn_at_any_byte_is_cut_at_its_last_whole_record(tmp_path: Path, table: Table) -> None:
    """With and without records that an older version appended to the torn file: they were shifted."""
    whole, size = records(table), table.record.itemsize
    path = tmp_path / "raw" / f"{owner(table)}.{table.name}"
    path.parent.mkdir()
    data = whole.tobytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        (part,) = read_raw(path.parent, table)
        assert part.records.tobytes() == data[: length // size * size]
        assert (part.torn is None) == (length % size == 0)
        if length < size:
            continue  # no record says what is possible
        path.write_bytes(data[:length] + data)
        (part,) = read_raw(path.parent, table)
        kept = part.records.tobytes()
        if length % size:
            assert data.startswith(kept), f"torn at byte {length}"
            assert len(kept) >= (length // size - 1) * size
            assert part.torn is not None
            assert part.torn.startswith(f"raw/{path.name} is torn: ")
        else:
            assert len(kept) == length + len(data)
        said = cut_torn(path.parent)
        assert len(said) == bool(length % size)
        assert path.read_bytes() == kept
        assert not cut_torn(path.parent)


def test_what_is_appended_after_the_cut_is_read_and_becomes_parquet(tmp_path: Path) -> None:
    path = tmp_path / "raw" / "worker-0.0.spans"
    path.parent.mkdir()
    path.write_bytes(records(SPANS).tobytes()[:-3])
    assert cut_torn(path.parent)
    table = RawTable(path.parent, "worker-0.0", SPANS)
    table.append(records(SPANS))
    table.close()
    said: list[str] = []
    to_parquet(tmp_path, said.append)
    assert not said
    assert RunData(tmp_path).spans["step"].tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_a_damaged_run_of_an_older_version_becomes_parquet_and_is_reported(tmp_path: Path) -> None:
    """This was the ArrowIndexError of resume and report after a full disk."""
    raw = tmp_path / "raw"
    raw.mkdir()
    for table in (SPANS, TOTALS):
        data = records(table).tobytes()
        (raw / f"worker-0.0.{table.name}").write_bytes(data[:-3] + data)
    data = RunData(tmp_path)
    assert data.spans["step"].tolist() == [0, 1, 2][: len(data.spans)]
    assert any("worker-0.0.spans is torn" in text for text in data.missing)
    said: list[str] = []
    to_parquet(tmp_path, said.append)
    assert len(said) == 2
    assert len(RunData(tmp_path).spans) >= 2


def test_parquet_cut_at_any_byte_is_kept_aside_and_said(tmp_path: Path) -> None:
    raw, path = tmp_path / "raw", tmp_path / "spans.parquet"
    raw.mkdir()
    (raw / "worker-0.0.spans").write_bytes(records(SPANS).tobytes())
    to_parquet(tmp_path)
    good = path.read_bytes()
    for length in range(0, len(good), 61):
        raw.mkdir()
        (raw / "worker-0.0.spans").write_bytes(records(SPANS).tobytes())
        path.write_bytes(good[:length])
        said: list[str] = []
        to_parquet(tmp_path, said.append)
        assert len(said) == 1 and "spans.parquet.damaged" in said[0]
        assert (tmp_path / "spans.parquet.damaged").read_bytes() == good[:length]
        assert len(RunData(tmp_path).spans) == 4


def test_a_disk_that_is_full_in_mid_record_leaves_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = RawTable(tmp_path, "worker-0.0", SPANS)
    real = os.write
    monkeypatch.setattr("os.write", lambda file, data: real(file, data[: 2 * SPANS.record.itemsize + 5]))
    table.append(records(SPANS))
    assert table.broken is not None and table.broken.strerror == "No space left on device"
    (part,) = read_raw(tmp_path, SPANS)
    assert (len(part.records), part.torn) == (2, None)


def test_events_torn_at_any_byte_lose_that_line_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    run = RunDirectory.create(Job(script="train.py"))
    run.append_event({"kind": "note", "text": "first"})
    path = run.path / "events.jsonl"
    first = path.read_bytes()
    line = json.dumps({"at": "x", "kind": "note", "text": "torn"}).encode() + b"\n"
    for length in range(len(line)):
        path.write_bytes(first + line[:length])
        assert len(run.cut_torn_event()) == (length > 0)
        run.append_event({"kind": "note", "text": "last"})
        assert [event["text"] for event in run.read_events()] == ["first", "last"]
    path.unlink()
    assert not run.cut_torn_event()


def test_pushes_torn_at_any_byte_lose_that_line_and_no_other(tmp_path: Path) -> None:
    path, thinning = tmp_path / "pushes.csv", Thinning(100)
    with open_pushes(path, 0, thinning) as file:
        header = path.read_bytes()
        lines = [f"{n},0,0,{n},{n - 1},0,32\n".encode() for n in (101, 102, 103)]
    (tmp_path / "run.json").write_text('{"id": "x", "directory": "/", "job": {}}')
    for length in range(
        lines[1].index(b",") + 1, len(lines[1])
    ):  # torn in its first number it cannot be told
        path.write_bytes(header + lines[0] + lines[1][:length] + lines[2])
        data = RunData(tmp_path)
        found = data.pushes["version"].tolist()
        assert found == [101]
        assert data.missing[-1] == "pushes.csv: 1 damaged lines are left out"
        with open_pushes(path, 3, thinning) as file:
            file.write(lines[2])
        assert RunData(tmp_path).pushes["version"].tolist() == [101, 103]
