"""Seeded repetitions of the faults in tests/integration/test_faults.py, several at once (make chaos)."""

import os
import random
import signal
import sys

import psutil
import pytest

from tests.integration.test_faults import (
    DEATHS,
    SLOWLY,
    TOOLS,
    assert_every_sample_once,
    run_command_that_kills,
)

pytestmark = pytest.mark.chaos

MODES = ["bsp", "backup:1", "ssp:0", "ssp:2", "asp"]


@pytest.mark.parametrize("seed", range(30))
def test_three_deaths_anywhere_cost_no_sample_and_repeat_none(run, seed):
    """Each at its own message, of whichever worker gets there first; so two may die at the same moment."""
    rng = random.Random(seed)
    points = rng.sample([d for d in DEATHS if d != "weights-asked"], 3)
    lines = [f'die_sending({DEATHS[point]}, name="died-{n}")' for n, point in enumerate(points)]
    mode, link = rng.choice(MODES), rng.choice(["shm", "tcp"])
    source = "\n".join([TOOLS, *lines, "train(prepared(samples=120), epochs=3)"])
    ran = run(
        source, workers=3, servers=rng.randint(1, 3), mode=mode, link=link, max_restarts=3, deadline_s=30
    )
    fired = sorted(p.name for p in ran.run.path.glob("died-*"))
    assert fired, (points, mode, link)
    assert ran.status.restarts == len(fired)
    assert_every_sample_once(ran, samples=120, epochs=3)


@pytest.mark.parametrize("seed", range(10))
def test_kills_from_outside_at_any_time(run, seed):
    rng = random.Random(seed)
    killed: list[str] = []

    def watch(status, lines, engine):
        workers = [name for name in engine.pids() if name.startswith("worker:")]
        if len(killed) < 4 and workers and rng.random() < 0.5:
            name = rng.choice(workers)
            try:
                os.kill(engine.pids()[name], signal.SIGKILL)
            except ProcessLookupError:
                return
            killed.append(name)

    ran = run(
        TOOLS + "train(prepared(samples=480), epochs=8)",
        workers=3,
        servers=2,
        mode=rng.choice(MODES),
        link=rng.choice(["shm", "tcp"]),
        max_restarts=4,
        deadline_s=30,
        watch=watch,
    )
    assert killed
    assert_every_sample_once(ran, samples=480, epochs=8)


@pytest.mark.parametrize("seed", range(12))
def test_a_server_killed_at_any_time_sends_the_run_back(run, seed):
    """Also before there is a checkpoint, or a model: what is lost is said, and computed again."""
    rng = random.Random(seed)
    rank, after = rng.randrange(3), rng.choice([0, 1, 10, 20])
    killed: list[int] = []

    def watch(status, lines, engine):
        name = f"server:{rank}"
        if not killed and status.version >= after and name in engine.pids():
            killed.append(engine.pids()[name])
            os.kill(killed[0], signal.SIGKILL)

    mode, link = rng.choice(MODES), rng.choice(["shm", "tcp"])
    job = {"workers": 2, "servers": 3, "mode": mode, "link": link, "checkpoint_every": rng.choice([0, 5, 20])}
    ran = run(SLOWLY, args=("8",), watch=watch, **job)
    assert killed
    assert_every_sample_once(ran, epochs=8)
    assert sum("went back" in message for message in ran.status.messages) == 1


@pytest.mark.parametrize("repetition", range(3))
@pytest.mark.parametrize("victim", ["both", "fork server"])
def test_nothing_outlives_the_fork_server(tmp_path, victim, repetition):
    done = run_command_that_kills(victim, tmp_path)
    if victim == "both":
        assert done.returncode == -signal.SIGKILL
    else:
        assert done.returncode == 1
        assert "error: server:0: was killed by SIGKILL, and --max-restarts is 0." in done.stderr
        assert "Traceback" not in done.stderr


def test_a_run_survives_a_machine_that_is_short_of_cpu(run):
    """Beside processes that never rest: slow is not dead."""
    spinners = [psutil.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        ran = run(TOOLS + "train(prepared(), epochs=4)", workers=3, servers=2, mode="bsp", deadline_s=30)
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    assert_every_sample_once(ran, epochs=4)
