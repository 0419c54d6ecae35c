"""Seeded kills of servers and workers, with replicas: nothing is lost, and the run does not go back."""

import os
import random
import signal

import pytest

from tests.integration.test_replicas import LONG, Through, assert_all_counted

pytestmark = pytest.mark.chaos

MODES = ["bsp", "backup:1", "ssp:0", "ssp:2", "asp", "asp+quorum=2", "downpour:2", "easgd:2", "local:2"]


def random_kill(rng, *, patient):
    """Kill a server or a worker, at once or when all slices have their copies again."""

    def stage(status, engine):
        names = sorted(name for name in engine.pids() if patient or name.startswith("worker:"))
        name = rng.choice(names)
        os.kill(engine.pids()[name], signal.SIGKILL)
        at, count = status.version, len(status.messages)

        def done(status):
            back = name.startswith("worker:") or any("holds copies" in m for m in status.messages[count:])
            return back and status.version > at + rng.randrange(30)

        return done

    return stage


@pytest.mark.parametrize("seed", range(24))
def test_servers_and_workers_are_killed_at_any_time(run, seed):
    rng = random.Random(seed)
    mode, link, servers = rng.choice(MODES), rng.choice(["shm", "tcp"]), rng.randint(2, 4)
    through = Through(*(random_kill(rng, patient=True) for _ in range(4)))
    ran = run(
        LONG,
        workers=3,
        servers=servers,
        replicas=rng.randint(1, servers - 1),
        mode=mode,
        link=link,
        max_restarts=10,
        deadline_s=30,
        checkpoint_every=rng.choice([0, 7]),
        watch=through,
    )
    assert ran.error is None, (mode, link)
    epochs = max(ran.results().values())
    assert_all_counted(ran, epochs=epochs)
