"""The controller is killed: training goes on, another one takes over, and the run ends as it would have.

Scripts kill it themselves at a chosen point, once. `subprocess.run` returns when nobody holds the command's
output any more: the fork server does, to the end of the run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from paceline.api.jobs import latest_checkpoint
from paceline.control import RunDirectory
from paceline.observe import RunStatus
from paceline.observe.analyse.run_data import RunData
from tests.integration.conftest import PRELUDE, Ran
from tests.integration.test_faults import TOOLS, assert_every_sample_once
from tests.speed import first

KILLS = (
    TOOLS
    + """
import time

def controller():
    return int((RUN_DIR / "lock").read_text())

def kill_controller(name="killed"):
    if once(name):
        os.kill(controller(), signal.SIGKILL)

def computing(step):
    time.sleep(0.004)
"""
)


def command(tmp_path: Path, source: str, *options: str) -> tuple[list[str], dict[str, str], Path]:
    """`paceline run` of a script, in a directory of its own."""
    directory, script = tmp_path / "killed", tmp_path / "killed.py"
    header = f"import os; os.environ['TEST_RUN_DIR'] = {str(directory)!r}\n"
    script.write_text(header + PRELUDE + source)
    words = [sys.executable, "-m", "paceline", "run", "--run-dir", str(directory), "--threads", "1"]
    environment = {**os.environ, "PACELINE_RUNS": str(tmp_path / "runs")}
    return [*words, *options, str(script)], environment, directory


def to_the_end(tmp_path: Path, source: str, *options: str, faults: str = "", takeovers: int = 1) -> Ran:
    """Run a script whose controller is killed, to the end of the run."""
    words, environment, directory = command(tmp_path, source, *options)
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment, "PACELINE_FAULTS": faults},
    )
    run = RunDirectory(directory)
    log = run.log_path("controller")
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert f"the run goes on in the background: `paceline top {directory}`" in done.stderr
    assert run.state() == "succeeded", log.read_text() if log.exists() else done.stderr
    status = RunStatus.from_json(run.read_status())
    assert status.takeovers == takeovers
    assert [event["kind"] for event in run.read_events()].count("takeover") == takeovers
    said = [message for message in status.messages if "took over after" in message]
    assert len(said) == takeovers
    assert said[0] in (run.path / "report.html").read_text()
    assert json.loads((directory / "summary.json").read_text())["takeovers"] == takeovers
    assert not run.lock.held()
    return Ran(status, run, None)


def blackouts(ran: Ran) -> list[float]:
    """Seconds without a controller, once for each that died."""
    return [e["took_over"] - e["died"] for e in ran.run.read_events() if e["kind"] == "takeover"]


def updates_meanwhile(ran: Ran) -> int:
    """Updates of the parameters while there was no controller."""
    spans = RunData(ran.run.path).spans
    updates = spans[(spans["phase"] == "update") & (spans["role"] == "server")]
    return sum(
        int(((updates["start"] > e["died"] * 1e9) & (updates["start"] < e["took_over"] * 1e9)).sum())
        for e in ran.run.read_events()
        if e["kind"] == "takeover"
    )


def assert_same_model(one: Ran, other: Ran) -> None:
    for name, value in one.model.items():
        assert torch.equal(other.model[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("link", first(1, ["shm", "tcp"]))
def test_training_goes_on_when_the_controller_is_killed(run, tmp_path, link):
    source = KILLS + "train(prepared(samples=240), epochs=8, at_step=computing)"
    job: dict[str, Any] = {"workers": 2, "servers": 2, "mode": "bsp", "link": link, "threads": 1}
    ran = to_the_end(
        tmp_path,
        source,
        *["--workers", "2", "--servers", "2", "--mode", "bsp", "--link"],
        link,
        faults="kill controller@20",
    )
    assert_every_sample_once(ran, samples=240, epochs=8)
    assert ran.status.restarts == 0
    assert updates_meanwhile(ran) > 0
    assert max(blackouts(ran)) < 5
    assert_same_model(run(source, **job), ran)


AT = {
    "with a worker": """
def fate(step):
    if step == 3 and RANK == 1 and once("died"):
        kill_controller()
        os.kill(os.getpid(), signal.SIGKILL)
train(prepared(), at_step=fate)
""",
    "at the end": "train(prepared()); kill_controller()",
    "with a server": """
import psutil
def fate(step):
    if step == 5 and RANK == 1 and once("died"):
        server = min(p.pid for p in psutil.Process(os.getppid()).children())
        kill_controller()
        os.kill(server, signal.SIGKILL)
train(prepared(), at_step=fate)
""",
    "before the servers are ready": "kill_controller(); train(prepared())",
    "with the last goodbye": """
from paceline.comm.lasting import LastingLink
say_last = LastingLink.say_last
def killing(self, kind, body=None):
    send = self.send
    def sending(*args):
        send(*args)
        kill_controller()
    self.send = sending
    say_last(self, kind, body)
LastingLink.say_last = killing
train(prepared())
""",
}


@pytest.mark.parametrize("when", first(1, AT))
def test_whatever_the_controller_was_at_the_next_one_goes_on_with_it(tmp_path, when):
    options = ["--workers", "2", "--servers", "2", "--mode", "bsp", "--checkpoint-every", "2"]
    ran = to_the_end(tmp_path, KILLS + AT[when], *options)
    assert_every_sample_once(ran)
    assert ran.status.restarts == (when == "with a worker")
    assert any("The run went back" in message for message in ran.status.messages) == (when == "with a server")


@pytest.mark.parametrize("servers", first(0, [2, 3]))
def test_the_lead_dies_with_the_controller(tmp_path, servers):
    """Its replicas hear from the next controller which of them leads, whoever comes first."""
    source = (
        KILLS
        + """
def fate(step):
    computing(step)
    if step == 10 and RANK == 1 and once("died"):
        status = json.loads((RUN_DIR / "status.json").read_text())
        kill_controller()
        os.kill(status["servers"]["0"]["pid"], signal.SIGKILL)
train(prepared(samples=240), epochs=4, at_step=fate)
"""
    )
    options = ["--workers", "2", "--servers", str(servers), "--replicas", "1", "--mode", "asp"]
    ran = to_the_end(tmp_path, source, *options, "--deadline", "20")
    assert_every_sample_once(ran, samples=240, epochs=4)
    assert any("led by server:1" in message for message in ran.status.messages)
    assert not any("went back" in message for message in ran.status.messages)


def paceline(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Another command, while the run goes on."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody announces."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_in_the_background_is_asked_stopped_and_resumed_as_any_other(tmp_path):
    source = KILLS + "train(prepared(), epochs=itertools.count(), at_step=computing)"
    words, environment, directory = command(tmp_path, source, "--workers", "2", "--mode", "asp")
    quietly: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        words, env={**environment, "PACELINE_FAULTS": "kill controller@20"}, **quietly
    ) as it:
        assert it.wait(30) == -signal.SIGKILL
        run = RunDirectory(directory)
        assert run.alive()
        until(lambda: run.read_status().get("takeovers") == 1)

        refused = paceline(environment, "resume", str(directory))
        pid = run.controller_pid()
        assert pid != it.pid and refused.returncode == 2
        assert f"is still going on (state running, controller: process {pid})" in refused.stderr

        scaled = paceline(environment, "scale", str(directory), "--workers", "3")
        assert "goes on with 3 workers" in scaled.stdout, scaled.stderr
        switched = paceline(environment, "switch", str(directory), "ssp:2")
        assert switched.returncode == 0, switched.stderr
        until(lambda: run.read_status()["mode"] == "ssp:2")

        family = psutil.Process(pid), *psutil.Process(psutil.Process(pid).ppid()).children()
        os.kill(pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=15)
        assert alive == []
    assert run.state() == "stopped"
    version = run.read_status()["version"]
    assert latest_checkpoint(run).version >= 20

    both = [
        subprocess.Popen(
            [sys.executable, "-m", "paceline", "resume", str(directory)], env=environment, **quietly
        )
        for _ in range(2)
    ]
    until(lambda: any(each.poll() is not None for each in both))
    (refused_one,) = [each for each in both if each.poll() is not None]
    (goes_on,) = [each for each in both if each is not refused_one]
    _, said = refused_one.communicate()
    assert refused_one.returncode == 2 and "is still going on" in said
    until(lambda: run.read_status().get("version", 0) > version)
    goes_on.send_signal(signal.SIGTERM)
    goes_on.communicate(timeout=30)
    assert run.state() == "stopped" and len(run.record()["resumes"]) == 1


@pytest.mark.slow  # it waits for the limit
def test_the_next_controller_ends_the_run_at_its_time_limit(tmp_path):
    source = """
objects = prepared()
if RANK == 0:
    kill_controller()
for epoch in itertools.count():
    train(objects, epochs=1, at_step=computing)
    if paceline.should_stop():
        break
result(epoch)
"""
    ran = to_the_end(tmp_path, KILLS + source, "--workers", "2", "--mode", "bsp", "--max-time", "8s")
    assert ran.status.ended_early == "its time was up (8 s, --max-time)"
    assert ran.status.elapsed_s >= 8
    assert ran.results()[0] == ran.results()[1]
    assert ran.model
