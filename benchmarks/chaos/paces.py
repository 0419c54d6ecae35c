"""Rows 15 and 16: a worker that is slow for good, and workers that leave and come while a run goes on."""

import random
import statistics
import time
from collections.abc import Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any

from benchmarks import ours
from benchmarks.chaos.outcome import Outcome, Trial
from benchmarks.chaos.running import Bench, Fault, Work, counted, run, steps
from paceline.control import Requests

SLOWER = 5.0
STEP_MS = 50.0
SSP = "ssp:4+batches=speed"
LEAST = {"backup:1": 0.95, "asp": 0.75, SSP: 0.75}
BATCHES = 480
"""In an epoch: all wait for the slow one's last batch there, and an epoch is long compared with that."""
SIZES = (2, 4)
LONG = Work(epochs=24, step_ms=30)
ANSWER_S = 30.0


def trials(bench: Bench) -> Iterator[Trial]:
    """These rows."""
    for mode, least in LEAST.items():
        what = "steps/s" if mode == "backup:1" else "samples/s"
        yield Trial(
            row="15",
            name=f"straggler-{mode.partition('+')[0]}",
            wanted=f"≥ {least:.0%} of the undisturbed {what}",
            run=partial(straggling, bench, mode),
            measure="figure",
            limit=least,
            unit="of undisturbed",
            better="higher",
        )
    yield Trial(
        row="16",
        name="scaled-4-2-4",
        wanted="same PIDs, ≤ 1 step added",
        run=partial(scaled, bench),
        measure="figure",
        limit=1.0,
        unit="steps",
    )


@cache
def _epochs(mode: str, slower: float, rounds: int) -> list[float]:
    """Seconds of each epoch of a run."""
    return ours.emulated(
        mode=mode,
        workers=4,
        batches=BATCHES,
        epochs=rounds,
        step_ms=STEP_MS,
        slow_rank=3,
        slower=slower,
    )


def straggling(bench: Bench, mode: str, seed: int) -> Outcome:
    """An epoch with a slow worker, against one without; all epochs are of two runs.

    In backup every update is of three gradients, so updates/s and samples/s are in proportion.
    """
    rounds = max(3, bench.seeds)
    slow, even = _epochs(mode, SLOWER, rounds)[seed], statistics.median(_epochs(mode, 1.0, rounds))
    note = "batches by speed" if mode == SSP else ""
    return Outcome(figure=even / slow, note=note)


def scaled(bench: Bench, seed: int) -> Outcome:
    """Four workers become two, and four again. What a worker that stays waits for is compared with its
    usual step, in the second after each change; in bsp, where all wait for all."""
    chance = random.Random(f"scaled {seed}")
    changes: list[tuple[float, dict[str, int]]] = []

    def workers() -> dict[str, int]:
        return {name: pid for name, pid in dict(bench.engine.pids()).items() if name.startswith("worker:")}

    def do(fault: Fault) -> None:
        requests = Requests(bench.folder / name)
        changes.append((time.monotonic(), workers()))
        for size in SIZES:
            body: dict[str, Any] = {"kind": "scale", "workers": size}
            asked = time.monotonic()
            fault.notes[f"answer {size}"] = requests.ask(body, alive=lambda: True, within_s=ANSWER_S)
            while len(workers()) != size and time.monotonic() < asked + ANSWER_S:
                time.sleep(0.01)
            changes.append((asked, workers()))
            fault.wait(2.0)

    name = f"scaled-{seed}"
    fault = Fault(chance.randint(40, 200), do)
    ran = run(bench, name, fault=fault, mode="bsp", work=LONG)
    fault.happens()
    outcome = counted(ran, LONG)
    outcome.detected_s = outcome.blackout_s = None
    if outcome.why:
        return outcome
    stayed = {name: changes[0][1][name] for name in ("worker:0", "worker:1")}
    if len(changes) != 1 + len(SIZES):
        outcome.why = f"it was over before {SIZES[len(changes) - 1]} workers were there"
    elif any(now.get(name) != pid for _, now in changes for name, pid in stayed.items()):
        outcome.why = "workers that stay were replaced"
    elif ran.status.restarts:
        outcome.why = f"{ran.status.restarts} restarts"
    else:
        outcome.figure, outcome.note = _added(steps(ran.path), [at for at, _ in changes[1:]])
    return outcome


def _added(made: dict[int, list[tuple[float, float]]], asked: list[float]) -> tuple[float, str]:
    """How many usual steps longer than usual the longest step after a change took."""
    ends = [ended for _, ended in made[0]]
    took = {ended: ended - before for before, ended in pairwise(ends)}
    usual = statistics.median(took.values())
    worst = max(seconds for at in asked for ended, seconds in took.items() if at < ended < at + 2.0)
    return max(0.0, worst - usual) / usual, ""
