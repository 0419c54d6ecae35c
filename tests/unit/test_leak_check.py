"""The leak check of conftest.py sees what it should, and only that."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil

WAIT_FOR_EVER = "import signal; signal.pause()"
ORPHAN = f"""
import subprocess, sys
command = [sys.executable, "-c", {WAIT_FOR_EVER!r}]
child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid)
"""


def test_nothing_left(snapshot) -> None:
    before = snapshot.take()
    subprocess.run([sys.executable, "-c", ""], check=True)
    thread = threading.Thread(target=lambda: None)
    thread.start()
    assert before.leaks() == []


def test_child_is_named_and_ended(snapshot) -> None:
    before = snapshot.take()
    child = subprocess.Popen([sys.executable, "-c", WAIT_FOR_EVER])
    [leak] = before.leaks(patience_s=0.1)
    assert f"process {child.pid} " in leak
    assert WAIT_FOR_EVER in leak
    assert child.wait(timeout=0) is not None


def test_orphan_is_named_and_ended(snapshot) -> None:
    before = snapshot.take()
    parent = subprocess.run([sys.executable, "-c", ORPHAN], check=True, stdout=subprocess.PIPE)
    orphan = psutil.Process(int(parent.stdout))
    [leak] = before.leaks(patience_s=0.1)
    assert f"process {orphan.pid} " in leak
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_child_of_the_forkserver_is_named_and_the_forkserver_is_not(snapshot) -> None:
    before = snapshot.take()
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=signal.pause)
    child.start()
    [leak] = before.leaks(patience_s=0.1)
    assert f"process {child.pid} " in leak
    child.join(timeout=5)
    assert child.exitcode is not None
    child.close()


def test_child_that_is_ending_is_waited_for(snapshot) -> None:
    before = snapshot.take()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.close()
    assert before.leaks() == []
    child.wait()


def test_thread_is_named(snapshot) -> None:
    before = snapshot.take()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="left-over")
    thread.start()
    assert before.leaks(patience_s=0.01) == ["thread left-over"]
    done.set()
    thread.join()


def test_file_is_named_unless_a_stranger_holds_it(snapshot, tmp_path: Path) -> None:
    before = snapshot.take(shm=tmp_path)
    file = tmp_path / "segment"
    file.touch()
    assert before.leaks(patience_s=0.01) == [f"file {file}"]
    with file.open() as held:
        assert before.leaks(patience_s=0.01) == [f"file {held.name}"], "held by ourselves is still ours"
    # A stranger is no descendant of this process and does not carry its mark.
    environment = {key: value for key, value in os.environ.items() if key != "PACELINE_TEST_PROCESS"}
    code = f"""
import subprocess, sys
held = open({str(file)!r})
code = "import sys; print(flush=True); sys.stdin.read()"
subprocess.Popen([sys.executable, "-c", code], pass_fds=[held.fileno()], start_new_session=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.wait()
        parent.stdout.readline()
        assert before.leaks() == []
        parent.stdin.close()
        parent.stdout.read()
    assert before.leaks(patience_s=0.01) == [f"file {file}"]
