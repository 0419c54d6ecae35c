"""Runs side by side, and the commands that show one run or several."""

import json
import os
from pathlib import Path

import pytest

from paceline.cli.compare import compare as compare_command
from paceline.cli.report import report as report_command
from paceline.exceptions import RunNotFound, UsageError
from paceline.observe.comparison import ComparedRun, Row, compare, comparison_page, short_names
from paceline.observe.run_data import RunData
from tests.synthetic_run import write_run


def compared(*paths: Path) -> list[ComparedRun]:
    return [ComparedRun.of(RunData(path)) for path in paths]


def rows_of(runs: list[ComparedRun]) -> dict[str, Row]:
    return {row.name: row for row in compare(runs)}


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


def test_a_run_without_spans_has_gaps(two: tuple[Path, Path], tmp_path: Path) -> None:
    rows = rows_of(compared(two[0], tmp_path))
    assert rows["idleness"].cells[1] == "–" and not rows["idleness"].best
    assert rows["limited by"].cells[1] == "unknown"


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


def test_page_has_table_and_plots(two: tuple[Path, Path]) -> None:
    page = comparison_page(compared(*two))
    for title in (
        "loss over time",
        "loss over steps",
        "samples a second",
        "share of pushes at each staleness",
    ):
        assert f"<figcaption>{title}</figcaption>" in page
    assert '<td class="best">' in page and "<script" not in page
    comparison_page(compared(*two, *two))


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
