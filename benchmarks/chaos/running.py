"""Runs to be disturbed: under a controller of ours, in this process, and as a `paceline run`."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.chaos.outcome import Outcome
from benchmarks.scripts.chaos import BATCH
from paceline.control import Controller, RunDirectory
from paceline.exceptions import RoleFailed
from paceline.observe import RunStatus
from paceline.plan import Job, make_plan
from paceline.ps.saving import model_state
from paceline.storage.checkpoint import latest
from paceline.testing import KeptEngine, faulty

SCRIPT = Path(__file__).parents[1] / "scripts" / "chaos.py"
EPOCHS, BATCHES, STEP_MS = 6, 60, 10
EVERY = 20
"""Updates between two checkpoints."""
PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run computes."""

    epochs: int = EPOCHS
    batches: int = BATCHES
    step_ms: float = STEP_MS

    def arguments(self, folder: Path) -> tuple[str, ...]:
        return (str(folder), str(self.epochs), str(self.batches), str(self.step_ms))

    @property
    def samples(self) -> int:
        """In an epoch."""
        return self.batches * BATCH


@dataclass
class Bench:
    """What all rows share."""

    folder: Path
    quick: bool
    seeds: int
    minutes: float
    _models: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @cached_property
    def engine(self) -> KeptEngine:
        return KeptEngine()

    def close(self) -> None:
        if "engine" in self.__dict__:
            self.engine.shut_down()

    def undisturbed(self, mode: str = "bsp", **settings: Any) -> dict[str, Tensor]:
        """The model of a run without faults; computed once."""
        key = f"{mode} {sorted(settings.items())}"
        if key not in self._models:
            ran = run(self, f"undisturbed-{len(self._models)}", mode=mode, **settings)
            assert not ran.error, ran.error
            self._models[key] = ran.model
        return self._models[key]


@dataclass
class Ran:
    """A run that is over."""

    path: Path
    status: RunStatus
    error: str = ""
    fault: "Fault | None" = None

    @property
    def model(self) -> dict[str, Tensor]:
        """Of the last checkpoint."""
        found = latest(self.path / "checkpoints")
        assert found is not None, f"{self.path} has no checkpoint"
        return model_state(found)

    def is_bitwise(self, other: Mapping[str, Tensor]) -> bool:
        mine = self.model
        return mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)


class Fault:
    """Something that is done to a run once its workers have made so many steps, in a thread of its own."""

    def __init__(self, after: int, do: Callable[["Fault"], None]) -> None:
        self.after = after
        self.at: float | None = None
        """When it happened, on the monotonic clock."""
        self.wall: float | None = None
        self.notes: dict[str, Any] = {}
        self._do = do
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, path: Path) -> None:
        """Begin to count steps."""

        def wait() -> None:
            while not self._over.wait(0.005):
                if steps_made(path) >= self.after:
                    self._do(self)
                    return

        self._thread = threading.Thread(target=wait, name="fault")
        self._thread.start()

    def happens(self) -> None:
        """It happens now."""
        self.at, self.wall = time.monotonic(), time.time()

    @property
    def over(self) -> bool:
        """Whether the run is."""
        return self._over.is_set()

    def end(self) -> None:
        """The run is over."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def wait(self, seconds: float) -> None:
        """Until so much later, or the end of the run."""
        self._over.wait(seconds)


def kill(engine: KeptEngine, role: str, number: int = signal.SIGKILL) -> Callable[[Fault], None]:
    """A fault: somebody gets a signal."""

    def do(fault: Fault) -> None:
        pid = pid_of(engine, role)
        fault.happens()
        os.kill(pid, number)

    return do


def pid_of(engine: KeptEngine, role: str) -> int:
    """The process that is in this role; waits for one that is about to start."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        pid = dict(engine.pids()).get(role)
        if pid is not None:
            return pid
        time.sleep(0.005)
    raise ProcessLookupError(f"there is no {role}")


def run(
    bench: Bench,
    name: str,
    *,
    fault: Fault | None = None,
    faults: str = "",
    work: Work = Work(),
    watch: Callable[[RunStatus], None] | None = None,
    **settings: Any,
) -> Ran:
    """A run under a controller in this process, with a fault from outside or injected ones."""
    path = bench.folder / name
    usual = {"workers": 4, "servers": 2, "threads": 1, "deadline_s": 30.0, "max_restarts": 3}
    job = Job(script=str(SCRIPT), args=work.arguments(path), run_dir=str(path), **{**usual, **settings})
    with faulty(faults):
        plan = make_plan(job)
        where = RunDirectory.create(job, plan=plan)
        controller = Controller(
            plan, bench.engine, where, watch=lambda status, _: watch(status) if watch is not None else None
        )
        error = ""
        if fault is not None:
            fault.watch(path)
        try:
            controller.run()
        except RoleFailed as failure:
            error = str(failure)
        finally:
            if fault is not None:
                fault.end()
    return Ran(path, controller.status, error, fault)


def counted(ran: Ran, work: Work = Work(), *, resumed: bool = False) -> Outcome:
    """What a run's own books, and the record of every push, say.

    Args:
        resumed: its workers count anew, so pushes are not told apart by their numbers but added up.
    """
    if ran.error or ran.status.state != "succeeded":
        return Outcome(why=ran.error.splitlines()[0] if ran.error else f"it {ran.status.state}")
    accounts = [a for a in ran.status.leases if a["applied"] or a["refused"]]
    missing = sum(abs(a["samples"] - a["applied"] - a["refused"]) for a in accounts)
    missing += work.samples * abs(work.epochs - len(accounts)) if work.epochs <= 100 else 0
    rows = pushes(ran.path)
    repeated = len(rows) - len({(r["worker"], r["incarnation"], r["sequence"]) for r in rows})
    if resumed:
        repeated = max(0, sum(int(r["samples"]) for r in rows) - work.epochs * work.samples)
    outcome = Outcome(duplicated=repeated, lost=ran.status.lost_updates + ran.status.lost, missing=missing)
    if ran.fault is not None:
        if ran.fault.at is None or ran.fault.wall is None:
            outcome.why = "the run was over before the fault"
            return outcome
        times = [datetime.fromisoformat(e["at"]).timestamp() for e in notes(ran.path)]
        outcome.detected_s = min(
            (t - ran.fault.wall for t in times if t > ran.fault.wall - 0.01), default=None
        )
        outcome.blackout_s = blackout(ran.path, ran.fault.at)
    return outcome


def pushes(path: Path) -> list[dict[str, str]]:
    """The record of every applied push, in order."""
    with (path / "pushes.csv").open() as file:
        return list(csv.DictReader(file))


def notes(path: Path) -> list[dict[str, Any]]:
    """What the controller said to the user."""
    return [e for e in RunDirectory(path).read_events() if e.get("kind") == "note"]


def steps(path: Path) -> dict[int, list[tuple[float, float]]]:
    """By worker: when the exchange of each of its steps began and was over."""
    found = {}
    for file in path.glob("steps-*.csv"):
        lines = file.read_text().splitlines()
        found[int(file.stem.partition("-")[2])] = [
            (float(began), float(ended)) for began, _, ended in (line.partition(",") for line in lines)
        ]
    return found


def steps_made(path: Path) -> int:
    """Of all workers."""
    return sum(file.stat().st_size for file in path.glob("steps-*.csv")) // _LINE


_LINE = len("12345.678901,12345.678901\n")
"""About: it only decides when a fault happens."""


def blackout(path: Path, at: float) -> float | None:
    """Seconds from a moment to the end of the next step whose exchange began after it."""
    ends = [ended for each in steps(path).values() for began, ended in each if began > at]
    return min(ends) - at if ends else None


class Command:
    """A `paceline run` of its own, in a folder of its own."""

    def __init__(
        self,
        bench: Bench,
        name: str,
        *options: str,
        work: Work = Work(),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.path = bench.folder / name
        self.work = work
        self._environment = {**os.environ, "PACELINE_RUNS": str(bench.folder), **(environment or {})}
        command = [sys.executable, "-m", "paceline", "run", "--quiet", "--workers", "4", "--servers", "2"]
        command += ["--threads", "1", "--deadline", "30", "--run-dir", str(self.path), *options]
        command += [str(SCRIPT), *work.arguments(self.path)]
        with (bench.folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        self._log = bench.folder / f"{name}.log"
        self._known: list[psutil.Process] = []

    def status(self) -> RunStatus:
        """As status.json says; an empty one while there is none."""
        try:
            return RunStatus.from_json(json.loads((self.path / "status.json").read_text()))
        except (OSError, ValueError):
            return RunStatus(run_dir=str(self.path))

    def role(self, name: str) -> int:
        """The process in a role, as soon as status.json has it."""
        role, _, rank = name.partition(":")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            status = self.status()
            known = (status.workers if role == "worker" else status.servers).get(int(rank))
            if known is not None and known.pid is not None:
                return known.pid
            time.sleep(0.05)
        raise TimeoutError(f"{name} has not said hello")

    def wait_for_steps(self, count: int) -> bool:
        """Until the workers have made so many; False if it ended before."""
        deadline = time.monotonic() + PATIENCE_S
        while steps_made(self.path) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        self._known = self.tree()
        return True

    def wait(self) -> Ran:
        """Until it is over."""
        code = self.process.wait(PATIENCE_S)
        said = self._log.read_text(errors="replace").strip()
        return Ran(self.path, self.status(), error=said[-500:] or f"exit code {code}" if code else "")

    def resume(self) -> Ran:
        """Go on from the last checkpoint, to the end."""
        command = [sys.executable, "-m", "paceline", "resume", "--quiet", str(self.path)]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        return Ran(self.path, self.status(), error=done.stderr[-500:] if done.returncode else "")

    def tree(self) -> list[psutil.Process]:
        """All its processes."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def kill_everything(self) -> list[psutil.Process]:
        """All of it at once: nobody gets to see another one's end."""
        tree = self.tree()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in tree:
                try:
                    os.kill(process.pid, number)
                except ProcessLookupError:
                    continue
        self.process.wait()
        return tree

    def close(self) -> None:
        """End what is left, also of a run whose first controller is dead."""
        if self.process.poll() is None:
            self.kill_everything()
        for process in self._known:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in [*process.children(recursive=True), process]:
                    each.kill()
