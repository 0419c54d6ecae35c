"""The run directory: made once, found by any name a user would try, honest about who is alive."""

import json
import os
import shutil
import stat
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.control import rundir
from paceline.control.known_runs import find_run, list_runs
from paceline.control.rundir import RunDirectory, runs_root
from paceline.exceptions import PlanError, RunNotFound, UsageError
from paceline.observe import RunStatus
from paceline.plan import Job, make_plan


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def make(name: str = "digits.py", **settings: Any) -> RunDirectory:
    return RunDirectory.create(Job(script=name, **settings), command=["paceline", "run", name])


def end(run: RunDirectory, state: str = "succeeded") -> None:
    run.write_status(RunStatus(state=state).to_json())


def test_created(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(workers=3, mode="asp")
    run = RunDirectory.create(job, plan=make_plan(job), command=["python", "x.py"])
    assert run.path.parent == root
    assert rundir.re.fullmatch(r"\d{8}-\d{6}-fit-[0-9a-f]{4}", run.id)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    record = json.loads((run.path / "run.json").read_text())
    assert record["id"] == run.id
    assert record["command"] == ["python", "x.py"]
    assert record["versions"]["torch"]
    assert record["plan"]["mode"] == "asp"
    assert run.read_job() == job
    assert run.started_in == tmp_path
    assert run.checkpoints_path.is_dir()
    assert run.read_status()["state"] == "pending"


@pytest.mark.parametrize(
    ("script", "part"),
    [("a/Träin Me!.py", "-tr-in-me-"), ("../" + "x" * 60, "-" + "x" * 24 + "-"), ("°.py", "-run-")],
)
def test_id_is_a_plain_name(script: str, part: str) -> None:
    run = make(script)
    assert part in run.id
    assert rundir.re.fullmatch(r"[a-z0-9-]+", run.id)


def test_own_directory_is_listed_too(tmp_path: Path, root: Path) -> None:
    chosen = tmp_path / "deep" / "mine"
    run = make(run_dir=str(chosen))
    assert run.path == chosen
    assert (root / run.id).resolve() == chosen
    assert [each.id for each in list_runs()] == [run.id]
    assert find_run(run.id).path == chosen
    assert find_run(str(chosen)).id == run.id


def test_last_is_who_started_last_whatever_its_directory_is_called(root: Path, tmp_path: Path) -> None:
    plain = make()
    inside = make("zebra.py", run_dir=str(root / "aaa"))
    outside = make(run_dir=str(tmp_path / "mine"))
    latest = make("aardvark.py", run_dir=str(root / "zzz"))
    # As versions before this one did: a link beside the directory itself.
    if not (root / inside.id).exists():
        (root / inside.id).symlink_to(inside.path)
    runs = list_runs()
    assert [run.id for run in runs] == [latest.id, outside.id, inside.id, plain.id]
    assert find_run("last").path == latest.path
    assert find_run(inside.id).path == inside.path
    shutil.copytree(plain.path, root / "copy")
    assert {run.id for run in list_runs()} == {run.id for run in runs} | {"copy"}
    assert find_run(plain.id).path == plain.path


def test_own_directory_with_a_run_is_refused(tmp_path: Path) -> None:
    make(run_dir=str(tmp_path / "mine"))
    with pytest.raises(UsageError, match="already holds a run .*paceline resume .*mine"):
        make(run_dir=str(tmp_path / "mine"))


def test_own_directory_may_hold_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert make(run_dir=str(tmp_path / "mine")).path.is_dir()
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_unwritable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written: Not a directory.*--run-dir"):
        make(run_dir=str(tmp_path / "file" / "run"))
    with pytest.raises(PlanError, match="cannot be written: File exists"):
        make(run_dir=str(tmp_path / "file"))


def test_no_permission_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PlanError, match=r"Permission denied .*Set by \$PACELINE_RUNS"):
        make()


def test_full_disk_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(PlanError, match="has 5,000 bytes free; a run needs at least 100,000,000"):
        make()
    assert not root.exists()


def test_log_paths_in_order() -> None:
    run = make()
    for role, rank in [("worker", 10), ("worker", 2), ("server", 0), ("controller", None)]:
        run.log_path(role, rank).write_text("x")
    (run.logs_path / "notes.log").write_text("not a role's")
    assert list(run.log_paths()) == ["controller", "server:0", "worker:2", "worker:10"]
    assert run.log_path("worker", 2).name == "worker-2.log"


def test_events_from_several_threads() -> None:
    run = make()
    threads = [
        threading.Thread(target=lambda: [run.append_event({"n": n}) for n in range(20)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"n": 1')
    events = run.read_events()
    assert len(events) == 80
    assert set(events[0]) == {"at", "n"}


def test_alive_while_its_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()
    run.write_status(RunStatus(state="running").to_json())
    assert run.alive()
    assert run.state() == "running"
    end(run)
    assert not run.alive()
    assert run.state() == "succeeded"


@pytest.mark.parametrize(
    "controller",
    [
        {"pid": os.getpid(), "started": 1.0},
        {"pid": 2**22 + 1, "started": 1.0},
        {"pid": "x"},
        {},
        None,
    ],
)
def test_not_alive_when_somebody_else_has_its_number(controller: object) -> None:
    run = make()
    status = run.read_status() | {"state": "running", "controller": controller}
    (run.path / "status.json").write_text(json.dumps(status))
    assert not run.alive()
    assert run.state() == "crashed"


def test_status_cut_short() -> None:
    run = make()
    (run.path / "status.json").write_text("{")
    assert run.read_status() == {}
    assert run.state() == "damaged"


def test_status_names_its_process() -> None:
    run = make()
    run.write_status({"state": "running"})
    controller = run.read_status()["controller"]
    assert controller == {"pid": os.getpid(), "started": psutil.Process().create_time()}


def test_resume_is_recorded() -> None:
    run = make(workers=2)
    with pytest.raises(UsageError, match="is still going on"):
        run.record_resume(run.read_job())
    end(run, "stopped")
    run.record_resume(Job(script="digits.py", workers=5), command=["paceline", "resume"])
    assert run.read_job().workers == 5
    assert run.state() == "pending"
    (before,) = run.record()["resumes"]
    assert before["job"]["workers"] == 2
    assert before["command"] == ["paceline", "run", "digits.py"]
    assert run.record()["command"] == ["paceline", "resume"]


def test_a_run_that_is_older_than_todays_defaults_keeps_its_rule() -> None:
    run = make(mode="asp", schedule=("50=ssp:2", "90=bsp"))
    assert (run.read_job().mode, run.read_job().schedule) == ("asp", ("50=ssp:2", "90=bsp"))
    record = run.record()
    del record["mode_defaults"]
    (run.path / "run.json").write_text(json.dumps(record))
    job = run.read_job()
    assert job.mode == "asp+damping=none"
    assert job.schedule == ("50=ssp:2+damping=none", "90=bsp")
    end(run, "stopped")
    run.record_resume(job)
    assert run.read_job() == job, "as it is from now on"


def test_newest_first_and_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ["20260101-000000-a-0001", "20260301-000000-b-0002", "20260301-000000-c-0003"]
    for run_id in ids:
        monkeypatch.setattr(rundir, "_new_id", lambda _, run_id=run_id: run_id)
        make()
    (root / ids[1] / "run.json").touch()  # as a resume does: it was started when it was
    (root / "not-a-run").mkdir()
    (root / "gone").symlink_to(root / "nowhere")
    assert [run.id for run in list_runs()] == [ids[2], ids[1], ids[0]]
    assert find_run("last").id == ids[2]
    assert find_run("20260101").id == ids[0]
    assert find_run(ids[1]).id == ids[1]
    with pytest.raises(RunNotFound, match="beginning of 2 runs: .*c-0003, .*b-0002.*last"):
        find_run("20260301")
    with pytest.raises(RunNotFound, match="no run 'b-0002'.*Did you mean 20260301-000000-b-0002"):
        find_run("b-0002")
    with pytest.raises(RunNotFound, match="The newest is .*c-0003. `paceline runs` lists all 3"):
        find_run("zzz")
    with pytest.raises(RunNotFound, match="no run.json"):
        find_run(str(root))
    with pytest.raises(RunNotFound):
        find_run("")


@pytest.mark.parametrize("text", ["last", "digits"])
def test_no_runs_at_all(text: str, root: Path) -> None:
    with pytest.raises(RunNotFound, match="holds no runs. Start one with `paceline run`"):
        find_run(text)
    assert list_runs() == []


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_broken_record(text: str) -> None:
    run = make()
    (run.path / "run.json").write_text(text)
    with pytest.raises(UsageError, match="is not a run directory that can be read"):
        run.read_job()


def test_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_RUNS")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runs_root() == tmp_path / ".paceline" / "runs"
