"""paceline stop: what it says of a run in each state. (test_stopping.py stops real ones.)"""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.api.going_on import waiting_for
from paceline.cli.app import app
from paceline.control import Requests
from paceline.control.rundir import RunDirectory
from paceline.observe import RunStatus
from paceline.plan import Job


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))

    def made(state: str, **more: Any) -> RunDirectory:
        run = RunDirectory.create(Job(script="train.py"))
        run.write_status(RunStatus(state=state, version=1200, **more).to_json())
        return run

    return made


def call() -> tuple[int, str]:
    result = CliRunner().invoke(app, ["stop", "last"], env={"COLUMNS": "200"})
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize(("state", "how"), [("succeeded", "succeeded"), ("stopped", "was stopped")])
def test_a_run_that_has_ended(make: Any, state: str, how: str) -> None:
    run = make(state)
    assert call() == (0, f"Run {run.id} has ended already: it {how} at update 1,200.")


def test_a_run_whose_controller_died(make: Any) -> None:
    run = make("running")
    nobody = {"pid": os.getpid(), "started": 1.0}
    (run.path / "status.json").write_text(json.dumps(run.read_status() | {"controller": nobody}))
    code, said = call()
    assert code == 0
    assert said.startswith(f"Run {run.id} has crashed: its controller (process ")
    assert said.endswith("nothing to stop. It has no checkpoint to go on from.")
    (run.checkpoints_path / "version-000000001000").mkdir()
    assert call()[1].endswith(f"version-000000001000: `paceline resume {run.id}` goes on there.")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ({"state": "stopped"}, 0, "stopped at update 1,200. It has no checkpoint to go on from."),
        (
            {"state": "failed", "error": "worker:1: bad\nTrace"},
            1,
            "failed before it could stop: worker:1: bad",
        ),
        ({"state": "succeeded"}, 0, "succeeded before it had to stop, at update 1,200."),
        (
            {"state": "stopped", "messages": ["no checkpoint: the disk is full"]},
            0,
            "note: no checkpoint: the disk is full",
        ),
    ],
)
def test_how_it_ended(
    make: Any, monkeypatch: pytest.MonkeyPatch, end: dict[str, Any], code: int, said: str
) -> None:
    run = make("running")

    def ask(self: Requests, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        assert body == {"kind": "stop", "now": False}
        run.write_status(RunStatus(version=1200, **end).to_json())
        return {"state": "stopping"}

    monkeypatch.setattr(Requests, "ask", ask)
    found = call()
    assert found[0] == code and said in found[1] and "Trace" not in found[1]


def test_what_it_waits_for() -> None:
    now = 1_800_000_000.0

    def said(age_s: float = 0.5, **status: Any) -> str:
        updated = datetime.fromtimestamp(now - age_s, UTC).isoformat()
        return waiting_for({"updated": updated, "controller": {"pid": 77}, **status}, now)

    assert said(state="stopping") == "workers finish the step that they are at, then a checkpoint is written"
    assert said(state="stopping", saving=[10**9, 4 * 10**9]) == "a checkpoint of 4 GB is written"
    assert said(state="finishing").startswith("its scripts have ended already")
    assert said(state="stopped") == "its processes end, and its report is written"
    assert said(11.0, state="stopping").startswith("its controller (process 77) has written nothing for")
