"""Rows 1-5 and 8-11: a worker or a server dies, stops, is cut off or talks nonsense."""

import dataclasses
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import psutil

from benchmarks.chaos.outcome import Outcome, Skipped, Trial
from benchmarks.chaos.running import EVERY, Bench, Fault, Ran, counted, kill, pid_of, pushes, run
from paceline.comm.faults import Faults
from paceline.exceptions import UsageError
from paceline.plan import Job

BRIEFLY_S, DEADLINE_S = 1.0, 4.0
NORM_BOUND = 1000.0
LOSSY = "; ".join(
    f"{what} {role}@1-1000000:{how}"
    for role in ("worker:0", "worker:1", "worker:2", "worker:3", "server:0", "server:1")
    for what, how in (("drop", "10%"), ("duplicate", "10%"), ("reorder", "10%"), ("delay", "200ms"))
)
"""Row 8, in the words of the injector."""
REPLIES_LOST = "; ".join(f"drop server:{rank}@1-1000000:10%" for rank in range(2))
"""Row 9: what servers answer is lost after they have done it."""


def trials(bench: Bench) -> Iterator[Trial]:
    """These rows."""
    yield Trial(
        row="1",
        name="worker-killed-asp",
        wanted="detected ≤ 1 s",
        run=partial(worker_killed, bench, "asp"),
        measure="detected_s",
        limit=1.0,
    )
    yield Trial(
        row="2",
        name="worker-killed-bsp",
        wanted="on again ≤ 2 s",
        run=partial(worker_killed, bench, "bsp"),
        measure="blackout_s",
        limit=2.0,
    )
    yield Trial(
        row="3",
        name="worker-stopped-briefly",
        wanted="not declared dead",
        run=partial(stopped_briefly, bench),
    )
    yield Trial(
        row="3",
        name="worker-stopped-past-deadline",
        wanted="fenced, stale writes 0",
        run=partial(stopped_past_deadline, bench),
    )
    for mode in ("bsp", "asp"):
        yield Trial(
            row="4",
            name=f"server-with-replica-killed-{mode}",
            wanted="on again ≤ 1 s, lost 0",
            run=partial(replicated_server_killed, bench, mode),
            measure="blackout_s",
            limit=1.0,
        )
    yield Trial(
        row="5",
        name="server-killed",
        wanted=f"on again ≤ 10 s, lost ≤ {EVERY} a run",
        run=partial(server_killed, bench),
        measure="blackout_s",
        limit=10.0,
        most_lost=EVERY,
    )
    yield Trial(
        row="8",
        name="lossy-links",
        wanted="bitwise the fault-free result",
        run=partial(lossy, bench, "lossy", LOSSY),
    )
    yield Trial(
        row="9",
        name="replies-lost",
        wanted="bitwise the fault-free result",
        run=partial(lossy, bench, "replies", REPLIES_LOST),
    )
    yield Trial(row="10", name="frame-damaged", wanted="refused, comes again", run=partial(damaged, bench))
    yield Trial(
        row="11",
        name="nan",
        wanted="refused, worker replaced, model finite",
        run=partial(nonsense, bench, "nan"),
    )
    yield Trial(
        row="11",
        name="huge",
        wanted="refused, worker replaced, model sound",
        run=partial(nonsense, bench, "huge"),
    )


def _bitwise(bench: Bench, ran: Ran, outcome: Outcome) -> Outcome:
    """Note whether a bsp run came to what it comes to without a fault."""
    if not outcome.why:
        outcome.note = (
            "bitwise the fault-free result" if ran.is_bitwise(bench.undisturbed()) else "not bitwise"
        )
    return outcome


def worker_killed(bench: Bench, mode: str, seed: int) -> Outcome:
    """A worker gets SIGKILL."""
    chance = random.Random(f"worker {mode} {seed}")
    fault = Fault(chance.randint(20, 200), kill(bench.engine, f"worker:{chance.randrange(4)}"))
    ran = run(bench, f"worker-{mode}-{seed}", fault=fault, mode=mode)
    outcome = counted(ran)
    if not outcome.why and ran.status.restarts != 1:
        outcome.why = f"{ran.status.restarts} restarts instead of one"
    return outcome


def stopped_briefly(bench: Bench, seed: int) -> Outcome:
    """A worker is stopped for less than the deadline, in asp: it goes on where it was."""
    chance = random.Random(f"briefly {seed}")
    fault = _stop(bench, f"worker:{chance.randrange(4)}", chance.randint(20, 100), BRIEFLY_S)
    ran = run(bench, f"briefly-{seed}", fault=fault, mode="asp")
    outcome = counted(ran)
    outcome.detected_s = outcome.blackout_s = None  # nobody waits for it
    if outcome.why:
        return outcome
    if not fault.notes.get("stopped"):
        outcome.why = "the stop did not happen"
    elif ran.status.restarts:
        outcome.why = "it was declared dead"
    return outcome


def stopped_past_deadline(bench: Bench, seed: int) -> Outcome:
    """A worker is stopped for longer than anybody waits, then woken: what it says then must not count."""
    chance = random.Random(f"deadline {seed}")
    rank = chance.randrange(4)
    fault = _stop(bench, f"worker:{rank}", chance.randint(20, 200), DEADLINE_S + 1.5)
    ran = run(bench, f"deadline-{seed}", fault=fault, mode="bsp", deadline_s=DEADLINE_S)
    outcome = counted(ran)
    if outcome.why:
        return outcome
    if not fault.notes.get("stopped"):
        outcome.why = "the stop did not happen"
    elif ran.status.workers[rank].restarts != 1:
        outcome.why = "it was not replaced"
    elif stale := _stale(ran, rank):
        outcome.why = f"{stale} pushes of the old incarnation after the new one's first"
    outcome.note = f"woken after the deadline: {fault.notes.get('woken')}"
    return outcome


def _stale(ran: Ran, rank: int) -> int:
    """Pushes of an incarnation that came after those of a later one."""
    seen, stale = 0, 0
    for push in pushes(ran.path):
        if int(push["worker"]) == rank:
            incarnation = int(push["incarnation"])
            stale += incarnation < seen
            seen = max(seen, incarnation)
    return stale


def _stop(bench: Bench, role: str, after: int, seconds: float) -> Fault:
    def do(fault: Fault) -> None:
        pid = pid_of(bench.engine, role)
        process = psutil.Process(pid)
        fault.happens()
        os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + 0.5
        while not fault.notes.get("stopped") and time.monotonic() < until:
            fault.notes["stopped"] = process.status() == psutil.STATUS_STOPPED
        fault.wait(seconds - (time.monotonic() - (fault.at or 0.0)))
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        fault.notes["woken"] = "it lives, and goes on" if alive else "it is dead, and writes no more"
        if alive:
            os.kill(pid, signal.SIGCONT)

    return Fault(after, do)


def replicated_server_killed(bench: Bench, mode: str, seed: int) -> Outcome:
    """A server gets SIGKILL, and another one holds what it held: server 0 and server 1 in turn."""
    if "replicas" not in {field.name for field in dataclasses.fields(Job)}:
        raise Skipped("this Paceline has no --replicas")
    chance = random.Random(f"replica {mode} {seed}")
    fault = Fault(chance.randint(20, 200), kill(bench.engine, f"server:{seed % 2}"))
    ran = run(bench, f"replica-{mode}-{seed}", fault=fault, mode=mode, replicas=1)
    outcome = counted(ran)
    return _bitwise(bench, ran, outcome) if mode == "bsp" else outcome


def server_killed(bench: Bench, seed: int) -> Outcome:
    """A server gets SIGKILL, and there is nothing but the last checkpoint."""
    chance = random.Random(f"server {seed}")
    fault = Fault(chance.randint(100, 250), kill(bench.engine, f"server:{chance.randrange(2)}"))
    ran = run(bench, f"server-{seed}", fault=fault, mode="bsp", checkpoint_every=EVERY)
    return _bitwise(bench, ran, counted(ran))


def lossy(bench: Bench, name: str, text: str, seed: int) -> Outcome:
    """Frames are lost, doubled, swapped or late; over shared memory and over TCP in turn."""
    try:
        Faults.parse(text)
    except UsageError as error:
        raise Skipped(f"the injector does not know this ({error})") from None
    link = ("tcp", "shm")[seed % 2]
    expected = bench.undisturbed(link=link)
    ran = run(bench, f"{name}-{seed}", faults=text, mode="bsp", link=link)
    outcome = counted(ran)
    if not outcome.why and not ran.is_bitwise(expected):
        outcome.why = "not bitwise the fault-free result"
    return outcome


def damaged(bench: Bench, seed: int) -> Outcome:
    """A bit of a frame is flipped, or the link ends within it."""
    chance = random.Random(f"damaged {seed}")
    text = f"{('flip', 'cut')[seed % 2]} worker:{chance.randrange(4)}@{chance.randint(3, 40)}"
    ran = run(bench, f"damaged-{seed}", faults=text, mode="bsp")
    outcome = counted(ran)
    logs = "".join(path.read_text() for path in (ran.path / "logs").glob("server-*.log"))
    if not outcome.why and ran.status.restarts:
        outcome.why = f"{ran.status.restarts} restarts"
    elif not outcome.why and "back over another socket" not in logs:
        outcome.why = "no frame was refused"
    return outcome


def nonsense(bench: Bench, kind: str, seed: int) -> Outcome:
    """A worker's gradients are NaN, or 10⁴ times too large, from some step on for ever."""
    chance = random.Random(f"{kind} {seed}")
    text = f"{kind} worker:{chance.randrange(4)}@{chance.randint(10, 40)}-1000000"
    bound: dict[str, Any] = {"norm_bound": NORM_BOUND} if kind == "huge" else {}
    ran = run(bench, f"{kind}-{seed}", faults=text, mode="bsp", **bound)
    outcome = counted(ran)
    if outcome.why:
        return outcome
    largest = max(float(t.abs().max()) for t in ran.model.values())
    if ran.status.restarts != 1:
        outcome.why = f"{ran.status.restarts} restarts instead of one"
    elif ran.status.refused < 5:
        outcome.why = f"{ran.status.refused} refused"
    elif not largest < 10:  # NaN is not below anything
        outcome.why = f"a parameter is {largest}"
    return outcome
