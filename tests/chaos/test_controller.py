"""The controller, killed at any time: the run ends as it would have (make chaos)."""

import os
import random
import signal
import subprocess

import pytest

from paceline.control import RunDirectory
from tests.integration.test_controller_death import (
    KILLS,
    assert_same_model,
    command,
    to_the_end,
    until,
    updates_meanwhile,
)
from tests.integration.test_faults import assert_every_sample_once

pytestmark = pytest.mark.chaos

AT_STEPS = """
STEPS = {steps}
def fate(step):
    computing(step)
    if RANK == 0 and step in STEPS:
        (RUN_DIR / "before").write_text(str(controller()))
        kill_controller(f"killed-{{step}}")
        if step != STEPS[-1]:
            while controller() == int((RUN_DIR / "before").read_text()):  # one after the other
                time.sleep(0.01)
train(prepared(samples=240), epochs=8, at_step=fate)
"""


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_once_or_twice_at_any_step(run, tmp_path, mode, seed):
    rng = random.Random(seed)
    # In asp a worker may get few of the 480 steps, but hardly less than a quarter.
    steps = sorted(rng.sample(range(1, 120), 1 + seed % 2))
    link, servers = rng.choice(["shm", "tcp"]), rng.randint(1, 3)
    source = KILLS + AT_STEPS.format(steps=steps)
    options = ["--workers", "2", "--mode", mode, "--link", link, "--servers", str(servers)]
    ran = to_the_end(tmp_path, source, *options, takeovers=len(steps))
    assert_every_sample_once(ran, samples=240, epochs=8)
    assert ran.status.restarts == 0
    assert updates_meanwhile(ran) > 0
    if mode == "bsp":
        calm = KILLS + AT_STEPS.format(steps=[])
        assert_same_model(run(calm, workers=2, mode=mode, link=link, servers=servers, threads=1), ran)


@pytest.mark.parametrize("seed", range(6))
def test_while_the_run_ends(tmp_path, seed):
    """From the last checkpoint to the report: whatever is missing is made by the next one."""
    rng = random.Random(seed)
    words, environment, directory = command(tmp_path, KILLS + "train(prepared())", "--workers", "2")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as it:
        run = RunDirectory(directory)
        state = rng.choice(["finishing", "succeeded"])
        until(lambda: run.read_status().get("state") in (state, "succeeded"))
        os.kill(it.pid, signal.SIGKILL)
        it.communicate(timeout=60)
    assert run.state() == "succeeded"
    assert (run.path / "report.html").exists() and (directory / "summary.json").exists()
    assert not (directory / "raw").exists()
    assert not run.lock.held()
