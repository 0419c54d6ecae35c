"""Other users of the host: what they plant is not run, not read unasked, and leads nowhere."""

import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import paceline
from paceline.api import studies
from paceline.api.runs import load_run
from paceline.cli.app import app
from paceline.comm.meeting import accept
from paceline.control import run_owner
from paceline.control.known_runs import find_run, list_runs
from paceline.control.rundir import RunDirectory
from paceline.exceptions import AuthError, PlanError, RunNotFound, UsageError
from paceline.observe import RunStatus, WorkerStatus
from paceline.plan import Job
from tests.links import SECRET
from tests.second_user import MALLORY, NAME, acting_as, give, needs_root, open_to_others, shared_place

SOURCE = Path(paceline.__file__).parents[1]


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_place() as path:
        yield path


@pytest.fixture
def root(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs directory that all users share, as /tmp is shared."""
    path = place / "runs"
    path.mkdir()
    path.chmod(0o1777)
    monkeypatch.setenv("PACELINE_RUNS", str(path))
    return path


def make(state: str = "stopped", **settings: Any) -> RunDirectory:
    run = RunDirectory.create(Job(**{"script": "train.py", **settings}))
    status = RunStatus(state=state, version=12, samples=90, elapsed_s=3.0)
    status.workers = {0: WorkerStatus(rank=0, clock=24)}
    run.write_status(status.to_json())
    return run


def plant(root: Path, name: str = "20991231-235959-train-ffff", script: str = "/tmp/evil.py") -> Path:
    """A run of the second user, which looks newer than all others."""
    with acting_as(MALLORY):
        before = set(root.iterdir())
        run = make(script=script)
        (path,) = set(root.iterdir()) - before
        record = json.loads((path / "run.json").read_text())
        record |= {"id": name, "created": "2099-12-31T23:59:59+00:00"}
        (path / "run.json").write_text(json.dumps(record))
        # Readable by all, so that nothing but the rule stands in the way.
        for each in [path, *path.rglob("*")]:
            each.chmod(0o755 if each.is_dir() else 0o644)
        assert run.path == path
        return path.rename(root / name)


def call(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


# A shared runs directory


@needs_root
def test_last_is_one_s_own(root: Path) -> None:
    mine = make()
    plant(root)
    assert find_run("last").path == mine.path
    assert [run.id for run in list_runs()] == [mine.id]
    shutil.rmtree(mine.path)
    with pytest.raises(RunNotFound, match="no run to take the last of"):
        find_run("last")
    with pytest.raises(RunNotFound):
        find_run("last", trust=True)


COMMANDS = [
    *(("resume", "RUN"), ("export", "RUN", "x.pt"), ("report", "RUN"), ("compare", "RUN", "last")),
    *(("metrics", "RUN"), ("logs", "RUN"), ("top", "RUN", "--once"), ("trace", "RUN", "x.json")),
    *(("stop", "RUN"), ("switch", "RUN", "asp"), ("scale", "RUN", "--workers", "2"), ("rm", "RUN")),
]


@needs_root
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_every_command_refuses_what_another_user_owns(root: Path, words: tuple[str, ...]) -> None:
    make()
    planted = plant(root)
    for name in (planted.name, planted.name[:8], str(planted)):
        result = call(*(name if word == "RUN" else word for word in words))
        assert result.exit_code == 2, result.output
        assert f"belongs to user {NAME}" in result.stderr and "--trust uses it" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert planted.is_dir()
    command: Any = typer.main.get_command(app)
    assert "--trust" in {flag for param in command.commands[words[0]].params for flag in param.opts}


@needs_root
def test_with_trust_it_is_used(root: Path) -> None:
    planted = plant(root)
    assert find_run(planted.name, trust=True).path == planted
    assert call("top", planted.name, "--once", "--trust").exit_code == 0
    assert load_run(str(planted), trust=True).status.version == 12
    with pytest.raises(UsageError, match=NAME):
        load_run(str(planted))
    assert call("rm", planted.name, "--trust").exit_code == 0
    assert not planted.exists()


@needs_root
def test_runs_lists_those_of_others_when_it_is_asked_to(root: Path) -> None:
    mine = make()
    planted = plant(root)
    said = call("runs").stdout
    assert mine.id in said and planted.name not in said
    assert "… and 1 run of another user: paceline runs --everyone" in said
    lines = [line.split() for line in call("runs", "--everyone").stdout.splitlines()]
    assert lines[0][:3] == ["id", "user", "state"]
    assert lines[2][:4] == [planted.name, *NAME.split(), "stopped"]
    listed = json.loads(call("runs", "--json", "--everyone").stdout)
    assert [(run["id"], run["owner"]) for run in listed] == [(mine.id, None), (planted.name, NAME)]
    assert [run["id"] for run in json.loads(call("runs", "--json").stdout)] == [mine.id]


@needs_root
def test_prune_removes_nothing_of_others(root: Path) -> None:
    mine, planted = make(), plant(root)
    result = call("prune", "--keep", "0", "--state", "stopped", "--yes")
    assert result.exit_code == 0, result.output
    assert not mine.path.exists() and planted.is_dir()


@needs_root
def test_a_run_of_another_user_takes_no_name_of_one_s_own(root: Path, place: Path) -> None:
    """Neither an id, nor the beginning of one."""
    mine = make(run_dir=str(place / "mine"))
    other = plant(root, name=f"{mine.id[:8]}-zzz")
    record = json.loads((other / "run.json").read_text()) | {"id": mine.id}
    (other / "run.json").write_text(json.dumps(record))
    give(other / "run.json")
    assert find_run(mine.id).path == mine.path
    assert find_run(mine.id[:8]).path == mine.path


@needs_root
def test_a_link_of_another_user_is_not_followed(root: Path, place: Path) -> None:
    elsewhere = place / "elsewhere"
    shutil.move(make().path, elsewhere)
    os.symlink(elsewhere, root / "20991231-235959-train-ffff")
    give(root / "20991231-235959-train-ffff")
    assert list_runs(everyone=True) == []


@needs_root
def test_a_run_whose_record_another_user_wrote_is_not_one_s_own(root: Path) -> None:
    run = make()
    give(run.path / "run.json")
    with pytest.raises(UsageError, match=f"has a run.json of user {NAME}"):
        find_run(run.id)


def test_a_run_that_every_user_can_write_is_not_one_s_own(root: Path) -> None:
    run = make()
    run.path.chmod(0o777)
    with pytest.raises(UsageError, match=r"can be written by every user \(mode 0777; `chmod go-w`"):
        find_run(run.id)
    assert call("runs").stdout.startswith("No runs yet")
    assert find_run(run.id, trust=True).path == run.path
    run.path.chmod(0o755)
    assert find_run("last").path == run.path


@needs_root
def test_the_second_user_has_runs_of_its_own(root: Path) -> None:
    """The rule is about who asks, and not about root."""
    mine = make()
    with acting_as(MALLORY):
        theirs = make()
        assert find_run("last").path == theirs.path
        with pytest.raises(UsageError, match="belongs to user root"):
            find_run(mine.id)
        lines = [line.split()[:3] for line in call("runs", "--everyone").stdout.splitlines()]
        assert lines[1:] == [[theirs.id, "stopped", "bsp"], [mine.id, "root", "private"]]


@needs_root
def test_a_resume_of_last_starts_nothing_of_another_user(root: Path, place: Path) -> None:
    """The attack itself, with real commands: the planted run's script leaves a mark when it runs."""
    mark, script = place / "owned", place / "evil.py"
    script.write_text(f"open({str(mark)!r}, 'w')\n")
    planted = plant(root, script=str(script))
    for words in (["resume", "last"], ["resume", planted.name]):
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *words],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "PACELINE_RUNS": str(root)},
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert not mark.exists()


# --run-dir


@needs_root
def test_a_directory_of_another_user_is_no_run_directory(root: Path, place: Path) -> None:
    theirs = place / "theirs"
    theirs.mkdir()
    give(theirs)
    with pytest.raises(PlanError, match=f"theirs belongs to user {NAME}. Set by --run-dir"):
        make(run_dir=str(theirs))
    assert list(theirs.iterdir()) == []


@needs_root
def test_a_link_that_another_user_planted_is_no_run_directory(root: Path, place: Path) -> None:
    """As in /tmp, where names can be guessed: it leads into a directory of one's own."""
    precious = place / "precious"
    precious.mkdir()
    (place / "out").symlink_to(precious)
    give(place / "out")
    with pytest.raises(PlanError, match=f"out is a link of user {NAME}"):
        make(run_dir=str(place / "out"))
    assert list(precious.iterdir()) == []


def link_to_a_file(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def second_name(path: Path, victim: Path) -> None:
    os.link(victim, path)


def link_to_a_directory(path: Path, victim: Path) -> None:
    path.symlink_to(victim.parent)


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "planted"),
    [
        *((name, link_to_a_file) for name in ("lock", "events.jsonl", "pushes.csv", "status.json")),
        *((name, second_name) for name in ("lock", "events.jsonl", "pushes.csv", "report.html")),
        *((name, link_to_a_directory) for name in ("logs", "checkpoints", "raw", "requests")),
        *((name, pipe) for name in ("lock", "events.jsonl", "spans.parquet", "logs", "control.json")),
    ],
)
@pytest.mark.parametrize("again", [False, True], ids=["new", "resumed"])
def test_nothing_in_a_run_directory_leads_elsewhere(
    root: Path, place: Path, name: str, planted: Callable[[Path, Path], None], again: bool
) -> None:
    victim = place / "secret" / "victim"
    victim.parent.mkdir()
    victim.write_text("precious")
    mine = place / "mine"
    if again:
        run = make(run_dir=str(mine))
        path = mine / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    else:
        mine.mkdir()
    planted(mine / name, victim)
    with pytest.raises(PlanError, match=f"holds '{name}', which (is a link|is neither|has a second name)"):
        run.record_resume(run.read_job()) if again else make(run_dir=str(mine))
    assert victim.read_text() == "precious" and list(victim.parent.iterdir()) == [victim]


@needs_root
def test_a_file_that_another_user_planted_is_not_used(root: Path, place: Path) -> None:
    mine = place / "mine"
    mine.mkdir(mode=0o700)
    (mine / "control.json").write_text("{}")
    give(mine / "control.json")
    with pytest.raises(PlanError, match=f"holds 'control.json', which belongs to user {NAME}"):
        make(run_dir=str(mine))


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("mode", [None, 0o700, 0o755, 0o775, 0o777])
def test_no_other_user_can_read_or_write_a_run(root: Path, place: Path, umask: int, mode: int | None) -> None:
    mine = place / "deep" / "mine"
    before = os.umask(umask)
    try:
        if mode is not None:
            mine.mkdir(parents=True)
            mine.chmod(mode)
            mine.parent.chmod(0o755)
        run = make(run_dir=str(mine))
        run.append_event({"kind": "note", "text": "secret"})
        run.record_resume(run.read_job())
        run.lock.give_back()
    finally:
        os.umask(before)
    assert open_to_others(mine) == []
    kept = 0o700 if mode is None else mode & ~0o022
    assert stat.S_IMODE(mine.stat().st_mode) == kept
    assert not mine.parent.stat().st_mode & 0o022
    if mode is None or mode == 0o700:
        return
    assert find_run("last").path == mine


def test_the_directories_above_are_not_writable_by_others(place: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_RUNS", str(place / "a" / "b" / "runs"))
    before = os.umask(0)
    try:
        make()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((place / name).stat().st_mode) for name in ("a", "a/b", "a/b/runs")]
    assert modes == [0o755, 0o755, 0o700]


# Studies


@needs_root
def test_a_study_of_another_user_is_refused(root: Path, place: Path, monkeypatch: Any) -> None:
    (place / "train.py").write_text("")
    monkeypatch.chdir(place)
    study = place / "study"
    study.mkdir()
    job = Job(script="train.py").to_json()
    plan = {
        "job": job,
        "grid": [],
        "seeds": [0],
        "seed_argument": None,
        "directory": str(place),
        "trials": [],
    }
    (study / "study.json").write_text(json.dumps(plan))
    give(study)
    for words in (("--resume", str(study)), ("--dir", str(study), "train.py")):
        result = call("study", *words)
        assert result.exit_code == 2 and f"the study ({study}) belongs to user {NAME}" in result.stderr
    with pytest.raises(UsageError, match=NAME):
        studies.load_study(study)
    assert studies.load_study(study, trust=True).trials == []


# Sockets


@needs_root
def test_another_user_cannot_connect_by_unix_socket() -> None:
    """A real one: the kernel says who it is."""
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as peer:
        listening.bind(f"\0paceline-test-{secrets.token_hex(8)}")
        listening.listen()
        with acting_as(MALLORY):
            peer.connect(listening.getsockname())
        near, _ = listening.accept()
        with near, pytest.raises(AuthError, match=f"{MALLORY}.* may not connect to a role of user 0"):
            accept(near, SECRET)
        assert peer.recv(1) == b"", "it is told nothing"


def test_a_user_without_a_name_is_a_number() -> None:
    assert run_owner.user_name(0) == "root"
    assert run_owner.user_name(MALLORY) == NAME
