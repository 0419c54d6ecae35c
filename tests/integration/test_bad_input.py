"""Bad input: one clear message (what, who, which setting, what to do), a non-zero exit, nothing left."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.comm import Address, connect, new_secret
from paceline.control import Controller, RunDirectory
from paceline.exceptions import AuthError, PlanError, UsageError
from paceline.observe import RunStatus
from paceline.plan import Job, make_plan

MODEL = """
def prepared(samples=16, width=2, **loader):
    model = nn.Linear(4, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(samples, 4, generator=torch.Generator().manual_seed(1)),
                         torch.arange(samples) % 2)
    return paceline.prepare(model, optimizer, DataLoader(data, batch_size=4, **loader))

def train(objects, epochs=2, loss_of=nn.functional.cross_entropy):
    model, optimizer, loader = objects
    for epoch in range(epochs) if isinstance(epochs, int) else epochs:
        for x, y in loader:
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def assert_failed(ran: Any, *parts: str) -> None:
    """It failed with one message that has all these parts, and no traceback through our own files."""
    assert ran.status.state == "failed"
    for part in parts:
        assert part in ran.error
    assert "/paceline/" not in ran.error
    assert ran.status.error == ran.error


# --- settings, on the command line ------------------------------------------------------------------


def command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`paceline ARGS` as a user would run it."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PACELINE_RUNS": str(cwd / "runs"), "COLUMNS": "200"},
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--mode", "fast", "x.py"), "mode 'fast': there is no such mode. Valid modes: bsp, "),
        (("--mode", "ssp:-1", "x.py"), "mode 'ssp:-1': ssp needs a whole number of at least 0, got '-1'"),
        (
            ("--mode", "backup:4", "--workers", "4", "x.py"),
            "mode backup:4 goes on without the slowest 4, so it needs at least 5 workers, got workers=4",
        ),
        (("--workers", "0", "x.py"), "workers=0 is too small: give at least 1"),
        (("gone.py",), "script 'gone.py' does not exist (looked in "),
        (("--deadline", "0", "x.py"), "deadline_s=0 is not a finite number above 0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_before_anything_starts(tmp_path, args, message):
    (tmp_path / "x.py").write_text("")
    done = command("run", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_a_script_that_raises_is_one_error_with_its_traceback_and_no_line_of_ours(tmp_path):
    (tmp_path / "bad.py").write_text('print("here we go")\nraise RuntimeError("not today")\n')
    done = command("run", "--workers", "2", "bad.py", cwd=tmp_path)
    assert done.returncode == 1
    output = done.stdout + done.stderr
    assert "here we go" in done.stdout
    assert "RuntimeError: not today\nTraceback (most recent call last):" in done.stderr
    assert f'File "{tmp_path}/bad.py", line 2, in <module>' in done.stderr
    assert output.count("Traceback") == 1
    assert "/paceline/" not in output and "runpy" not in output
    assert done.stderr.count("error: worker:") == 1
    assert "logs/worker-" in done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert RunDirectory(run).state() == "failed"


# --- the run directory ------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """mount(options): a file system of its own; needs root."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = []

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True)
        if done.returncode:
            pytest.skip("mounting needs root")
        mounted.append(path)
        return path

    yield mount
    for each in mounted:
        subprocess.run(["umount", "--lazy", each], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("size=1m", "bytes free; a run needs at least 100,000,000"),
        ("size=200m,ro", "cannot be written: Read-only file system"),
    ],
)
def test_a_run_directory_without_space_or_permission_is_refused(
    tmp_path, monkeypatch, disk, options, message
):
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    path = disk(options)
    with pytest.raises(PlanError) as refused:
        RunDirectory.create(Job(script="x.py", run_dir=str(path / "run")))
    assert message in str(refused.value)
    assert f"Set by --run-dir {path / 'run'}" in str(refused.value)
    assert list(path.iterdir()) == []


def test_a_run_directory_below_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="cannot be written: Not a directory .*--run-dir"):
        RunDirectory.create(Job(script="x.py", run_dir=str(tmp_path / "file" / "run")))


def test_a_run_directory_that_holds_a_run_is_refused(run):
    ran = run(MODEL + "train(prepared())", workers=1, threads=1)
    with pytest.raises(UsageError, match="already holds a run .*paceline resume"):
        RunDirectory.create(Job(script="x.py", run_dir=str(ran.run.path)))


# --- scripts ----------------------------------------------------------------------------------------


def test_more_workers_than_samples(run):
    ran = run(MODEL + "train(prepared(samples=3))", workers=4, threads=1)
    assert_failed(ran, "4 workers but only 3 samples", "Use fewer --workers or more data")


def test_a_script_with_a_syntax_error_shows_the_line(run):
    ran = run("x = (\n", workers=2)
    assert_failed(ran, "SyntaxError", "script0.py", "x = (")


def test_a_script_that_raises_on_one_worker_names_it_although_the_others_wait_at_the_gate(run):
    ran = run(MODEL + "if RANK == 1:\n    1 / 0\ntrain(prepared())", workers=3)
    assert_failed(ran, "worker:1: ZeroDivisionError: division by zero", "    1 / 0")


def test_a_script_that_never_calls_prepare(run):
    ran = run("pass", workers=2)
    assert_failed(ran, "paceline.prepare(", "UsageError")


def test_a_script_that_never_calls_prepare_on_one_worker_does_not_leave_the_others_waiting(run):
    ran = run(MODEL + "if RANK == 0:\n    train(prepared())", workers=2)
    assert_failed(ran, "worker:1: UsageError", "without calling paceline.prepare(")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_another_model_on_one_worker_shows_the_first_difference(run, odd):
    ran = run(MODEL + f"train(prepared(width=3 if RANK == {odd} else 2))", workers=3, servers=2)
    assert_failed(ran, "LayoutMismatch", "prepared another model than worker:0", "weight", "(3, 4)", "(2, 4)")


def test_another_optimizer_or_another_loader_on_one_worker_is_shown_too(run):
    ran = run(MODEL + "train(prepared(samples=16 + RANK))", workers=2)
    assert_failed(ran, "worker:1: LayoutMismatch", "the loader gives", "'samples': 17", "'samples': 16")


def test_prepare_called_twice_with_a_loader_each(run):
    ran = run(MODEL + "prepared()\nprepared()", workers=1, threads=1)
    said = "prepare() got 2 models, 2 optimizers and 2 loaders, in all its calls together"
    assert_failed(ran, f"worker:0: UsageError: {said}")


@pytest.mark.parametrize("mode", ["bsp", "ssp:1", "asp"])
def test_a_nan_loss_is_refused_counted_and_reported_and_the_run_goes_on(run, mode):
    source = """
def loss_of(output, target):
    loss = nn.functional.cross_entropy(output, target)
    try:
        os.close(os.open(RUN_DIR / "fired", os.O_CREAT | os.O_EXCL))
        return loss * float("nan")
    except FileExistsError:
        return loss
train(prepared(samples=32), loss_of=loss_of)
"""
    ran = run(MODEL + source, workers=2, servers=2, mode=mode)
    assert (ran.run.path / "fired").exists()
    assert ran.error is None
    assert ran.status.refused == 1
    first, second = ran.status.leases[:2]
    assert (first["applied"] + first["refused"], second["applied"]) == (32, 32)
    assert first["refused"] == 4
    assert re.search(r"worker:[01] pushed NaN or Inf at step 1: refused", ran.log("server", 0))
    assert all(bool(t.isfinite().all()) for t in ran.model.values())


def test_in_backup_mode_a_nan_is_refused_or_comes_too_late(run):
    source = "train(prepared(), loss_of=lambda o, t: o.sum() * float('nan'))"
    ran = run(MODEL + source, workers=2, mode="backup:1")
    assert ran.error is None
    assert ran.status.refused >= 1
    assert [a["refused"] for a in ran.status.leases[:2]] == [16, 16]
    assert all(bool(t.isfinite().all()) for t in ran.model.values())


def test_a_script_whose_every_loss_is_nan_ends_and_its_model_is_as_it_began(run):
    ran = run(MODEL + "train(prepared(), loss_of=lambda o, t: o.sum() * float('nan'))", workers=2)
    assert ran.error is None
    assert ran.status.refused == 8
    assert [a["refused"] for a in ran.status.leases[:2]] == [16, 16]
    assert all(bool(t.isfinite().all()) for t in ran.model.values())


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_leaving_the_last_epochs_loop_early_is_no_error(run, mode):
    """A limit on the steps is common; who is through first must not fail the others."""
    source = """
import time
model, optimizer, loader = prepared(samples=64)
for step, (x, y) in enumerate(loader):
    if step == 4:
        break
    nn.functional.cross_entropy(model(x), y).backward()
    if RANK == 1 and step == 3:
        while not (RUN_DIR / "first is through").exists():
            time.sleep(0.001)
    optimizer.step()
    optimizer.zero_grad()
    if RANK == 0 and step == 1:
        (RUN_DIR / "first is through").touch()
"""
    ran = run(MODEL + source, workers=2, mode=mode, deadline_s=10)
    assert ran.error is None
    assert ran.status.samples == 32


@pytest.mark.parametrize(
    ("ending", "message", "code"),
    [
        ("sys.exit(3)", "exited with code 3", 3),
        ("sys.exit('out of luck')", "exited with code 1: out of luck", 1),
        ("os._exit(0)", "exited with code 0 without saying why; look at its log.", 0),
    ],
)
def test_a_worker_that_exits_in_the_middle_is_named_with_its_code(run, ending, message, code):
    source = f"""
def loss_of(output, target):
    if RANK == 1:
        {ending}
    return nn.functional.cross_entropy(output, target)
train(prepared(), loss_of=loss_of)
"""
    ran = run(MODEL + source, workers=2)
    assert_failed(ran, "worker:1: ", message)
    assert ran.status.exit_code == code
    assert ("out of luck\n" in ran.run.log_path("worker", 1).with_suffix(".err").read_text()) == (code == 1)


def test_scripts_that_end_with_a_code_say_their_last_words_although_another_one_was_first(run):
    source = """
import time
train(prepared())
there = RUN_DIR / "first.pid"
if RANK == 1:
    there.write_text(str(os.getpid()))
else:
    with contextlib.suppress(ProcessLookupError):
        while True:
            if there.exists() and there.read_text():
                os.kill(int(there.read_text()), 0)
            os.sched_yield()
    end = time.perf_counter() + 0.4  # computing, as it were: the controller has heard of the first one
    while time.perf_counter() < end:
        pass
print("not good enough")
sys.exit(3)
"""
    ran = run(MODEL + source, workers=2)
    assert_failed(ran, "worker:1: ", "exited with code 3")
    assert ran.run.log_path("worker", 0).with_suffix(".out").read_text() == "not good enough\n"


def test_a_script_that_exits_with_0_before_prepare_has_trained_nothing_and_that_is_all(run):
    ran = run("print('usage: …')\nsys.exit()", workers=2)
    assert (ran.status.state, ran.error, ran.status.version) == ("succeeded", None, 0)
    assert ran.status.messages == ["every script exited before paceline.prepare(): nothing was trained"]


def test_ctrl_c_while_the_report_is_written_changes_nothing(engine, tmp_path):
    def press(status: RunStatus) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        (tmp_path / "report").touch()

    script = tmp_path / "script.py"
    script.write_text(
        "import os, paceline, torch\nfrom torch import nn\n"
        "model = nn.Linear(1, 1)\n"
        "model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "model(torch.ones(1, 1)).sum().backward()\n"
        "optimizer.step()\n"
    )
    job = Job(script=str(script), workers=1, threads=1, run_dir=str(tmp_path / "run"))
    plan = make_plan(job)
    where = RunDirectory.create(job, plan=plan)
    status = Controller(plan, engine, where, finish=press).run()
    assert status.state == where.state() == "succeeded"
    assert (tmp_path / "report").exists()


# --- links ------------------------------------------------------------------------------------------

GOES_ON_UNTIL_TOLD = """
import itertools
def asked():
    for epoch in itertools.count():
        if (RUN_DIR / "enough").exists():
            return
        yield epoch
"""


def _ports(pid: int) -> list[int]:
    return [c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"]


def test_a_port_scan_of_a_server_is_refused_and_does_not_disturb_the_run(run):
    """Garbage, silence, half a greeting, and somebody with the secret of another run."""
    scanned: list[socket.socket] = []
    refusals = []

    def watch(status, lines, engine):
        if scanned or not status.version:
            return
        (port,) = _ports(engine.pids()["server:0"])
        for data in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
            b"\0" * 4096,
            b"",
            b"PACELINE",
            os.urandom(41),
        ):
            sock = socket.create_connection(("127.0.0.1", port))
            scanned.append(sock)
            with contextlib.suppress(OSError):  # it has hung up already
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
        with pytest.raises(AuthError) as refused:
            connect(
                Address(unix=None, host="127.0.0.1", port=port), new_secret(), peer="server:0", link="tcp"
            )
        refusals.append(str(refused.value))
        for sock in scanned:
            sock.settimeout(10)
            with contextlib.suppress(OSError):
                while sock.recv(4096):
                    pass
            sock.close()
        (Path(status.run_dir) / "enough").touch()

    source = MODEL + GOES_ON_UNTIL_TOLD + "train(prepared(), epochs=asked())"
    ran = run(source, workers=1, threads=1, link="tcp", watch=watch)
    assert len(scanned) == 5
    assert ran.error is None
    assert "does not know this run's secret" in refusals[0]
    log = ran.log("server", 0)
    assert log.count("refused a connection: ") == 6
    assert "does not speak Paceline's protocol (a port scan?)" in log
    assert "closed the connection before it authenticated" in log


def test_strangers_who_hold_connections_open_do_not_keep_a_replaced_worker_out(run):
    held: list[socket.socket] = []
    died: list[bool] = []

    def watch(status, lines, engine):
        where = Path(status.run_dir)
        if not held and status.version:
            (port,) = _ports(engine.pids()["server:0"])
            held.extend(socket.create_connection(("127.0.0.1", port)) for _ in range(100))
        elif held and not died and "too many connections" in (where / "logs" / "server-0.log").read_text():
            died.append(True)
            (where / "die").touch()

    source = """
def loss_of(output, target):
    if (RUN_DIR / "die").exists():
        (RUN_DIR / "die").rename(RUN_DIR / "enough")
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(output, target)
train(prepared(), epochs=asked(), loss_of=loss_of)
"""
    try:
        ran = run(MODEL + GOES_ON_UNTIL_TOLD + source, workers=1, threads=1, watch=watch)
    finally:
        for sock in held:
            sock.close()
    assert len(held) == 100
    assert (ran.run.path / "enough").exists()
    assert ran.error is None
    assert ran.status.restarts == 1
    assert "too many connections authenticating at once" in ran.log("server", 0)
