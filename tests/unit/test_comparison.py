"""Runs side by side, and the commands that show one run or several."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.compare_command import compare as compare_command
from paceline.cli.report_command import report as report_command
from paceline.exceptions import RunNotFound, UsageError
from paceline.observe.analyse.comparison import (
    ComparedRun,
    Row,
    column_names,
    columns_of,
    compare,
    short_names,
)
from paceline.observe.analyse.repetitions import arguments_of, repetitions, seed_of
from paceline.observe.analyse.run_data import RunData
from paceline.observe.show.comparison_page import comparison_page
from tests.synthetic_run import write_run


def compared(*paths: Path) -> list[ComparedRun]:
    return [ComparedRun.of(RunData(path)) for path in paths]


def rows_of(runs: list[ComparedRun]) -> dict[str, Row]:
    return {row.name: row for row in compare(columns_of(runs))}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("runs")
    slow = write_run(root / "slow", workers=2, steps=80, mode="bsp", wait_ms=8.0, name="slow")
    fast = write_run(root / "fast", workers=4, steps=80, mode="asp", wait_ms=1.0, name="fast")
    return slow, fast


def test_best_is_marked_where_it_means_something(two: tuple[Path, Path]) -> None:
    rows = rows_of(compared(*two))
    assert rows["mode"].cells == ("bsp", "asp") and not rows["mode"].best
    assert rows["idleness"].best == {1}
    assert rows["computation"].best == {1}
    assert rows["highest staleness"].best == {0}
    assert rows["samples a second"].best == {1}
    assert not rows["loss"].best, "they are the same"
    assert not rows["duration"].best, "they did not do the same"
    assert rows["samples a push"].cells == ("32", "32")
    assert rows["limited by"].cells[0] != "unknown"
    assert float(rows["CPU, cores"].cells[0]) == pytest.approx(4 * 0.7, rel=0.3)


def test_memory_is_the_peak_and_not_that_of_a_short_run(two: tuple[Path, Path], tmp_path: Path) -> None:
    runs = compared(*two)
    name = "memory of all roles, peak"
    times = [1e9 * (runs[0].facts.began + second) for second in range(4)]
    for each, sizes in zip(runs, ((100, 900, 200, 150), (500, 500, 500, 500)), strict=True):
        columns = {key: np.repeat(values[:1], 8) for key, values in each.run.columns("resources").items()}
        columns |= {"role": np.array([1, 2] * 4, "u1"), "rank": np.zeros(8, "<i2")}
        columns |= {"time": np.repeat(times, 2).astype("<i8"), "memory": np.repeat(sizes, 2).astype("<i8")}
        resources = each.run.columns("resources")
        assert isinstance(resources, dict)
        resources.update(columns)
    row = rows_of(runs)[name]
    assert row.cells == ("1.8 kB", "1 kB") and row.best == {1}
    for column, values in resources.items():
        resources[column] = values[:4]  # two seconds
    row = rows_of(runs)[name]
    assert row.cells == ("1.8 kB", "–") and not row.best


def test_a_run_without_spans_has_gaps(two: tuple[Path, Path], tmp_path: Path) -> None:
    rows = rows_of(compared(two[0], tmp_path))
    assert rows["idleness"].cells[1] == "–" and not rows["idleness"].best
    assert rows["limited by"].cells[1] == "unknown"


def test_a_run_that_diverged_is_never_best(two: tuple[Path, Path]) -> None:
    runs = [ComparedRun.of(RunData(path)) for path in two]
    runs[1].run.status.diverged = "The run diverged: the loss rose from 19 to 2.4e+33."
    rows = rows_of(runs)
    assert rows["state"].cells[1] == "succeeded, but diverged"
    assert not any(row.best for row in rows.values())


def test_repetitions_of_which_one_became_infinite(two: tuple[Path, Path]) -> None:
    runs = [ComparedRun.of(RunData(path)) for path in two]
    for worker in runs[1].run.status.workers.values():
        worker.metrics["loss"] = math.inf
    assert {row.name: row for row in compare([runs])}["loss"].cells == ("inf",)


def test_nan_is_never_best(two: tuple[Path, Path], tmp_path: Path) -> None:
    path = write_run(tmp_path / "nan", steps=5)
    status = json.loads((path / "status.json").read_text())
    for worker in status["workers"].values():
        worker["metrics"]["loss"] = float("nan")
    (path / "status.json").write_text(json.dumps(status))
    row = rows_of(compared(path, two[0], two[1]))["loss"]
    assert row.cells[0] == "nan" and not row.best


def test_names_are_short_and_different(two: tuple[Path, Path]) -> None:
    assert short_names(compared(*two)) == ["bsp 2×1", "asp 4×1"]
    assert short_names(compared(two[0], two[0])) == [
        "1: 20261115-081502-slow-4f2a",
        "2: 20261115-081502-slow-4f2a",
    ]


def with_job(path: Path, loss: float | None = None, **settings: Any) -> Path:
    """Change what a run was asked for, and its last loss."""
    record = json.loads((path / "run.json").read_text())
    record["job"] |= {"script": "digits.py", **settings}
    (path / "run.json").write_text(json.dumps(record))
    status = json.loads((path / "status.json").read_text())
    for worker in status["workers"].values():
        worker["metrics"]["loss"] = loss
    (path / "status.json").write_text(json.dumps(status))
    return path


def test_repetitions_share_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for n, (rate, seed, loss) in enumerate(((1, 0, 0.1), (1, 1, 0.3), (2, 0, 0.4), (1, 2, 0.2))):
        path = write_run(tmp_path / str(n), workers=2, steps=10, name=f"r{n}")
        paths.append(with_job(path, loss, args=["--lr", str(rate), "--seed", str(seed)], compress="none"))
    found = columns_of(compared(*paths))
    assert column_names(found) == ["asp 2×1 --lr 1, 3 runs", "asp 2×1 --lr 2"]
    rows = {row.name: row for row in compare(found)}
    assert rows["arguments"].cells == ("--lr 1", "--lr 2")
    assert rows["seed"].cells == ("0, 1, 2", "0")
    assert rows["loss"].cells == ("0.2 ± 0.1", "0.4") and rows["loss"].best == {0}
    assert rows["script"].cells == ("digits.py", "digits.py")
    assert rows["mode"].cells == ("asp", "asp")
    assert len(columns_of(compared(*paths), group=False)) == 4
    compare_command([str(path) for path in paths])
    out = capsys.readouterr().out
    assert "0.2 ± 0.1 *" in out and "--lr 1, 3 runs" in out and "20261115-081502-r3-4f2a" in out


def test_settings_that_differ_are_rows(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name, workers=2, steps=10) for name in ("a", "b"))
    with_job(one, 0.5, compress="none", tls=False, args=[], seed=1)
    with_job(two, 0.5, compress="topk:0.1", tls=True, args=[], seed=2)
    rows = rows_of(compared(one, two))
    assert rows["compress"].cells == ("none", "topk:0.1")
    assert rows["tls"].cells == ("no", "yes")
    assert rows["seed"].cells == ("1", "2")
    assert "deadline s" not in rows


def test_seeds_are_found_among_arguments() -> None:
    job = {"args": ["--lr", "0.1", "--seed", "3", "x"], "seed": 0}
    assert (arguments_of(job), seed_of(job)) == ("--lr 0.1 x", "3")
    assert (arguments_of({"args": ["seed=4"]}), seed_of({"args": ["seed=4"]})) == ("–", "4")
    assert seed_of({"args": ["--random-seed=5"], "seed": 1}) == "5"
    assert (arguments_of({"args": ["--seed"]}), seed_of({"args": ["--seed"], "seed": 1})) == ("--seed", "1")
    assert repetitions([{}, {}]) == [[0], [1]]


def test_page_has_table_and_plots(two: tuple[Path, Path]) -> None:
    page = comparison_page(columns_of(compared(*two)))
    for title in (
        "loss over time",
        "loss over steps",
        "samples a second",
        "share of pushes at each staleness",
    ):
        assert f"<figcaption>{title}</figcaption>" in page
    assert '<td class="best">' in page and "<script" not in page
    together = comparison_page(columns_of(compared(*two, *two)))
    assert "4 runs compared" in together and "bsp 2×1, 2 runs" in together


def test_compare_command(two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "c.html"
    compare_command([str(path) for path in two], target)
    out = capsys.readouterr().out
    assert "idleness" in out and "* the best of its row" in out and str(target) in out
    assert target.read_text().startswith("<!doctype html>")


def test_compare_says_what_it_needs(two: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two runs or more"):
        compare_command([str(two[0])])
    with pytest.raises(UsageError, match="there twice"):
        compare_command([str(two[0]), str(two[0])])
    with pytest.raises(RunNotFound):
        compare_command([str(two[0]), "no-such-run"])
    with pytest.raises(UsageError, match="--html .* cannot be written"):
        compare_command([str(path) for path in two], tmp_path / "none" / "c.html")


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "a", steps=20)
    report_command(str(path))
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith(("Network-bound", "Worker-bound", "Straggler-bound"))
    assert str(path / "report.html") in out and "mean staleness" in out
    assert not (path / "raw").exists() and (path / "spans.parquet").exists()
    assert "still going on" not in (path / "report.html").read_text()


def test_report_of_a_killed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "a", steps=20, state="running")
    report_command(str(path), tmp_path / "page.html")
    assert "crashed" in capsys.readouterr().out
    assert "This run did not end: it was killed" in (tmp_path / "page.html").read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_directory_without_write_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "a", steps=20)
    path.chmod(0o500)
    monkeypatch.chdir(tmp_path)
    try:
        _report_goes_here(path, tmp_path, capsys)
    finally:
        path.chmod(0o700)


def test_run_directory_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "a", steps=20)
    (path / "report.html").mkdir()  # a file cannot be put there, whoever asks
    (path / "report.html" / "report.html").mkdir()
    monkeypatch.chdir(tmp_path)
    _report_goes_here(path, tmp_path, capsys)


def _report_goes_here(path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_command(str(path))
    out = capsys.readouterr().out
    assert "cannot be written" in out and "--output says where" in out
    assert (here / "report-20261115-081502-digits-4f2a.html").exists()


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", steps=5)
    with pytest.raises(UsageError, match="--output .* cannot be written: No such file"):
        report_command(str(path), tmp_path / "none" / "page.html")
    with pytest.raises(RunNotFound):
        report_command(str(tmp_path / "nothing"))
