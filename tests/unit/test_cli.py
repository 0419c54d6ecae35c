"""The command line: what is typed becomes the right call, and every mistake gets a clear answer."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline
from paceline import api
from paceline.api import logs
from paceline.cli.app import app
from paceline.control.known_runs import find_run
from paceline.control.rundir import RunDirectory
from paceline.exceptions import CheckpointError, RoleFailed
from paceline.observe import Progress, RunStatus, WorkerStatus
from paceline.plan import Job, ModelFacts, Plan

SOURCE = Path(paceline.__file__).parents[1]


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("paceline.plan.plan.available_cores", lambda: 8)
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "digits.py"):
        (tmp_path / name).touch()

    def call(*words: str) -> Result:
        result = CliRunner().invoke(app, words, prog_name="paceline", env={"COLUMNS": "100"})
        return Result(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs that would have started; each succeeds at once."""
    jobs: list[Job] = []

    def run_job(job: Job, *, command: Any, progress: Progress, lasting: bool) -> RunStatus:
        jobs.append(job)
        return RunStatus(state="succeeded")

    monkeypatch.setattr(api, "run_job", run_job)
    return jobs


def make_run(state: str = "stopped", **settings: Any) -> RunDirectory:
    run = RunDirectory.create(Job(**{"script": "train.py", **settings}))
    status = RunStatus(state=state, version=1200, samples=900, elapsed_s=3.0)
    status.workers = {rank: WorkerStatus(rank=rank, clock=2400) for rank in (0, 1)}
    run.write_status(status.to_json())
    return run


# run


def test_run_defaults(invoke: Invoke, started: list[Job]) -> None:
    assert invoke("run", "train.py").code == 0
    assert started == [Job(script="train.py")]


def test_run_every_option(invoke: Invoke, started: list[Job]) -> None:
    options = (
        "--workers 4 --servers 3 --threads 2 --link tcp --mode ssp:3 --seed 7 --deadline 20.5 "
        "--max-restarts 1 --checkpoint-every 50 --keep-checkpoints 2 --run-dir mine --quiet "
        "--optimizer a.b:C --optimizer d:E train.py --lr 0.1 -x -- --y"
    )
    result = invoke("run", *options.split())
    assert result.code == 0, result.err
    assert started == [
        Job(
            script="train.py",
            args=("--lr", "0.1", "-x", "--", "--y"),
            workers=4,
            servers=3,
            threads=2,
            link="tcp",
            mode="ssp:3",
            seed=7,
            deadline_s=20.5,
            max_restarts=1,
            checkpoint_every=50,
            keep_checkpoints=2,
            run_dir="mine",
            optimizers=("a.b:C", "d:E"),
        )
    ]
    assert "note" not in result.err


@pytest.mark.parametrize(
    ("typed", "settings"),
    [
        ("-n 3 -s 2", {"workers": 3, "servers": 2}),
        ("-w3", {"workers": 3}),
        ("--nproc-per-node 3", {"workers": 3}),
        ("--nproc_per_node=3", {"workers": 3}),
        ("--max_restarts 5 --checkpoint_every 9", {"max_restarts": 5, "checkpoint_every": 9}),
        ("--mode ssp --staleness 4", {"mode": "ssp:4"}),
        ("--mode -1", {"mode": "asp"}),
        ("--mode 3", {"mode": "ssp:3"}),
        ("--clip_norm 1.5", {"clip_norm": 1.5}),
        ("--norm-bound 1000", {"norm_bound": 1000.0}),
        ("--tls --link tcp", {"tls": True, "link": "tcp"}),
        ("--max-time 90", {"max_time_s": 90.0}),
        ("--max-time 1h30m", {"max_time_s": 5400.0}),
        ("--max_time 0.5d", {"max_time_s": 43200.0}),
        ("--max-updates 100", {"max_updates": 100}),
        ("--max-samples 100", {"max_samples": 100}),
        ("--", {}),
    ],
)
def test_run_spellings(invoke: Invoke, started: list[Job], typed: str, settings: dict[str, Any]) -> None:
    result = invoke("run", *typed.split(), "train.py")
    assert result.code == 0, result.err
    assert started == [Job(script="train.py", **settings)]


def test_script_keeps_its_own_spelling(invoke: Invoke, started: list[Job]) -> None:
    invoke("run", "train.py", "--weight_decay", "--help", "-h", "--version")
    assert started[0].args == ("--weight_decay", "--help", "-h", "--version")


def test_flag_of_ours_after_the_script(invoke: Invoke, started: list[Job]) -> None:
    result = invoke("run", "train.py", "--max_restarts=3", "--lr", "1", "--workers", "4")
    assert result.code == 0
    assert started[0].args == ("--max_restarts=3", "--lr", "1", "--workers", "4")
    assert result.err.splitlines()[:2] == [
        f"note: {flag} stands after train.py, so it goes to the script; "
        "if it is meant for Paceline, put it before train.py"
        for flag in ("--max-restarts", "--workers")
    ]


def test_no_hint_for_a_flag_that_both_got(invoke: Invoke, started: list[Job]) -> None:
    assert invoke("run", "--seed", "1", "train.py", "--seed", "2").err.startswith("\nSucceeded")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("train.pie", "script 'train.pie' does not exist (looked in"),
        ("trian.py", "Did you mean train.py?"),
        ("--workers 0 train.py", "workers=0 is too small: give at least 1"),
        ("--mode fast train.py", "mode 'fast': there is no such mode. Valid modes: bsp"),
        ("--mode ssp:-1 train.py", "at least 0, got '-1'"),
        ("--mode ssp train.py", "ssp needs a whole number"),
        ("--mode backup:4 -n 4 train.py", "needs at least 5 workers, got workers=4"),
        ("--staleness 3 train.py", "--staleness 3 goes with --mode ssp, got --mode bsp"),
        ("--staleness 3 --mode ssp:2 train.py", "Use --mode ssp:3, or leave --staleness out"),
        ("--mode asp --clip-norm 1 train.py", "got mode=asp"),
        ("--link udp train.py", "Valid: auto, shm, tcp"),
        ("--tls --link shm train.py", "tls protects TCP links, and link=shm"),
        ("--certs nowhere train.py", "certs 'nowhere' does not exist"),
        ("--optimizer Lamb train.py", "not of the form module:Class"),
        ("--deadline nan train.py", "deadline_s=nan"),
        ("--max-time soon train.py", "--max-time soon: give seconds"),
        ("--max-time 0s train.py", "max_time_s=0 is not a finite number above 0"),
        ("--max-updates 0 train.py", "max_updates=0 is too small"),
        ("python train.py", "leave it out, as in `paceline run train.py`"),
        (".", "is a directory"),
        ("--worker 3 train.py", "--workers"),
        ("--workers three train.py", "--workers"),
        ("", "Missing argument"),
    ],
)
def test_run_refuses(invoke: Invoke, started: list[Job], typed: str, said: str) -> None:
    result = invoke("run", *typed.split())
    assert result.code == 2
    assert said in " ".join(result.err.split())
    assert "Traceback" not in result.err
    assert started == []


def test_warnings_of_the_plan_are_notes(
    invoke: Invoke, started: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.plan.plan.available_cores", lambda: 2)
    assert "note: servers=3 share 2 cores" in invoke("run", "-s", "3", "train.py").err


def succeeded(tmp_path: Path) -> RunStatus:
    (tmp_path / "report.html").touch()
    return RunStatus(
        state="succeeded",
        run_id="20261115-081502-digits-4f2a",
        run_dir=str(tmp_path),
        elapsed_s=10.0,
        version=90,
        epoch=3,
        samples=4311,
        leases=[{"epoch": 3, "samples": 1437}],
        checkpoints=["version-000000000090"],
    )


def test_outcome_of_success(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "run_job", lambda *_, **__: succeeded(tmp_path))
    result = invoke("run", "train.py")
    assert result.code == 0
    assert "Succeeded after 10.0 s: 3 epochs, 90 updates, 431 samples/s." in result.err
    assert f"run directory  {tmp_path}\n" in result.err
    assert f"report         {tmp_path}/report.html\n" in result.err
    assert "paceline export 20261115-081502-digits-4f2a model.safetensors" in result.err
    assert result.out == "", "standard output is the script's"


def test_outcome_of_failure(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = succeeded(tmp_path)
    status.state = "failed"
    status.error = str(RoleFailed("worker:1", "ValueError: bad", "Traceback…\nValueError: bad"))
    monkeypatch.setattr(api, "run_job", lambda *_, **__: status)
    result = invoke("run", "train.py")
    assert result.code == 1
    assert "error: worker:1: ValueError: bad\nTraceback…\nValueError: bad\n" in result.err
    assert "Failed after 10.0 s" in result.err
    assert f"log            {tmp_path}/logs/worker-1.log\n" in result.err
    assert "to go on       paceline resume 20261115-081502-digits-4f2a" in result.err


@pytest.mark.parametrize(("state", "code"), [("stopped", 130), ("failed", 1), ("running", 1)])
def test_exit_codes(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, state: str, code: int) -> None:
    monkeypatch.setattr(api, "run_job", lambda *_, **__: RunStatus(state=state))
    assert invoke("run", "train.py").code == code


@pytest.mark.parametrize(
    ("state", "number", "code"),
    [
        ("stopped", signal.SIGINT, 130),
        ("stopped", signal.SIGTERM, 143),
        ("stopped", signal.SIGHUP, 129),
        ("failed", signal.SIGTERM, 1),
        ("succeeded", signal.SIGTERM, 0),
    ],
)
def test_the_exit_code_of_a_stopped_run_names_the_signal(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, state: str, number: int, code: int
) -> None:
    monkeypatch.setattr(api, "run_job", lambda *_, **__: RunStatus(state=state, stopped_by=number))
    assert invoke("run", "train.py").code == code


def test_the_exit_code_of_a_script_is_the_commands(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "run_job", lambda *_, **__: RunStatus(state="failed", error="x", exit_code=3))
    assert invoke("run", "train.py").code == 3


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CheckpointError("no checkpoint"), 1, "error: no checkpoint"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_errors_of_a_command(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(api, "run_job", fail)
    result = invoke("run", "train.py")
    assert (result.code, result.err.strip()) == (code, said)


# plan


FACTS = ModelFacts(
    parameters=61_706,
    nbytes=246_824,
    tensors=10,
    slices=5,
    samples=1437,
    batch_size=32,
    optimizer="SGD",
    shards=((2, 100_000), (2, 80_000), (1, 66_824)),
)


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        (
            "-n 4 -s 3",
            [
                "Plan for digits.py --epochs 3",
                "all wait for all: one update is the mean of 4 gradients",
                "61,706 parameters in 10 tensors, 247 kB; optimizer SGD",
                "5 slices on 3 servers; the fullest holds 1.22 × the mean",
                "1,437 samples per epoch in batches of 32: 12 steps per worker and epoch",
                "in place: 0 bytes moved per step",
                "one, at the end",
                "nobody waits longer than 5 min",
                "server:2 localhost 2 1 slice, 66.8 kB (27 %)",
                "worker:3 localhost 1 247 kB of gradients; reads parameters in place",
            ],
        ),
        (
            "--mode ssp:2 --checkpoint-every 50",
            ["247 kB copied per worker and step", "about 23 steps", "every 50 updates and at"],
        ),
        ("--link tcp", ["TCP: 494 kB sent per worker and step", "247 kB of parameters"]),
        ("--link tcp --tls", ["TCP under TLS 1.3 (certificates: made for the run): 494 kB sent"]),
        ("--compress topk", ["unix socket: 247 kB of gradients, compressed by topk:0.01"]),
        ("--overlap --link tcp", ["TCP: 494 kB sent per worker and step", "leave during"]),
        ("--mode asp --prefetch 3", ["unix socket: 494 kB sent", "awaited 3 steps later"]),
        ("-s 4", ["server:3 localhost 2 nothing: the model has too few slices"]),
    ],
)
def test_plan(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, typed: str, parts: list[str]) -> None:
    monkeypatch.setattr("paceline.plan.plan.available_cores", lambda: 2)
    plans: list[Plan] = []

    def inspect_script(plan: Plan) -> ModelFacts:
        plans.append(plan)
        return FACTS

    monkeypatch.setattr(api, "inspect_script", inspect_script)
    result = invoke("plan", *typed.split(), "digits.py", "--epochs", "3")
    assert result.code == 0, result.err
    assert plans[0].job.args == ("--epochs", "3")
    text = re.sub(r" +", " ", result.out.replace("\n", " ¶ "))
    for part in parts:
        assert part in text or part in re.sub(r"(¶| )+", " ", text)


def test_plan_of_a_stream(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ModelFacts(**{**vars(FACTS), "samples": None, "batch_size": None})
    monkeypatch.setattr(api, "inspect_script", lambda _: facts)
    assert "an iterable data set" in invoke("plan", "digits.py").out


def test_plan_refuses_like_run(invoke: Invoke) -> None:
    result = invoke("plan", "--mode", "backup:2", "train.py")
    assert result.code == 2
    assert "backup:2" in result.err


# certs


def test_certs_make_what_run_takes(invoke: Invoke, started: list[Job], tmp_path: Path) -> None:
    made = invoke("certs", "certs", "--run", "train", "--days", "2")
    assert made.code == 0, made.err
    assert made.out.splitlines() == [
        "Wrote ca.pem, controller.pem, server.pem, worker.pem and their keys to certs, for run train; good "
        "for 2 days.",
        "Keep ca.key to yourself: who has it can join the run in any role.",
    ]
    assert invoke("run", "--certs", "certs", "--link", "tcp", "train.py").err.startswith("\nSucceeded")
    assert (started[0].tls, started[0].certs) == (True, "certs")
    refused = invoke("run", "--certs", "certs", "--link", "tcp", "digits.py")
    assert refused.code == 2 and len(started) == 1
    assert "the certificates in certs name run 'train', and this run is 'digits'" in refused.err


def test_certs_refuse(invoke: Invoke, tmp_path: Path) -> None:
    for words, said in (
        (["--run", "a/b"], "run 'a/b' cannot stand in a certificate"),
        (["--run", "train", "--role", "boss"], "--role 'boss': there is no such role"),
        ([], "Missing option '--run'"),
    ):
        result = invoke("certs", "certs", *words)
        assert result.code == 2 and said in " ".join(result.err.split())
    assert not (tmp_path / "certs").exists()


# runs, logs, resume, export


def test_no_runs_yet(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("runs")
    assert result.code == 0
    assert result.out.startswith(f"No runs yet in {tmp_path / 'runs'}. Start one:")


def test_runs(invoke: Invoke, tmp_path: Path) -> None:
    old = make_run("succeeded", mode="ssp:3", workers=4, servers=2)
    broken = make_run("failed")
    (broken.path / "run.json").write_text("{")
    (broken.path / "status.json").write_text("{")
    result = invoke("runs")
    assert result.code == 0, result.err
    lines = {line.split()[0]: line.split()[1:] for line in result.out.splitlines()}
    assert lines["id"] == ["state", "mode", "w×s", "steps", "samples/s", "age"]
    assert lines[old.id][:5] == ["succeeded", "ssp:3", "4×2", "4,800", "300"]
    assert lines[broken.id][0] == "damaged"
    status = RunStatus.from_json(old.read_status())
    old.write_status(replace(status, samples=0, loader=False).to_json())
    assert "  1,600 steps/s  " in invoke("runs").out, "of a script without a prepared loader"


def test_runs_as_json(invoke: Invoke) -> None:
    assert json.loads(invoke("runs", "--json").out) == []
    old = make_run("failed", mode="asp", workers=3, args=("--lr", "0.1"))
    new = make_run("succeeded")
    (new.path / "run.json").write_text("{")
    listed = json.loads(invoke("runs", "--json").out)
    assert [run["id"] for run in listed] == [new.id, old.id]
    assert listed[0]["mode"] is None
    wanted = {"state": "failed", "script": "train.py", "args": ["--lr", "0.1"], "mode": "asp", "workers": 3}
    wanted |= {"updates": 1200, "samples": 900, "path": str(old.path), "created": old.record()["created"]}
    assert {name: listed[1][name] for name in wanted} == wanted


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_runs_in_a_narrow_terminal(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    run = make_run("succeeded", mode="downpour:10,10", script="a_rather_long_name_of_a_script.py")
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = CliRunner().invoke(app, ["runs"], env={"COLUMNS": str(width), "FORCE_COLOR": "1"})
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= width
    if width >= 60:
        assert len(lines) == 2 and lines[1].startswith(f"{run.id}  succeeded")
        assert "…" not in lines[1]
    assert ("samples/s" in lines[0]) == (width >= 120)


def test_runs_shows_the_newest(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        make_run()
    monkeypatch.setattr("paceline.cli.runs_command.SHOWN", 2)
    assert "… and 1 older: paceline runs --all" in invoke("runs").out
    assert "older" not in invoke("runs", "--all").out


@pytest.fixture
def logged(invoke: Invoke) -> RunDirectory:
    run = make_run()
    run.log_path("controller").write_text("placing\n")
    run.log_path("server", 0).write_text("ready\n")
    for rank in range(2):
        run.log_path("worker", rank).write_text(f"step 1 of {rank}\nlast without an end")
    return run


def test_logs_of_one(invoke: Invoke, logged: RunDirectory) -> None:
    for role in ("worker:1", "worker-1", "WORKER:1"):
        assert invoke("logs", logged.id, "--role", role).out == "step 1 of 1\nlast without an end\n"
    assert invoke("logs", "last", "--role", "controller").out == "placing\n"


def test_logs_of_all(invoke: Invoke, logged: RunDirectory) -> None:
    lines = invoke("logs", str(logged.path)).out.splitlines()
    assert lines[0] == "controller │ placing"
    assert lines[1] == "server:0   │ ready"
    assert lines[-1] == "worker:1   │ last without an end"
    assert len(invoke("logs", "last", "--role", "worker").out.splitlines()) == 4


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("worker:7", "has no log of worker:7 (--role worker:7). It has: controller, server:0"),
        ("boss", "--role boss: there is no such role. Valid: controller, server:N, worker:N"),
    ],
)
def test_logs_of_nobody(invoke: Invoke, logged: RunDirectory, role: str, said: str) -> None:
    result = invoke("logs", "last", "--role", role)
    assert result.code == 2
    assert said in result.err


def test_logs_followed_to_the_end(
    invoke: Invoke, logged: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = logged.log_path("worker", 1)
    path.write_text("one\ntw")
    news = ["o\nthree", "\n", "four\nend"]

    def pass_time(_: float) -> None:
        with path.open("a") as file:
            file.write(news.pop(0))

    monkeypatch.setattr(logs.time, "sleep", pass_time)
    monkeypatch.setattr(RunDirectory, "alive", lambda _: bool(news))
    result = invoke("logs", "last", "--role", "worker:1", "--follow")
    assert result.out.splitlines() == ["one", "two", "three", "four", "end"]


def test_logs_followed_from_before_they_exist(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("running")
    alive = [True, True]
    monkeypatch.setattr(RunDirectory, "alive", lambda _: bool(alive))

    def pass_time(_: float) -> None:
        alive.pop()
        run.log_path("worker", 0).write_text("late\n")

    monkeypatch.setattr(logs.time, "sleep", pass_time)
    assert invoke("logs", "last", "--role", "worker:0", "-f").out == "late\n"


def test_resume(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    calls: list[tuple[str, dict[str, Any], Path]] = []

    def resume_run(run: RunDirectory, overrides: Any, **_: Any) -> RunStatus:
        calls.append((run.id, overrides, Path.cwd()))
        return RunStatus(state="succeeded")

    monkeypatch.setattr(api, "resume_run", resume_run)
    result = invoke("resume", "last", "--servers", "3", "--mode", "ssp", "--staleness", "2")
    assert result.code == 0, result.err
    assert calls == [(run.id, {"servers": 3, "mode": "ssp:2"}, tmp_path)]
    assert result.err.startswith(f"note: working in {tmp_path}, where the run was started\n\nSucceeded")


def test_resume_changes_the_scripts_arguments_and_says_so(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(args=("--lr", "0.1", "--epochs", "10"))
    calls: list[dict[str, Any]] = []

    def resume_run(run: RunDirectory, overrides: Any, **_: Any) -> RunStatus:
        calls.append(overrides)
        return RunStatus(state="succeeded")

    monkeypatch.setattr(api, "resume_run", resume_run)
    result = invoke("resume", "last", "--servers", "3", "--", "--epochs", "20")
    assert calls == [{"servers": 3, "args": ("--lr", "0.1", "--epochs", "20")}]
    assert "change: --epochs 20 instead of --epochs 10. It gets: --lr 0.1 --epochs 20" in " ".join(
        result.err.split()
    )
    invoke("resume", "last", "--replace-args", "--", "--epochs", "20")
    assert calls[1] == {"args": ("--epochs", "20")}
    assert "are the same as before" in invoke("resume", "last", "--", "--lr", "0.1").err


def test_resume_refuses(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("resume", "last")
    assert (result.code, "holds no runs" in result.err) == (2, True)
    make_run("running")
    assert "is still going on (state running, controller: process" in invoke("resume", "last").err
    fitted = make_run(script=None)
    assert f"paceline.fit(…, resume='{fitted.id}')" in invoke("resume", fitted.id).err
    run = make_run()
    record = run.record() | {"directory": str(tmp_path / "gone")}
    (run.path / "run.json").write_text(json.dumps(record))
    assert "cannot be entered now: No such file" in invoke("resume", run.id).err


def test_export(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("succeeded")

    def export_run(run: RunDirectory, path: Path, model: int | None, *, say: Any) -> SimpleNamespace:
        path.write_bytes(bytes(2000))
        return SimpleNamespace(version=1200, meta={})

    monkeypatch.setattr(api, "export_run", export_run)
    result = invoke("export", "last", "model.safetensors")
    assert result.code == 0, result.err
    assert f"model.safetensors: the model of run {run.id} at version 1,200, 2 kB" in result.out
    result = invoke("export", "last", str(tmp_path))
    assert result.code == 2
    assert "is a directory; name a file" in result.err


# the command as a whole


def test_version_and_unknown_commands(invoke: Invoke) -> None:
    assert invoke("--version").out == f"paceline {paceline.__version__}\n"
    result = invoke("rum")
    assert result.code == 2
    assert "run" in result.err.replace("rum", "")


@pytest.mark.parametrize(
    "command", ["run", "plan", "study", "runs", "logs", "stop", "rm", "prune", "export", "completion"]
)
def test_help(invoke: Invoke, command: str) -> None:
    result = invoke(command, "--help")
    assert result.code == 0
    assert f"paceline {command}" in result.out


def process(*words: str, code: str = "", cwd: Path) -> subprocess.CompletedProcess[str]:
    start = code or "from paceline.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", start, *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PACELINE_RUNS": str(cwd / "runs"), "PYTHONPATH": str(SOURCE)},
    )


def test_real_process_refuses_without_a_traceback(tmp_path: Path) -> None:
    done = process("run", "nothing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (f"error: script 'nothing.py' does not exist (looked in {tmp_path})\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [["--help"], ["run", "nothing.py"], ["--version"]])
def test_starts_without_torch(words: list[str], tmp_path: Path) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print([m for m in ('torch', 'pandas', 'matplotlib', "
        "'paceline.api') if m in sys.modules]))\n"
        "from paceline.cli import main; main()"
    )
    done = process(*words, code=code, cwd=tmp_path)
    assert done.stdout.endswith("[]\n")
    assert "Traceback" not in done.stderr


def test_find_run_is_what_the_commands_use(invoke: Invoke) -> None:
    run = make_run()
    assert find_run(run.id[:12]).path == run.path
