"""Job files: what stands in one means what it means when it is typed."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import api
from paceline.cli.app import app
from paceline.observe import RunStatus
from paceline.plan import Job

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("paceline.plan.plan.available_cores", lambda: 8)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    for name in ("train.py", "jobs/train.py"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    jobs: list[Job] = []

    def run_job(job: Job, **_: Any) -> RunStatus:
        jobs.append(job)
        return RunStatus(state="succeeded")

    monkeypatch.setattr(api, "run_job", run_job)
    return jobs


def call(text: str, *words: str, before: tuple[str, ...] = (), file: str = "job.yaml") -> tuple[int, str]:
    Path(file).write_text(text)
    result = CliRunner().invoke(app, ["run", *before, file, *words], env={"COLUMNS": "300"})
    return result.exit_code, " ".join(result.stderr.split())


FULL = """
script: train.py
args: [--lr, 1e-4, --name, "two words", --really, no]
workers: 4
nproc-per-node: 4
mode: ssp
staleness: 3
max_time: 1h30m
deadline_s: 20.5
schedule: [50=asp, 90=bsp]
optimizer: a.b:C
guard: yes
spans: false
tls: off
seed: 7
"""


def test_every_kind_of_setting(started: list[Job]) -> None:
    code, said = call(FULL.replace("nproc-per-node: 4\n", ""))
    assert code == 0, said
    assert started == [
        Job(
            script="train.py",
            args=("--lr", "1e-4", "--name", "two words", "--really", "no"),
            workers=4,
            mode="ssp:3",
            max_time_s=5400.0,
            deadline_s=20.5,
            schedule=("50=asp", "90=bsp"),
            optimizers=("a.b:C",),
            guard=True,
            spans=False,
            seed=7,
        )
    ]


def test_the_command_line_counts_more(started: list[Job]) -> None:
    text = "script: train.py\nargs: --lr 0.1 --epochs 3\nworkers: 4\nspans: false\nschedule: [50=asp]\n"
    typed = ("-n", "2", "--spans", "--schedule", "9=asp", "--seed", "3")
    assert call(text, "--lr", "0.2", before=typed)[0] == 0
    assert started == [
        Job(
            script="train.py",
            args=("--lr", "0.1", "--epochs", "3", "--lr", "0.2"),
            workers=2,
            schedule=("9=asp",),
            seed=3,
        )
    ]


def test_the_script_is_beside_the_file_and_a_module_is_not(started: list[Job], here: Path) -> None:
    assert call("script: train.py", file="jobs/a.yml")[0] == 0
    assert call("script: train.py", before=("-n", "3", "--"), file="jobs/a.yml")[0] == 0
    assert call("script: json.tool\nmodule: true", file="jobs/a.yml")[0] == 0
    assert call("script: json.tool", before=("-m",), file="jobs/a.yml")[0] == 0
    assert call(f"script: {here}/train.py", file="jobs/a.yml")[0] == 0
    assert [(job.script, job.module) for job in started] == [
        ("jobs/train.py", False),
        ("jobs/train.py", False),
        ("json.tool", True),
        ("json.tool", True),
        (f"{here}/train.py", False),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("script: train.py\nwokers: 3", "job.yaml: there is no setting 'wokers'. Did you mean 'workers'?"),
        ("script: train.py\nzzz: 3", "there is no setting 'zzz'. Known: script, args, module, workers,"),
        ("workers: 3", "job.yaml names no script; add a line `script: train.py`"),
        ("", "job.yaml names no script"),
        ("script: nothing.py", "script 'nothing.py' does not exist"),
        ("script: train.py\nworkers: two", "Invalid value for '--workers'"),
        ("script: train.py\nworkers: 0", "workers=0 is too small"),
        ("script: train.py\nworkers:", "job.yaml: workers has no value; leave it out for the default"),
        ("script: train.py\nworkers: [1, 2]", "job.yaml: workers cannot be a list"),
        ("script: train.py\nworkers: 1\nworkers: 2", "job.yaml: 'workers' is there twice"),
        ("script: train.py\nguard: perhaps", "guard: 'perhaps' is neither true nor false"),
        ("script: train.py\nargs: {lr: 0.1}", "args is a line, `args: --lr 0.1`, or a list of words"),
        ('script: train.py\nargs: "--name \'a"', "args: No closing quotation in"),
        ("- script", "a job file has lines such as `script: train.py`"),
        ("script: [", "the job file job.yaml is not YAML: while parsing"),
        ("script: !!python/object/apply:os.system [echo]", "names no script"),
        ("script: other.yaml", "a job file cannot name another one"),
    ],
)
def test_what_is_wrong_is_named(started: list[Job], text: str, said: str) -> None:
    code, answer = call(text)
    assert code == 2 and said in answer and "Traceback" not in answer
    assert started == []


def test_a_file_that_is_not_there(started: list[Job]) -> None:
    result = CliRunner().invoke(app, ["run", "nothing.yaml"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "the job file nothing.yaml cannot be read: No such file or directory" in result.stderr


def test_plan_takes_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("paceline.cli.plan_command.show_plan", lambda *_: None)
    monkeypatch.setattr(api, "inspect_script", lambda plan: seen.append(plan.job))
    Path("job.yaml").write_text("script: train.py\nworkers: 3")
    assert CliRunner().invoke(app, ["plan", "job.yaml"]).exit_code == 0
    assert seen == [Job(script="train.py", workers=3)]


def test_the_example(started: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["run", "--workers", "4", "examples/job.yaml"])
    assert result.exit_code == 0, result.stderr
    (job,) = started
    assert (job.script, job.args) == ("examples/digits.py", ("--epochs", "3", "--lr", "0.1"))
    assert (job.workers, job.mode, job.max_time_s) == (4, "ssp:2", 1800.0)
