"""Warnings while a run goes on: each said once, when it is true, with numbers and what to do."""

import math
import re
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.observe import RunStatus, ServerStatus, WorkerStatus
from paceline.observe.analyse.watch import Watch
from paceline.observe.record.phase import PHASES

Phases = dict[str, float]
HEALTHY: Phases = {"forward": 0.3, "backward": 0.5, "wait": 0.1, "load": 0.05, "push": 0.05}


def run(
    *,
    seconds: int = 30,
    workers: int = 4,
    mode: str = "bsp",
    phases: Callable[[int], Phases] = lambda rank: HEALTHY,
    steps_per_s: Callable[[int], float] = lambda rank: 10.0,
    loss: Callable[[int], float] = lambda second: 1.0 / (1 + second),
    staleness: int = 0,
    update_s: float = 0.01,
    spans: bool = True,
    startup_s: float = 3.0,
) -> list[tuple[int, str]]:
    """What is said of a run that goes on like this, with the second of its training."""
    watch, said = Watch(), []
    for second in range(seconds):
        status = RunStatus(state="running", mode=mode, startup_s=startup_s, elapsed_s=startup_s + second)
        for rank in range(workers):
            spent = {phase: share * second for phase, share in phases(rank).items()}
            status.workers[rank] = WorkerStatus(
                rank=rank,
                clock=int(steps_per_s(rank) * second),
                step_s=sum(s for phase, s in spent.items() if phase not in ("wait", "pull")),
                wait_s=sum(s for phase, s in spent.items() if phase in ("wait", "pull")),
                phases=spent if spans else {},
                metrics={"loss": loss(second)},
            )
        updates = 10 * second
        status.servers[0] = ServerStatus(rank=0, updates=updates, update_s=update_s * updates)
        status.staleness = {staleness: updates}
        said += [(second, text) for text in watch.see(status)]
    return said


def test_nothing_to_say_of_a_healthy_run() -> None:
    assert run(seconds=100) == []
    assert run(seconds=100, spans=False) == []
    assert run(seconds=100, mode="asp", staleness=3) == []


@pytest.mark.parametrize("spans", [True, False])
def test_idleness(spans: bool) -> None:
    ((second, text),) = run(phases=lambda rank: {"forward": 0.59, "wait": 0.3, "pull": 0.11}, spans=spans)
    assert second == 10, "not before ten seconds of training"
    assert text.startswith("idleness: the workers spent 41 % of the last 10.0 s waiting for parameters.")
    assert "ssp:2 or asp waits less than bsp" in text


def test_idleness_in_ssp_is_no_reason_for_a_smaller_bound() -> None:
    ((_, text),) = run(mode="ssp:4", phases=lambda rank: {"forward": 0.5, "wait": 0.5})
    assert "asp, or ssp with a larger bound, waits less than ssp:4" in text
    assert "ssp:2" not in text


def test_idleness_where_nobody_waits_for_workers() -> None:
    for mode in ("asp", "asp+damping=dc", "hybrid:asp"):
        ((_, text),) = run(mode=mode, phases=lambda rank: {"forward": 0.5, "wait": 0.5})
        assert "more --servers" in text
        assert "ssp:2" not in text


@pytest.mark.parametrize("spans", [True, False])
def test_slow_worker(spans: bool) -> None:
    ((_, text),) = run(
        mode="asp", steps_per_s=lambda rank: 4.0 if rank == 2 else 10.0, spans=spans, workers=4
    )
    assert text.startswith(
        "slow worker: worker:2 takes 225 ms of its own time for a step, 2.5 times the others'"
    )


def test_slow_worker_that_others_wait_for() -> None:
    """All make as many steps; one computes in them and the others wait."""
    said = run(
        phases=lambda rank: {"backward": 1.0} if rank == 1 else {"backward": 0.2, "wait": 0.8}, workers=2
    )
    assert [text.partition(":")[0] for _, text in said] == ["idleness", "slow worker"]
    assert "worker:1 takes 100 ms" in said[1][1]


def test_many_slow_workers_are_one_warning() -> None:
    ((_, text),) = run(workers=20, mode="asp", steps_per_s=lambda rank: 3.0 if rank % 4 == 0 else 10.0)
    assert re.findall(r"worker:\d+", text) == ["worker:0", "worker:4", "worker:8"]
    assert "2 more workers so" in text


def test_stale_and_rising() -> None:
    def rising(second: int) -> float:
        return 1.0 + 0.05 * second

    for mode, staleness in (("asp", 2), ("ssp:3", 2), ("hybrid:ssp:2", 2), ("asp+damping=dc", 3)):
        said = run(mode=mode, staleness=staleness, loss=rising)
        assert len(said) == 1, mode
        assert f"staleness: {staleness} lately, more than half of the" in said[0][1]
        assert "the loss rises, from " in said[0][1]
    for mode, staleness in (("asp", 1), ("ssp:5", 2), ("bsp", 2), ("ssp:0", 1)):
        assert run(mode=mode, staleness=staleness, loss=rising) == [], mode
    assert run(mode="asp", staleness=3, workers=1, loss=rising) == []


def test_a_loss_that_only_wavers_does_not_rise() -> None:
    assert run(mode="asp", staleness=3, loss=lambda second: 1.0 + 0.3 * math.sin(5 * second)) == []
    assert run(mode="asp", staleness=3, loss=lambda second: math.nan) == []


def test_slow_server() -> None:
    ((_, text),) = run(update_s=0.1)
    assert text.startswith("slow server: server:0 takes 100 ms for an update, longer than a worker")
    assert "(90 ms)" in text
    assert run(update_s=0.08) == []


def test_data() -> None:
    ((_, text),) = run(phases=lambda rank: {"forward": 0.6, "load": 0.4})
    assert text.startswith("data loading: the workers spent 40 % of the last 10.0 s")
    assert "num_workers" in text


def test_nothing_before_twenty_steps() -> None:
    said = run(phases=lambda rank: {"forward": 0.6, "load": 0.4}, steps_per_s=lambda rank: 0.5, seconds=60)
    assert [second for second, _ in said] == [40]


def test_lately() -> None:
    """A run that was idle at first and recovered is not warned of what is over."""
    watch = Watch()
    for second in range(60):
        worker = WorkerStatus(rank=0, clock=max(0, second - 30))
        worker.phases = {"wait": min(second, 30.0), "forward": max(0.0, second - 30.0)}
        status = RunStatus(state="running", elapsed_s=float(second), workers={0: worker})
        assert watch.see(status) == []


def test_another_mode_begins_again() -> None:
    watch = Watch()
    said: list[str] = []
    for second in range(60):
        worker = WorkerStatus(rank=0, clock=10 * second)
        worker.phases = {"wait": float(second)}
        mode = "bsp" if second % 5 else "asp"  # never ten seconds in one
        said += watch.see(RunStatus(state="running", mode=mode, elapsed_s=float(second), workers={0: worker}))
    assert said == []


def anything(random: Random) -> RunStatus:
    """A status that may make no sense."""

    def number() -> float:
        return random.choice([0.0, math.nan, math.inf, -1.0, 1e-9, random.uniform(0, 50), 1e300])

    status = RunStatus(
        state=random.choice(["running"] * 9 + ["recovering", "succeeded"]),
        mode=random.choice(["asp"] * 9 + ["bsp", "ssp:3", "hybrid:ssp:2", "", "ssp:x"]),
        startup_s=random.uniform(0, 5),
        elapsed_s=random.uniform(0, 200),
        staleness={random.randrange(9): random.randrange(1000) for _ in range(3)},
    )
    for rank in range(random.randrange(5)):
        status.workers[rank] = WorkerStatus(
            rank=rank,
            clock=random.randrange(1000),
            step_s=number(),
            wait_s=number(),
            metrics={name: number() for name in random.sample(["loss", "accuracy"], random.randrange(3))},
            phases={phase: number() for phase in random.sample(PHASES, random.randrange(5))},
        )
    for rank in range(random.randrange(3)):
        status.servers[rank] = ServerStatus(rank=rank, updates=random.randrange(1000), update_s=number())
    return status


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=40)
def test_never_raises_and_never_repeats(seed: int, ordered: bool) -> None:
    random, watch = Random(seed), Watch()
    found = [anything(random) for _ in range(60)]
    kinds: list[str] = []
    for status in sorted(found, key=lambda each: each.elapsed_s) if ordered else found:
        for text in watch.see(status):
            kind = text.partition(":")[0]
            kinds += re.findall(r"worker:\d+", text) if kind == "slow worker" else [kind]
    assert len(kinds) == len(set(kinds))


def test_a_replaced_worker_makes_nobody_slow() -> None:
    """Its process's times begin again at 0 while its steps go on: they must not be divided by each other."""
    watch, said = Watch(), []
    for second in range(60):
        status = RunStatus(state="running", mode="asp", startup_s=1.0, elapsed_s=1.0 + second)
        for rank in (0, 1):
            new = rank == 1 and second >= 30
            phases = {phase: share * (second - 30 if new else second) for phase, share in HEALTHY.items()}
            pid = 200 if new else 100 + rank
            status.workers[rank] = WorkerStatus(rank=rank, clock=10 * second, phases=phases, pid=pid)
        said += watch.see(status)
    assert said == []
