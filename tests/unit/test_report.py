"""The report says for people what summary.json says for programs."""

import json
import math
import os
from pathlib import Path

import pytest

from paceline.observe import RunStatus, WorkerStatus, write_report
from paceline.observe.analyse import summary
from paceline.observe.analyse.diagnosis import diagnose
from paceline.observe.analyse.facts import facts_of
from paceline.observe.analyse.run_data import RunData
from paceline.plan import Job
from tests.synthetic_run import write_run

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
            {"epoch": 1, "samples": 1437, "applied": 1397, "refused": 32, "skipped": 8, "unused": 0},
            {"epoch": 2, "samples": 1437, "applied": 0, "refused": 0, "unused": 0},
        ],
        mode="ssp:2",
        rule="every gradient is applied when it arrives; a worker waits while",
        update_s=0.18,
        messages=["worker:1 was killed by signal 9 | replaced"],
    )


def row(*cells: object) -> str:
    """A line of a table."""
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def summary_in(path: Path) -> dict[str, object]:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    summary = json.loads((path / "summary.json").read_text(), parse_constant=refuse)
    assert isinstance(summary, dict)
    return summary


def test_report(tmp_path: Path) -> None:
    path = write_report(tmp_path, finished(), JOB, COMMAND)
    assert path == tmp_path / "report.html"
    text = path.read_text()
    for part in (
        "<h1>Run 20261115-081502-digits-4f2a</h1>",
        "<dt>state</dt><dd>succeeded</dd>",
        "<dt>loss</dt><dd>0.07</dd>",
        "<dt>samples a second</dt><dd>68</dd>",
        "<dt>idleness</dt><dd>25 %</dd>",
        "paceline run --mode ssp:2 digits.py --note &#x27;two words&#x27;",
        row("mode", "ssp:2 (every gradient is applied when it arrives; a worker waits while)"),
        row("worker:1", "finished", 45, *"–––––", "25 %", "–", 0, "0.07", "0.98"),
        "Mean 0.33, at most 1.",
        row(2, "1,437", "1,397", 32, 8, 0),
        "In all 2 epochs: 2,834 applied, 32 refused, 8 skipped, 0 unused.",
        row("workers replaced", 1),
        "<li>worker:1 was killed by signal 9 | replaced</li>",
        "version-000000000090",
        "paceline export 20261115-081502-digits-4f2a model.safetensors",
    ):
        assert part in text, part
    assert "<td>3</td><td>1,437</td>" not in text, "the epoch that never began"
    assert "paceline resume" not in text
    assert not (tmp_path / "report.md").exists()


def test_the_samples_of_epochs_without_an_account_of_their_own_are_in_the_sums(tmp_path: Path) -> None:
    status = finished()
    status.earlier_epochs = {"epochs": 4000, "samples": 5_748_000, "applied": 5_747_990, "unused": 10}
    write_report(tmp_path, status, JOB, COMMAND)
    text = (tmp_path / "report.html").read_text()
    assert "In all 4,002 epochs: 5,750,824 applied, 32 refused, 8 skipped, 10 unused." in text


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
    assert summary["computation"] is None, "there are no spans"
    assert any("spans" in each for each in summary["missing"])


def test_summary_has_what_follows_from_spans(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", workers=3, steps=100)
    run = RunData(path)
    facts = facts_of(run)
    write_report(path, run.status, run.job, COMMAND)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["idleness"] == pytest.approx(facts.idleness) and summary["idleness"] > 0.1
    assert summary["computation"] == pytest.approx(facts.computation)
    assert summary["communication"] == pytest.approx(facts.communication)
    assert summary["workers"][0]["blocked_on"] == {"2": pytest.approx(0.2, rel=0.1)}
    assert summary["push"]["count"] == 300 and summary["pull"]["p99"] > summary["pull"]["p50"] > 0
    assert summary["writes"] == 300
    assert sum(summary["workers"][1]["staleness"].values()) == 100
    limit = diagnose(facts, "asp", os.cpu_count())
    assert summary["diagnosis"]["limit"] == limit.limit
    assert summary["shares"]["network"] == pytest.approx(limit.network)
    assert sum(summary["shares"].values()) == pytest.approx(1.0)
    assert summary["missing"] == []
    assert limit.text in (path / "report.html").read_text()


def test_failure_keeps_its_traceback(tmp_path: Path) -> None:
    status = finished("failed")
    status.error = "worker:1: ValueError: <bad>\nTraceback:\n"
    text = write_report(tmp_path, status, JOB).read_text()
    assert "<pre>worker:1: ValueError: &lt;bad&gt;\nTraceback:" in text
    assert "paceline resume 20261115-081502-digits-4f2a" in text


def test_run_that_never_began(tmp_path: Path) -> None:
    text = write_report(tmp_path, RunStatus(state="stopped"), Job().to_json()).read_text()
    assert f"<h1>Run {tmp_path.name}</h1>" in text
    assert "checkpoints: none" in text
    assert "paceline resume" not in text


def test_nan_is_null_in_json(tmp_path: Path) -> None:
    status = finished()
    status.workers[0].metrics["loss"] = math.nan
    text = write_report(tmp_path, status, JOB).read_text()
    assert "<dt>loss</dt><dd>nan</dd>" in text
    summary = json.loads(json.dumps(summary_in(tmp_path)))
    assert summary["metrics"]["loss"] is None
    assert summary["workers"][1]["metrics"]["loss"] == 0.07


def test_resumed_run_counts_its_own_samples(tmp_path: Path) -> None:
    status = finished()
    status.samples_before = 774
    text = write_report(tmp_path, status, JOB).read_text()
    assert "<dt>samples a second</dt><dd>50</dd>" in text
    assert row("samples before the resume", 774) in text


def test_tables_beyond_understanding_do_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise IndexError("surprise")

    monkeypatch.setattr(summary, "facts_of", broken)
    text = write_report(tmp_path, finished(), JOB).read_text()
    assert "nothing could be worked out from spans and pushes (IndexError: surprise)" in text
    assert "<dt>idleness</dt><dd>25 %</dd>" in text
    assert any("IndexError" in str(each) for each in list(summary_in(tmp_path)["missing"]))  # type: ignore[call-overload]
