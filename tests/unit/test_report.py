"""The report says for people what summary.json says for programs."""

import json
import math
from pathlib import Path

import pytest

from paceline.observe import RunStatus, WorkerStatus, write_report
from paceline.plan import Job

JOB = Job(script="digits.py", workers=2, servers=2, mode="ssp:2").to_json()
COMMAND = ["paceline", "run", "--mode", "ssp:2", "digits.py", "--note", "two words"]


def finished(state: str = "succeeded") -> RunStatus:
    return RunStatus(
        state=state,
        run_id="20261115-081502-digits-4f2a",
        elapsed_s=42.0,
        version=90,
        epoch=2,
        samples=2874,
        samples_per_epoch=1437,
        parameters=61706,
        workers={
            rank: WorkerStatus(
                rank=rank,
                state="finished",
                clock=45,
                step_s=30.0,
                wait_s=10.0,
                metrics={"loss": 0.07, "accuracy": 0.98},
            )
            for rank in range(2)
        },
        staleness={0: 60, 1: 30},
        restarts=1,
        dropped=3,
        checkpoints=["version-000000000090"],
        leases=[
            {"epoch": 0, "samples": 1437, "applied": 1437, "refused": 0, "unused": 0},
            {"epoch": 1, "samples": 1437, "applied": 1405, "refused": 32, "unused": 0},
            {"epoch": 2, "samples": 1437, "applied": 0, "refused": 0, "unused": 0},
        ],
        mode="ssp:2",
        rule="every gradient is applied when it arrives; a worker waits while",
        update_s=0.18,
        messages=["worker:1 was killed by signal 9 | replaced"],
    )


def test_report(tmp_path: Path) -> None:
    path = write_report(tmp_path, finished(), JOB, COMMAND)
    assert path == tmp_path / "report.md"
    text = path.read_text()
    for part in (
        "# Run 20261115-081502-digits-4f2a",
        "**Succeeded** after 42.0 s: 2 epochs, 90 updates.",
        "loss **0.07**, accuracy **0.98**",
        "paceline run --mode ssp:2 digits.py --note 'two words'",
        "| mode | ssp:2 (every gradient is applied when it arrives; a worker waits while",
        "| samples per second | 68 |",
        "| lead server's time per update | 2 ms |",
        "| worker:1 | finished | 45 | 30.0 s | 10.0 s | 25 % | 0 | 0.07 | 0.98 |",
        "mean 0.33, at most 1.",
        "| 1 | 30 | 33 % |",
        "| 2 | 1,437 | 1,405 | 32 | 0 |",
        "| workers replaced | 1 |",
        "- worker:1 was killed by signal 9 \\| replaced",
        "`version-000000000090`",
        "paceline export 20261115-081502-digits-4f2a model.safetensors",
    ):
        assert part in text
    assert "| 3 | 1,437 |" not in text, "the epoch that never began"
    assert "paceline resume" not in text


def test_tables_are_well_formed(tmp_path: Path) -> None:
    text = write_report(tmp_path, finished(), JOB, COMMAND).read_text().replace("\\|", "")
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 6
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_summary_has_the_same_numbers(tmp_path: Path) -> None:
    write_report(tmp_path, finished(), JOB, COMMAND)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["state"] == "succeeded"
    assert summary["samples_per_s"] == pytest.approx(68.43, abs=0.01)
    assert summary["workers"][1]["idleness"] == 0.25
    assert summary["staleness"] == {
        "mean": pytest.approx(1 / 3),
        "max": 1,
        "pushes": {"0": 60, "1": 30},
    }
    assert summary["leases"][1]["refused"] == 32
    assert summary["job"]["mode"] == "ssp:2"
    assert summary["command"] == COMMAND


def test_failure_keeps_its_traceback(tmp_path: Path) -> None:
    status = finished("failed")
    status.error = "worker:1: ValueError: bad\nTraceback:\n  ```\n"
    text = write_report(tmp_path, status, JOB).read_text()
    assert "**Failed**" in text
    assert "````\nworker:1: ValueError: bad" in text
    assert "paceline resume 20261115-081502-digits-4f2a" in text


def test_run_that_never_began(tmp_path: Path) -> None:
    text = write_report(tmp_path, RunStatus(state="stopped"), Job().to_json()).read_text()
    assert f"# Run {tmp_path.name}" in text
    assert "before the first update" in text
    assert "checkpoints: none" in text
    assert "paceline resume" not in text


def test_nan_is_null_in_json(tmp_path: Path) -> None:
    status = finished()
    status.workers[0].metrics["loss"] = math.nan
    text = write_report(tmp_path, status, JOB).read_text()
    assert "loss **nan**" in text

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert summary["metrics"]["loss"] is None
    assert summary["workers"][1]["metrics"]["loss"] == 0.07


def test_resumed_run_counts_its_own_samples(tmp_path: Path) -> None:
    status = finished()
    status.samples_before = 774
    text = write_report(tmp_path, status, JOB).read_text()
    assert "| samples per second | 50 |" in text
    assert "| of these before the resume | 774 |" in text
