"""The file of a worker's logged values: all of them, whatever ends the process; and what is read back."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.control.attempts import Attempt, Attempts
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record import values as module
from paceline.observe.record.tables import to_parquet
from paceline.observe.record.thinning import ValueThinning, value_rows
from paceline.observe.record.values import (
    Start,
    ValueWriter,
    read_values,
    standing,
    steps_of,
    values_to_parquet,
)
from tests.synthetic_run import write_run


def rows(run: Path) -> list[tuple[object, ...]]:
    found = read_values(run).columns
    names = ("worker", "attempt", "step", "version", "epoch", "samples", "name", "value")
    return [*zip(*(found[name].tolist() for name in names), strict=True)]


def test_every_value_with_its_labels(tmp_path: Path) -> None:
    for rank, attempt in ((0, 0), (1, 0), (1, 1)):
        writer = ValueWriter(tmp_path / "raw", rank, attempt, began=10 * attempt)
        writer.add({"before": -1.5}, 0, 0, -1)
        for _ in range(300):
            writer.stepped()
            writer.add({"loss": 0.5, "näme" * 60: math.nan}, writer.steps + 1, 32 * writer.steps, 2)
        if rank:
            writer.close()  # and the other one goes on
    for _ in range(2):
        found = rows(tmp_path)
        assert len(found) == 3 * 601
        assert found[0] == (0, 0, 0, 0, -1, 0, "before", -1.5)
        mine = [row for row in found if row[:2] == (1, 1)]
        assert [row[2] for row in mine if row[6] == "loss"] == [*range(11, 311)]
        assert mine[1] == (1, 1, 11, 12, 2, 32 * 11, "loss", 0.5)
        assert mine[2][6] == "näme" * 60 and math.isnan(float(str(mine[2][7])))
        starts = read_values(tmp_path).starts
        assert starts[1:] == [Start(1, 0, 0, 300, 0), Start(1, 1, 10, 310, 0)]
        assert not read_values(tmp_path).damaged
        to_parquet(tmp_path)
    assert not (tmp_path / "raw").exists()
    writer = ValueWriter(tmp_path / "raw", 1, 2)
    writer.add({"new": 1.0}, 0, 0, 0)
    writer.close()
    to_parquet(tmp_path)
    assert len(rows(tmp_path)) == 3 * 601 + 1
    assert len(read_values(tmp_path).starts) == 4
    frame = RunData(tmp_path).metrics
    assert list(frame) == [
        "time",
        "worker",
        "attempt",
        "step",
        "version",
        "epoch",
        "samples",
        "name",
        "value",
    ]
    assert frame["epoch"].isna().sum() == 3, "before the first epoch there is none"


def test_a_process_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from paceline.observe.record.values import ValueWriter
writer = ValueWriter(Path(sys.argv[1]), 0, 0)
for n in range(5000):
    writer.stepped()
    writer.add({"loss": n}, n, n, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "raw")], timeout=60)
    assert -done.returncode == signal.SIGKILL
    found = rows(tmp_path)
    assert [row[7] for row in found] == [*range(5000)]
    assert [row[2] for row in found] == [*range(1, 5001)]
    assert steps_of(tmp_path / "raw", 0, 0) == 5000
    assert steps_of(tmp_path / "raw", 0, 1) is None


def test_a_file_torn_at_any_byte_is_cut_at_its_last_whole_value(tmp_path: Path) -> None:
    writer = ValueWriter(tmp_path / "raw", 0, 0)
    for n in range(2):
        writer.add({"loss": n, "a name of more than forty-six letters, which has two slots": n}, n, n, n)
    writer.close()
    path = tmp_path / "raw" / "worker-0.0.values"
    data, whole = path.read_bytes(), rows(tmp_path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        found = rows(tmp_path)
        assert found == whole[: len(found)]
        assert len(found) >= length // 48 - 4
        path.write_bytes(data[:length] + bytes(len(data) - length))  # a disk that lost a page
        assert rows(tmp_path) == found


def test_a_disk_that_is_full_is_waited_for_and_what_it_costs_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, real = [False], os.posix_fallocate

    def allocate(*args: int) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        real(*args)

    monkeypatch.setattr("os.posix_fallocate", allocate)
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    monkeypatch.setattr(module, "_MOST_WAITING", 1000)
    writer = ValueWriter(tmp_path / "raw", 0, 0)
    full[0] = True
    for n in range(1500):
        writer.add({"loss" if n < 500 else "later": n}, n, n, 0)
    assert writer.broken is not None and writer.broken.strerror == "No space left on device"
    full[0] = False
    writer.add({"loss": 1500}, 0, 0, 0)
    assert writer.broken is None
    assert writer.left_out == 1501 - len(rows(tmp_path))
    assert 200 < writer.left_out < 500
    writer.close()
    found = read_values(tmp_path)
    assert found.left_out == writer.left_out
    assert found.columns["value"].tolist()[-1000:] == [*range(501, 1501)], "in order"
    assert [*found.columns["name"][-2:]] == ["later", "loss"]


def test_a_directory_that_cannot_be_written_costs_values_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "raw").write_text("in the way")
    writer = ValueWriter(tmp_path / "raw", 0, 0)
    writer.stepped()
    writer.add({"loss": 1.0}, 0, 0, 0)
    writer.close()
    assert writer.broken is not None and writer.left_out == 1
    writer.add({"loss": 1.0}, 0, 0, 0)
    assert writer.left_out == 2


def test_an_attempt_that_has_a_file_already_is_not_overwritten(tmp_path: Path) -> None:
    for n in range(2):
        writer = ValueWriter(tmp_path / "raw", 0, 0)
        writer.add({"loss": n}, 0, 0, 0)
        writer.close()
    assert [row[1] for row in rows(tmp_path)] == [0, 1]


def test_threads_may_log(tmp_path: Path) -> None:
    writer = ValueWriter(tmp_path / "raw", 0, 0)
    threads = [
        threading.Thread(target=lambda k=k: [writer.add({f"t{k}": n}, 0, 0, 0) for n in range(2000)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    found = rows(tmp_path)
    for k in range(4):
        assert [row[7] for row in found if row[6] == f"t{k}"] == [*range(2000)]


def test_a_damaged_values_parquet_is_said_and_kept_aside(tmp_path: Path) -> None:
    for attempt in range(2):
        writer = ValueWriter(tmp_path / "raw", 0, attempt)
        writer.add({"loss": attempt}, 0, 0, 0)
        writer.close()
        values_to_parquet(tmp_path)
        if not attempt:
            (tmp_path / "values.parquet").write_bytes(b"PAR1 and nothing else")
            data = RunData(tmp_path)
            assert data.metrics.empty and "values.parquet is damaged" in data.missing[0]
    assert [row[7] for row in rows(tmp_path)] == [1]
    assert (tmp_path / "values.parquet.damaged").exists()


# --- the limit ----------------------------------------------------------------------------------------


@given(st.integers(2, 400), st.lists(st.sampled_from([1, 1, 1, 1, 1, 2, 3]), max_size=3000))
def test_no_more_rows_than_there_is_room_for(limit: int, names: list[int]) -> None:
    thinning = ValueThinning(limit)
    kept = [at < thinning.first or thinning.keep(name) for at, name in enumerate(names)]
    assert sum(kept) <= limit
    assert all(kept[: limit // 2])


def test_a_name_with_few_values_keeps_all_beside_one_with_many(tmp_path: Path) -> None:
    writer = ValueWriter(tmp_path / "raw", 0, 0, rows=16_000)
    for n in range(40_000):
        writer.add({"loss": n}, 0, 0, 0)
        if n % 100 == 0:
            writer.add({"test": n}, 0, 0, 0)
    writer.close()
    found = rows(tmp_path)
    assert sum(row[6] == "test" for row in found) == 400
    assert writer.left_out == 40_400 - len(found) > 20_000
    assert max(float(str(row[7])) for row in found if row[6] == "loss") > 39_000, "its end is there, too"
    assert RunData(tmp_path).left_out == {"metrics": writer.left_out}


def test_four_workers_keep_a_million_values_and_more_by_default() -> None:
    assert 4 * value_rows(500, 4) // 2 > 1_000_000


# --- attempts and curves ------------------------------------------------------------------------------


def test_attempts_count_replacements_go_backs_and_resumes(tmp_path: Path) -> None:
    first = Attempts(tmp_path)
    first.begin_anew()
    assert [first.start(0), first.start(1)] == [Attempt(0, None)] * 2
    assert first.start(1) == Attempt(1, 0), "it replaces one"
    taken_over = Attempts(tmp_path)
    assert taken_over.start(1) == Attempt(2, 1)
    taken_over.begin_anew()  # the run goes back
    assert [taken_over.start(0), taken_over.start(1)] == [Attempt(1, None), Attempt(3, None)]
    resumed = Attempts(tmp_path, resumes=1)
    resumed.begin_anew()
    assert [resumed.start(0), resumed.start(2)] == [Attempt(2, None), Attempt(1, None)]
    (tmp_path / "attempts.json").write_text("torn {")
    assert Attempts(tmp_path, resumes=2).start(0) == Attempt(2, None), "as one of an older version"


def test_steps_that_were_made_again_do_not_stand() -> None:
    step = np.array([1, 2, 3, 4, 3, 4, 5, 5])
    columns = {
        "worker": np.array([0, 0, 0, 0, 0, 0, 0, 1]),
        "attempt": np.array([0, 0, 0, 0, 1, 1, 1, 0]),
        "step": step,
    }
    starts = [Start(0, 0, 0, 4, 0), Start(0, 1, 2, 5, 0), Start(1, 0, 0, 5, 0)]
    assert step[standing(columns, starts)].tolist() == [1, 2, 3, 4, 5, 5]
    assert np.flatnonzero(standing(columns, starts)).tolist() == [0, 1, 4, 5, 6, 7]


@pytest.mark.timeout(60)
def test_tens_of_thousands_of_names_hang_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves and tables were made for every name, each by a search through all values."""
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    for number in range(2):
        path = write_run(tmp_path / "runs" / f"run{number}", workers=1, steps=5)
        names = {f"metric{i:05}": i / 7 for i in range(12_000)}
        writer = ValueWriter(path / "raw", 0, 0)
        for step in range(3):
            writer.add(names, step, step, 0)
        writer.close()
        status = json.loads((path / "status.json").read_text())
        status["workers"]["0"]["metrics"] = names
        (path / "status.json").write_text(json.dumps(status))
    page = tmp_path / "page.html"
    runs = [str(tmp_path / "runs" / f"run{number}") for number in range(2)]
    said = {}
    for words in (["report", runs[0], "-o", str(page)], ["metrics", runs[0]], ["top", runs[0], "--once"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        said[words[0]] = result.stdout
    assert "11990 more metrics" in page.read_text()
    assert "… and 11,002 more rows: --csv FILE has all values" in said["metrics"]
    assert CliRunner().invoke(app, ["compare", *runs, "--html", str(page)]).exit_code == 0
