"""The kills of the chaos benchmark on torchft: replica groups over gloo, under its lighthouse."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks import peers
from benchmarks.peers.killed import PATIENCE_S, STEP_MS, Killed
from benchmarks.scripts.chaos import BATCH

SCRIPT = Path(__file__).parents[1] / "scripts" / "killed_torchft.py"
STEPS = 100_000
"""More than are made: the groups are ended when enough is seen."""
BEFORE = 20


class Step(NamedTuple):
    """A step of one group, as it recorded it."""

    began: float
    ended: float
    number: int
    committed: bool
    together: int
    """How many groups took part."""


class _Groups:
    """Replica groups and their lighthouse, as processes."""

    def __init__(self, folder: Path, count: int, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._log = stack.enter_context((folder / "log").open("w+b"))
        self._environment = peers.child_env(str(folder), {"OMP_NUM_THREADS": "1"})
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lighthouse = self._start("lighthouse", str(folder), str(count))
        self.wait(lambda: (folder / "lighthouse").exists())
        for number in range(count):
            self.start(number)

    def start(self, number: int) -> None:
        """A group, or another process in the place of a dead one, as a launcher would."""
        arguments = (str(number), str(self._folder), str(STEPS), str(STEP_MS))
        self._processes[number] = self._start(*arguments)

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env=self._environment,
            cwd=peers.ROOT,
            stdout=self._log,
            stderr=self._log,
        )
        self._stack.callback(peers.end_tree, process)
        return process

    def kill(self, number: int) -> float:
        """SIGKILL; returns when."""
        at = time.monotonic()
        os.kill(self._processes[number].pid, signal.SIGKILL)
        self._processes.pop(number).wait()
        return at

    def steps(self, number: int) -> list[Step]:
        """What a group recorded so far."""
        found = []
        with suppress(OSError):
            for line in (self._folder / f"steps-{number}.csv").read_text().splitlines():
                began, ended, step, committed, together = line.split(",")
                found.append(Step(float(began), float(ended), int(step), committed == "1", int(together)))
        return found

    def wait(self, done: Callable[[], bool]) -> None:
        """Raises RuntimeError with the log when a process ends, or nothing happens for long."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            ended = [p for p in (self._lighthouse, *self._processes.values()) if p.poll() is not None]
            if ended or time.monotonic() > deadline:
                text = (self._folder / "log").read_text(errors="replace")
                raise RuntimeError(f"torchft did not go on:\n{text[-2000:]}")
            time.sleep(0.01)


def torchft(seed: int, *, groups: int) -> Killed:
    """One of several replica groups gets SIGKILL, and another process takes its place at once.

    Lost are steps that a group computed and that were not committed: those of the others while they did not
    know yet, and the one that the dead group was at.
    """
    peers.need("torchft", "torchft")
    chance = random.Random(f"torchft {groups} {seed}")
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as stack:
        running = _Groups(Path(name), groups, stack)
        after = BEFORE + chance.randint(5, 60)

        def together() -> bool:
            """All groups have made that many steps, the last of them together."""
            made = [running.steps(number) for number in range(groups)]
            return all(len(steps) >= after and steps[-1].together == groups for steps in made)

        running.wait(together)
        victim = chance.randrange(groups)
        others = [number for number in range(groups) if number != victim]
        at = running.kill(victim)
        running.start(victim)

        def next_steps() -> list[Step]:
            found = [step for number in others for step in running.steps(number)]
            return [step for step in found if step.began > at and step.committed]

        running.wait(lambda: bool(next_steps()))
        running.wait(lambda: any(step.began > at and step.committed for step in running.steps(victim)))
        back = min(step.ended for step in running.steps(victim) if step.began > at and step.committed)
        failed = sum(
            not step.committed and step.ended > at for number in others for step in running.steps(number)
        )
        return Killed(
            min(step.ended for step in next_steps()) - at,
            lost=failed + 1,
            samples=(failed + 1) * BATCH,
            back_s=back - at,
        )
