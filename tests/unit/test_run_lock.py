"""Whose run it is: one process at a time, without a gap when it passes to the next."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.control.lock import RunLock
from paceline.control.rundir import RunDirectory
from paceline.exceptions import UsageError
from paceline.observe import RunStatus
from paceline.plan import Job


def test_one_holds_it_until_it_gives_it_back(tmp_path: Path) -> None:
    one, other = RunLock(tmp_path), RunLock(tmp_path)
    assert not one.held() and one.holder() is None
    assert one.take() and one.take()
    assert other.held() and other.holder() == os.getpid()
    assert not other.take()
    one.give_back()
    one.give_back()
    assert not other.held()
    assert other.take()
    other.give_back()


def test_who_looks_keeps_nobody_out(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.take()
    lock.give_back()
    looking = "import sys; from pathlib import Path; from paceline.control.lock import RunLock\n"
    looking += "lock = RunLock(Path(sys.argv[1])); print(flush=True)\nwhile not sys.stdin.closed: lock.held()"
    process = subprocess.Popen(
        [sys.executable, "-c", looking, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(200):
            assert lock.take()
            lock.give_back()
        process.kill()


def test_it_passes_to_who_has_its_descriptor(tmp_path: Path) -> None:
    one, heir, stranger = RunLock(tmp_path), RunLock(tmp_path), RunLock(tmp_path)
    one.take()
    assert one.descriptor is not None
    heir.inherit(os.dup(one.descriptor))
    one.give_back()
    assert stranger.held() and not stranger.take()
    heir.give_back()
    assert stranger.take()
    stranger.give_back()


def test_a_lock_that_is_forgotten_is_free(tmp_path: Path) -> None:
    RunLock(tmp_path).take()
    assert not RunLock(tmp_path).held()


def test_of_two_resumes_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path))
    job = Job(script="train.py")
    path = RunDirectory.create(job).path
    RunDirectory(path).write_status(RunStatus(state="stopped").to_json())
    one, other = RunDirectory(path), RunDirectory(path)
    monkeypatch.setattr(RunDirectory, "alive", lambda self: False)  # both looked before either began
    one.record_resume(job)
    with pytest.raises(UsageError, match=f"still going on .*controller: process {os.getpid()}"):
        other.record_resume(job)
    assert len(one.record()["resumes"]) == 1
    one.lock.give_back()


def test_a_run_without_a_controller_is_alive_while_somebody_holds_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path))
    run = RunDirectory.create(Job(script="train.py"))
    text = (run.path / "status.json").read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194305')
    (run.path / "status.json").write_text(text)
    assert run.state() == "crashed"
    run.own()
    assert run.state() == "pending" and run.controller_pid() == os.getpid()
    run.lock.give_back()
    assert run.state() == "crashed"
