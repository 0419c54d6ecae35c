"""Rows 6, 18, 20 and 21: a `paceline run` loses its controller, its memory, all, or the time of day."""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.chaos.outcome import Outcome, Skipped, Trial
from benchmarks.chaos.running import (
    EVERY,
    PATIENCE_S,
    Bench,
    Command,
    Ran,
    Work,
    blackout,
    counted,
    notes,
    steps,
    steps_made,
)
from paceline.api.jobs import latest_checkpoint
from paceline.control import RunDirectory

LONGER = Work(epochs=20)
ORPHANS_S = 5.0
SHM = Path("/dev/shm")
CONTROL = "control.json"
"""A run directory has it when another controller can take over."""
CLOCK = Path(__file__).parent / "clock.c"
HOUR_S = 3600


def trials(bench: Bench) -> Iterator[Trial]:
    """These rows."""
    yield Trial(
        row="6",
        name="controller-killed",
        wanted="status ≤ 5 s, training does not stall",
        run=partial(controller_killed, bench),
        measure="detected_s",
        limit=5.0,
    )
    yield Trial(
        row="18",
        name="memory-owner-killed",
        wanted=f"0 left in /dev/shm after {ORPHANS_S:g} s",
        run=partial(owner_killed, bench),
        measure="figure",
        limit=0.0,
        unit="files",
    )
    yield Trial(
        row="20",
        name="everything-killed",
        wanted=f"resumed, lost ≤ {EVERY} a run",
        run=partial(everything_killed, bench),
        # Status is told twice a second: what was made since is not known to be lost.
        most_lost=EVERY,
    )
    yield Trial(row="21", name="clock-jumps", wanted="false deaths 0", run=partial(clock_jumps, bench))


def controller_killed(bench: Bench, seed: int) -> Outcome:
    """The controller gets SIGKILL: steps go on, and another one tells how the run does."""
    chance = random.Random(f"controller {seed}")
    command = Command(bench, f"controller-{seed}", "--mode", ("asp", "bsp")[seed % 2], work=LONGER)
    try:
        if not command.wait_for_steps(chance.randint(20, 200)):
            return Outcome(why=command.wait().error)
        if not (command.path / CONTROL).exists():
            raise Skipped("this Paceline has no second controller")
        before = command.status()
        at, wall = time.monotonic(), time.time()
        command.process.kill()
        fresh = _fresh_status(command, before.version, wall)
        if fresh is None:
            return Outcome(why="nobody told how the run does")
        deadline = time.monotonic() + PATIENCE_S
        while not _is_over(command) and time.monotonic() < deadline:
            time.sleep(0.02)
        made = [ended for each in steps(command.path).values() for _, ended in each]
        during = [ended for ended in made if at < ended < fresh]
        gaps = [after - before for before, after in pairwise(sorted(made))]
        around = [b - a for a, b in pairwise(sorted(e for e in made if at - 1 < e < fresh + 1))]
        outcome = counted(Ran(command.path, command.status()), LONGER)
        outcome.detected_s = fresh - at
        outcome.blackout_s = blackout(command.path, at)
        outcome.note = f"{len(during)} steps meanwhile, longest pause {max(around):.2f} s"
        if not outcome.why and max(around) > 1.0 + 10 * statistics.median(gaps):
            outcome.why = f"training stalled for {max(around):.2f} s"
        return outcome
    finally:
        command.close()


def _fresh_status(command: Command, version: int, since: float) -> float | None:
    """When status.json was written by somebody who saw more than was known before."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        status = command.status()
        if status.version > version and (command.path / "status.json").stat().st_mtime > since + 0.05:
            return time.monotonic()
        time.sleep(0.01)
    return None


def _is_over(command: Command) -> bool:
    return command.status().state in ("succeeded", "failed", "stopped")


def owner_killed(bench: Bench, seed: int) -> Outcome:
    """Who made the shared memory gets SIGKILL: a server, a worker, or all of them, in turn."""
    chance = random.Random(f"owner {seed}")
    before = _segments()
    victim = ("server:0", "worker:1", "everything")[seed % 3]
    command = Command(bench, f"owner-{seed}", "--mode", "bsp", "--link", "shm", "--checkpoint-every", "20")
    try:
        if not command.wait_for_steps(chance.randint(100, 200)):
            return Outcome(why=command.wait().error)
        if victim == "everything":
            tree, outcome = command.kill_everything(), Outcome()
        else:
            tree = command.tree()
            os.kill(command.role(victim), signal.SIGKILL)
            outcome = counted(command.wait())
            outcome.lost = 0  # row 5's business
        _, alive = psutil.wait_procs([p for p in tree if p.is_running()], timeout=ORPHANS_S)
        deadline = time.monotonic() + ORPHANS_S
        while (left := _orphans(before)) and time.monotonic() < deadline:
            time.sleep(0.1)
        outcome.figure = float(len(left))
        outcome.why = outcome.why or (f"{len(alive)} processes are left" if alive else "")
        return outcome
    finally:
        command.close()


def _segments() -> set[str]:
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def _orphans(before: set[str]) -> list[str]:
    """New files that nobody has open or mapped: of others who are at work on this machine, somebody has."""
    new = _segments() - before
    if not new:
        return []
    held = set()
    for process in psutil.process_iter():
        try:
            held |= {Path(m.path).name for m in process.memory_maps() if m.path.startswith(str(SHM))}
            held |= {Path(f.path).name for f in process.open_files() if f.path.startswith(str(SHM))}
        except (psutil.Error, OSError):
            continue
    return sorted(new - held)


def everything_killed(bench: Bench, seed: int) -> Outcome:
    """All processes of a run are killed at once, and it is resumed."""
    chance = random.Random(f"everything {seed}")
    expected = bench.undisturbed()
    options = ("--mode", "bsp", "--checkpoint-every", str(EVERY))
    command = Command(bench, f"everything-{seed}", *options)
    try:
        if not command.wait_for_steps(4 * EVERY + chance.randint(20, 200)):
            return Outcome(why=command.wait().error)
        made = steps_made(command.path) // 4
        command.kill_everything()
        kept = latest_checkpoint(RunDirectory(command.path)).version
        ran = command.resume()
    finally:
        command.close()
    outcome = counted(ran, resumed=True)
    outcome.lost = max(0, made - kept)
    if not outcome.why:
        outcome.note = "bitwise the fault-free result" if ran.is_bitwise(expected) else "not bitwise"
    return outcome


def clock_jumps(bench: Bench, seed: int) -> Outcome:
    """The wall clock of all processes jumps by an hour, forwards or backwards in turn."""
    library = _clock_library(bench)
    shift = bench.folder / f"clock-{seed}"
    shift.write_bytes(bytes(8))
    environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(shift)}
    command = Command(
        *(bench, f"clock-run-{seed}", "--mode", ("bsp", "asp")[seed // 2 % 2], "--checkpoint-every", "20"),
        *("--keep-checkpoints", "1000"),
        work=LONGER,
        environment=environment,
    )
    chance = random.Random(f"clock {seed}")
    hour = HOUR_S if seed % 2 == 0 else -HOUR_S
    try:
        if not command.wait_for_steps(chance.randint(100, 200)):
            return Outcome(why=command.wait().error)
        with shift.open("r+b") as file:
            file.write(hour.to_bytes(8, "little", signed=True))
        ran = command.wait()
    finally:
        command.close()
    outcome = counted(ran, LONGER)
    if outcome.why:
        return outcome
    if ran.status.restarts or notes(command.path):
        outcome.why = f"false deaths: {[e.get('text') for e in notes(command.path)]}"
    elif not _jumped(command.path, hour):
        outcome.why = "the clock did not jump"
    return outcome


def _jumped(path: Path, hour: int) -> bool:
    """Whether the dates of the checkpoints have an hour's jump in them: it did happen."""
    manifests = sorted((path / "checkpoints").glob("version-*/manifest.json"))
    dates = [datetime.fromisoformat(json.loads(m.read_text())["created"]).timestamp() for m in manifests]
    return any(abs(after - before - hour) < HOUR_S / 10 for before, after in pairwise(dates))


def _clock_library(bench: Bench) -> Path:
    """A library whose wall clock can be set from outside."""
    library = bench.folder / "clock.so"
    if not library.exists():
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise Skipped("no C compiler, which the clock that jumps is made with: install gcc")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(CLOCK), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Skipped(f"{compiler} does not compile {CLOCK.name}: {done.stderr[-300:]}")
    return library
