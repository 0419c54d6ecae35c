"""Faults in the modes in which a push covers several steps, or none at all.

What a dead worker had not pushed goes back to the pool, whatever it was in the middle of; what servers held
for it is applied.
"""

import signal
from typing import Any

import pytest

from paceline.api.jobs import resume_run
from tests.integration.test_faults import TOOLS, assert_died
from tests.speed import first

MODES = [
    "downpour:2,3",
    "easgd:2",
    "eamsgd:3",
    "local:3",
    "diloco:2",
    "hogwild",
    "bsp+period=2",
    "backup:1+period=2",
    "ssp:1+period=2",
    "asp+quorum=2",
    "asp+damping=dc",
    "asp+damping=gap",
]
OVER_TCP = [mode for mode in MODES if mode != "hogwild"]


def assert_books(ran: Any, samples: int = 48, epochs: int = 3) -> None:
    """Each epoch was applied exactly once."""
    assert ran.error is None
    assert ran.status.state == "succeeded"
    accounts = ran.status.leases[:epochs]
    assert [(a["applied"], a["refused"], a["unused"]) for a in accounts] == [(samples, 0, 0)] * epochs
    assert ran.status.samples == samples * epochs
    assert all(bool(t.isfinite().all()) for t in ran.model.values())


@pytest.mark.parametrize(
    ("mode", "link"),
    first(6, [*((m, "shm") for m in MODES), *((m, "tcp") for m in OVER_TCP)]),
)
def test_a_worker_killed_in_an_epoch_is_replaced_and_every_sample_is_applied_once(run, mode, link):
    source = TOOLS + "train(prepared(), epochs=3, at_step=lambda step: die() if step == 3 else None)"
    ran = run(source, workers=3, servers=2, threads=1, mode=mode, link=link)
    assert_died(ran)
    assert_books(ran)


@pytest.mark.slow
@pytest.mark.parametrize("mode", first(1, MODES))
def test_a_stopped_run_is_resumed_and_every_sample_is_applied_once(run, mode):
    """Ctrl-C in the middle of periods: steps that no push had covered are made again."""
    source = """
import time
def fate(step):
    if not (RUN_DIR / "hurry").exists():
        time.sleep(0.15)
train(prepared(), epochs=3, at_step=fate)
"""
    stopped = []

    def watch(status, lines, engine):
        if status.version >= 1 and not stopped and status.state == "running":
            stopped.append(signal.raise_signal(signal.SIGINT))

    ran = run(TOOLS + source, workers=2, servers=2, threads=1, mode=mode, watch=watch)
    assert ran.status.state == "stopped"
    assert ran.status.epoch < 3, "it was over before it was stopped"
    (ran.run.path / "hurry").touch()
    ran.status = resume_run(ran.run, {})
    ran.error = ran.status.error
    assert ran.status.mode == mode
    assert_books(ran)
