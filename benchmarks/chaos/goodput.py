"""Row 17: somebody is killed every 15 seconds, for minutes; what is left of the speed, and of the result."""

import dataclasses
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.chaos.outcome import Outcome, Trial
from benchmarks.chaos.running import Bench, Fault, Ran, Work, counted, pid_of, run, steps
from benchmarks.scripts.chaos import build, samples
from paceline.plan import Job

EVERY_S = 15.0
STEP_MS = 20.0
STEP_S = 0.027
"""About what a step of all four takes: only the length of the run depends on it."""
MOST_LOSS = 0.01


def trials(bench: Bench) -> Iterator[Trial]:
    """This row."""
    yield Trial(
        row="17",
        name="killed-every-15-s",
        wanted="goodput ≥ 90 %, loss within 1 %",
        run=partial(killed_again_and_again, bench),
        measure="figure",
        limit=0.9,
        unit="of undisturbed",
        better="higher",
        runs=1,
    )


def killed_again_and_again(bench: Bench, seed: int) -> Outcome:
    """The same work twice, undisturbed and with the kills: seconds from its first step to its last.

    With replicas servers are killed, too; never before the one killed last has been replaced for a while.
    """
    total = int(bench.minutes * 60 / STEP_S)  # updates, in bsp
    epochs = max(4, min(90, total // 100))
    work = Work(epochs=epochs, batches=4 * (total // epochs), step_ms=STEP_MS)
    replicas = "replicas" in {field.name for field in dataclasses.fields(Job)}
    settings: dict[str, Any] = {
        "mode": "bsp",
        "max_restarts": 10_000,
        **({"replicas": 1} if replicas else {}),
    }
    calm = run(bench, f"calm-{seed}", work=work, **settings)
    if calm.error:
        return Outcome(why=calm.error)
    killed: list[str] = []
    fault = Fault(100, partial(_kill_for_ever, bench, random.Random(f"17 {seed}"), killed, replicas))
    ran = run(bench, f"killed-{seed}", work=work, fault=fault, **settings)
    outcome = counted(ran, work)
    outcome.detected_s = outcome.blackout_s = None
    if outcome.why:
        return outcome
    outcome.figure = _seconds(calm) / _seconds(ran)
    losses = [_loss(each, work) for each in (calm, ran)]
    change = abs(losses[1] / losses[0] - 1)
    servers = sum(name.startswith("server") for name in killed)
    outcome.note = (
        f"{_seconds(ran):.0f} s, {len(killed)} killed ({servers} servers), loss {losses[1]:.5f} against "
        f"{losses[0]:.5f} ({change:.3%})"
    )
    if not killed:
        outcome.why = "nobody was killed"
    elif not change <= MOST_LOSS:
        outcome.why = f"loss {losses[1]:.5f}, undisturbed {losses[0]:.5f}"
    return outcome


def _kill_for_ever(
    bench: Bench, chance: random.Random, killed: list[str], replicas: bool, fault: Fault
) -> None:
    fault.happens()
    while not fault.over:
        server = replicas and chance.random() < 0.5
        role = f"server:{chance.randrange(2)}" if server else f"worker:{chance.randrange(4)}"
        try:
            os.kill(pid_of(bench.engine, role), signal.SIGKILL)
            killed.append(role)
        except ProcessLookupError:
            pass
        fault.wait(EVERY_S)


def _seconds(ran: Ran) -> float:
    """From the end of the first step to that of the last."""
    ends = [ended for each in steps(ran.path).values() for _, ended in each]
    return max(ends) - min(ends)


@torch.no_grad()
def _loss(ran: Ran, work: Work) -> float:
    model = build()
    model.load_state_dict(ran.model)
    points, labels = samples(work.batches)
    return float(F.cross_entropy(model(points), labels))
