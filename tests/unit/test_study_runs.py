"""Running a study: what is left, so many at once, interrupted and gone on with. Runs are small stand-ins
here; test_studies.py has real ones."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paceline.api import studies
from paceline.cli.app import app
from paceline.cli.study_command import fitting
from paceline.control.rundir import RunDirectory
from paceline.exceptions import PlanError, UsageError
from paceline.observe import RunStatus
from paceline.plan import Job

# In the place of `python -m paceline run --quiet JOB`: makes a run's directory, and ends as the script says.
STAND_IN = """
import json, os, pathlib, signal, sys, time
import yaml
job = yaml.safe_load(open(sys.argv[-1]))
run = pathlib.Path(job["run_dir"])
how = pathlib.Path(job["script"]).read_text()
with open(run.parent.parent / "started", "a") as file:
    file.write(run.name + chr(10))
run.mkdir()
def say(state):
    status = {"state": state, "version": 3, "controller": {"pid": os.getpid(), "started": 0}}
    (run / "status.json").write_text(json.dumps(status))
(run / "run.json").write_text(json.dumps({"id": run.name, "job": {}, "directory": ".", "made": True}))
if how == "wait":
    signal.signal(signal.SIGINT, lambda *_: (say("stopped"), sys.exit(130)))
    say("running")
    pathlib.Path(run, "waits").touch()
    signal.pause()
if how == "meet":  # two at once, or never
    pathlib.Path(run.parent, run.name + ".here").touch()
    while len(list(run.parent.glob("*.here"))) < 2:
        time.sleep(0.01)
say("failed" if how == "fail" and job.get("seed", 0) == 1 else "succeeded")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "home"))
    monkeypatch.setattr("paceline.plan.plan.available_cores", lambda: 8)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("end")
    python = tmp_path / "python"
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/stand_in.py "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(studies.sys, "executable", str(python))
    monkeypatch.setattr(studies, "POLL_S", 0.01)
    return tmp_path


def study(**more: Any) -> Any:
    settings: dict[str, Any] = {"grid": {"mode": ["bsp", "asp"]}, "seeds": 2, "quiet": True, **more}
    return studies.study("train.py", args=["--lr", "0.1"], directory="study", **settings)


def started() -> list[str]:
    return Path("study/started").read_text().split()


def test_every_run_once_as_a_job_file(here: Path) -> None:
    found = study(budget={"samples": 4096}, workers=3)
    assert started() == found.runs["trial"].tolist()
    assert set(found.runs["state"]) == {"succeeded"} and found.page_path.exists()
    job = yaml.safe_load((here / "study/trials/004-asp-seed1.yaml").read_text())
    assert job == {
        "script": str(here / "train.py"),
        "args": ["--lr", "0.1"],
        "workers": 3,
        "mode": "asp",
        "seed": 1,
        "max_samples": 4096,
        "run_dir": str(here / "study/runs/004-asp-seed1"),
    }
    study(budget={"samples": 4096}, workers=3)
    assert len(started()) == 4  # nothing was left
    with pytest.raises(UsageError, match="holds another study"):
        study(budget={"samples": 4096}, workers=2)
    assert studies.resume_study("study", tell=lambda _: None).runs["state"].tolist() == ["succeeded"] * 4
    assert len(started()) == 4


def test_two_at_once(here: Path) -> None:
    (here / "train.py").write_text("meet")
    assert set(study(at_once=2).runs["state"]) == {"succeeded"}


def test_failures_stay_unless_they_are_to_be_tried_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "train.py").write_text("fail")
    found = study(quiet=False)
    assert found.runs["state"].tolist() == ["succeeded", "succeeded", "failed", "failed"]
    said = capsys.readouterr().out
    assert (
        "3/4  mode=bsp, seed 1: started\n" in said
        and "3/4  mode=bsp, seed 1: failed: nobody said why" in said
    )
    study()
    assert len(started()) == 4
    (here / "train.py").write_text("end")
    assert set(study(retry_failed=True).runs["state"]) == {"succeeded"}
    assert started()[4:] == ["003-bsp-seed1", "004-asp-seed1"]


def test_interrupted_and_gone_on_with(here: Path) -> None:
    (here / "train.py").write_text("wait")
    first = here / "study/runs/001-bsp-seed0"
    thread = threading.Thread(target=interrupt, args=(first / "waits",), name="interrupting")
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        study()
    thread.join()
    assert started() == ["001-bsp-seed0"]
    assert RunDirectory(first).read_status()["state"] == "stopped"
    assert (here / "study/study.html").exists()
    (here / "train.py").write_text("end")
    assert set(study().runs["state"]) == {"succeeded"}
    assert started()[1:] == ["001-bsp-seed0", "002-asp-seed0", "003-bsp-seed1", "004-asp-seed1"]


def interrupt(when: Path) -> None:
    """Ctrl-C once the file is there."""
    for _ in range(6000):
        if when.exists():
            break
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_outlived_the_study_is_waited_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study()
    going = RunDirectory(here / "study/runs/002-asp-seed0")
    going.write_status(RunStatus(state="running").to_json())  # by this process, which lives

    def ends(said: str) -> None:
        if "goes on, started by process" in said:
            going.write_status(RunStatus(state="succeeded").to_json())

    found = studies.resume_study("study", tell=ends)
    assert set(found.runs["state"]) == {"succeeded"} and len(started()) == 4


def test_refused_before_anything_starts(here: Path) -> None:
    for more, said in (
        ({"grid": {"mode": ["backup:2"]}}, "mode=backup:2: mode backup:2 goes on without"),
        ({"grid": {"mode": "bsp,fast"}}, "mode=fast: mode 'fast'"),
        ({"budget": {"epochs": 3}}, "budget epochs: give one of samples, updates"),
        ({"at_once": 0}, "at_once=0"),
        ({"seeds": []}, "give at least one"),
    ):
        with pytest.raises(UsageError) as caught:
            study(**more)
        assert said in str(caught.value)
    (here / "train.py").unlink()
    with pytest.raises(PlanError, match="mode=bsp: script 'train.py' does not exist"):
        study()
    assert not (here / "study").exists()
    (here / "train.py").touch()
    (here / "study").mkdir()
    (here / "study" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not empty, and no study's directory"):
        study()


def test_the_same_command_is_the_same_study(here: Path) -> None:
    one = studies.study("train.py", grid={"workers": "1,2"}, quiet=True)
    again = studies.study("train.py", grid={"workers": [1, 2]}, quiet=True)
    other = studies.study("train.py", grid={"workers": [1, 2]}, quiet=True, seeds=[5])
    assert one.path == again.path != other.path
    assert one.path.name.startswith("study-train-") and one.path.parent == here
    assert json.loads((one.path / "study.json").read_text())["job"] == Job(script="train.py").to_json()


# the command


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["study", *words], env={"COLUMNS": "300"})
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


def test_the_command(here: Path) -> None:
    words = (
        "--grid mode=bsp,asp --grid arg:lr=1,2 --budget time=1h --budget updates=5 -n 3 --seed 4 --dir study"
    )
    code, said = call(*words.split(), "train.py", "--epochs", "3")
    assert code == 0, said
    assert "4/4 mode=asp lr=2, seed 4: succeeded" in said and f"page {here}/study/study.html" in said
    job = yaml.safe_load((here / "study/trials/004-asp-2-seed4.yaml").read_text())
    assert job["args"] == ["--epochs", "3", "--lr", "2"]
    assert (job["max_time_s"], job["max_updates"], job["workers"], job["seed"]) == (3600.0, 5, 3, 4)
    assert "4 of them have ended already" in call("--resume", "study")[1]
    (here / "job.yaml").write_text("script: train.py\nmode: ssp\nstaleness: 3\nperiod: 2\nseeds: 1,2\n")
    code, said = call("--dir", "other", "job.yaml")
    assert code == 0 and "2/2 as given, seed 2: succeeded" in said
    assert yaml.safe_load((here / "other/trials/002-seed2.yaml").read_text())["mode"] == "ssp:3+period=2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "name the script to study, or give --resume DIR"),
        ("--resume study train.py", "leave the script and --grid out"),
        ("--resume nowhere", "nowhere is not a study's directory"),
        ("--budget epochs=3 train.py", "--budget epochs=3: give samples=N, updates=N or time=30m"),
        ("--budget samples=few train.py", "give a whole number above 0"),
        ("--seeds 0 train.py", "--seeds 0: give how many, as in 3, or which"),
        ("--at-once many train.py", "--at-once many: give a number of runs, or fit"),
        ("--grid lr=1,2 train.py", "For an argument of the script write arg:lr=…"),
        ("--grid mode=bsp,fast train.py", "mode=fast: mode 'fast': there is no such mode"),
    ],
)
def test_what_the_command_refuses(words: str, said: str) -> None:
    code, answer = call(*words.split())
    assert code == 2 and said in answer and "Traceback" not in answer


def test_the_columns_that_fit() -> None:
    head, rows = ["mode", "runs", "final loss", "samples/s"], [["local:8", "3", "0.1 ± 0.01", "1,000"]]
    assert [fitting(head, rows, width, least=2) for width in (80, 36, 35, 20, 5)] == [4, 4, 3, 2, 2]
