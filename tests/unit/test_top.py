"""paceline top: watches a run from outside, and leaves it alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import top_command as module
from paceline.cli.top_command import top
from paceline.control.rundir import RunDirectory
from paceline.exceptions import RunNotFound, UsageError
from paceline.observe import RunStatus, ServerStatus, WorkerStatus
from paceline.plan import Job


def status(state: str = "running", version: int = 100) -> RunStatus:
    return RunStatus(
        state=state,
        elapsed_s=version / 10,
        version=version,
        samples=32 * version,
        mode="asp",
        workers={0: WorkerStatus(rank=0, state="running", clock=version, memory=10**8, cpu=0.5)},
        servers={0: ServerStatus(rank=0, updates=version)},
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    found = RunDirectory.create(Job(script="train.py"))
    found.write_status(status().to_json())
    return found


def crash(run: RunDirectory) -> None:
    """As if its controller had been killed."""
    data = {**run.read_status(), "controller": {"pid": 2**22 - 1, "started": 0.0}}
    (run.path / "status.json").write_text(json.dumps(data))


def invoke(*words: str) -> Any:
    app = typer.Typer()
    app.command()(top)
    result = CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result


def sleeps(monkeypatch: pytest.MonkeyPatch, *then: Any) -> None:
    """What happens instead of waiting: one of these after the other."""
    left = iter(then)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: next(left)())


def test_once(run: RunDirectory) -> None:
    lines = [line.split() for line in invoke("last", "--once").stdout.splitlines()]
    assert ["worker", "state", "step", "steps/s", "waiting", "CPU", "memory"] in lines
    assert ["0", "running", "100", "10", "0", "%", "0.50", "100", "MB"] in lines
    assert ["server", "updates", "updates/s", "updating"] in lines
    assert "has ended" not in str(lines)


def test_once_shows_every_worker(run: RunDirectory) -> None:
    many = status()
    many.workers = {rank: WorkerStatus(rank=rank) for rank in range(64)}
    many.servers = {rank: ServerStatus(rank=rank) for rank in range(20)}
    run.write_status(many.to_json())
    assert "more" not in invoke("last", "--once").stdout


def test_until_the_run_ends(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps(
        monkeypatch,
        lambda: run.write_status(status(version=200).to_json()),
        (run.path / "status.json").unlink,  # read while it is not there: as before
        lambda: run.write_status(status("succeeded", version=300).to_json()),
    )
    lines = invoke("last").stdout.splitlines()
    assert lines[0].startswith("0:10 running")
    assert lines[-2].startswith("0:30 succeeded")
    assert lines[-1] == f"Run {run.id} has ended: it succeeded."


def test_a_run_that_crashes(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps(monkeypatch, lambda: crash(run))
    result = invoke("last")
    assert "crashed" in result.stdout.splitlines()[-1]
    assert f"run {run.id} crashed: its controller is gone" in " ".join(result.stderr.split())
    assert "crashed" in invoke("last", "--once").stdout


def test_a_run_that_has_ended(run: RunDirectory) -> None:
    run.write_status(status("stopped").to_json())
    for words in (("last",), ("last", "--once")):
        assert invoke(*words).stdout.endswith(f"Run {run.id} has ended: it was stopped.\n")


def test_interrupting_leaves_the_run_alone(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before = (run.path / "status.json").read_bytes()
    sleeps(monkeypatch, interrupt)
    assert invoke("last").stdout.endswith(f"Run {run.id} goes on.\n")
    assert (run.path / "status.json").read_bytes() == before


def test_messages_of_before_are_not_all_repeated(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = status(), status("succeeded", version=200)
    old.messages = [f"message {n}" for n in range(50)]
    new.messages = [*old.messages, "the last"]
    run.write_status(old.to_json())
    sleeps(monkeypatch, lambda: run.write_status(new.to_json()))
    lines = [line for line in invoke("last").stdout.splitlines() if "message" in line or "the last" in line]
    assert lines == ["message 47", "message 48", "message 49", "the last"]


def test_an_older_version(run: RunDirectory) -> None:
    old = {"state": "succeeded", "version": 5, "workers": {"0": {"rank": 0, "clock": 5}}, "gone": 1}
    (run.path / "status.json").write_text(json.dumps(old))
    assert "version 5" in invoke("last", "--once").stdout


def test_no_such_run(run: RunDirectory) -> None:
    with pytest.raises(RunNotFound, match="there is no run 'nonsense'"):
        invoke("nonsense")


@pytest.mark.parametrize("text", ['{"workers": {"x": {}}}', '{"workers": [], "state": "failed"}'])
def test_a_status_that_makes_no_sense(run: RunDirectory, text: str) -> None:
    (run.path / "status.json").write_text(text)
    with pytest.raises(UsageError, match="cannot be understood"):
        invoke("last")


def test_a_status_that_is_cut_short(run: RunDirectory) -> None:
    (run.path / "status.json").write_text('{"state": "runn')
    with pytest.raises(UsageError, match="status.json cannot be understood: Unterminated string"):
        invoke("last")
