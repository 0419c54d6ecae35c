"""Ctrl-C and SIGTERM while roles are being started, and plans that this host cannot carry."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.speed import first

SCRIPT = "import time\ntime.sleep(600)\n"
DEADLINE_S = 60.0


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    where = ["--run-dir", str(tmp_path / "run"), str(script)]
    return [sys.executable, "-m", "paceline", "run", "--quiet", "--workers", "6", "--threads", "1", *where]


def family_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(("number", "when"), first(1, [(signal.SIGTERM, 1), (signal.SIGINT, 4)]))
def test_a_signal_while_roles_start_ends_all_of_them(command, tmp_path, number, when):
    """`when`: as soon as there are so many processes beside the controller; the first is the fork server."""
    env = {**os.environ, "PACELINE_RUNS": str(tmp_path / "runs")}
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    whole, deadline = psutil.Process(controller.pid), time.monotonic() + DEADLINE_S
    while len(family := family_of(whole)) < when:
        assert time.monotonic() < deadline and controller.poll() is None
        time.sleep(0.002)
    controller.send_signal(number)
    while controller.poll() is None and time.monotonic() < deadline:
        family = [*{*family, *family_of(whole)}]
        time.sleep(0.01)
    output, _ = controller.communicate(timeout=5)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == [], output
    assert controller.returncode != 0


def test_more_workers_than_this_host_can_carry_are_refused_at_once(command, tmp_path):
    command[command.index("6")] = "10000000"
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode != 0
    assert "this host cannot carry 10,000,001 roles" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()
