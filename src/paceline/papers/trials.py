"""Runs training scripts one after the other, alone and as runs, and reads what they recorded."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil

from paceline.api.jobs import run_job
from paceline.api.runs import load_run
from paceline.comm.impairment import LINK_CONDITIONS
from paceline.exceptions import PacelineError
from paceline.observe.analyse.facts import Facts, facts_of
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.phase import COMPUTATION, Phase
from paceline.observe.record.tables import ROLES
from paceline.papers.step_times import StepTimes, step_times
from paceline.plan import Job
from paceline.testing.environment import environment

__all__ = ["TrialFacts", "Trials"]

_TAIL = 2000
"""Characters of a failed script's output that are repeated."""
_WAITING = (Phase.WAIT, Phase.PULL)


@dataclass(frozen=True, kw_only=True)
class TrialFacts:
    """What a run recorded."""

    facts: Facts
    workers: list[StepTimes]
    train_s: float
    """From the first step's begin to the last step's end."""
    idle: float
    """Share of a step in which a worker waited for parameters; without each worker's first and last step."""
    computing_s: float
    """Seconds that a worker computed, mean of the workers."""
    cpu: float
    """Share of this machine's cores that the run's roles used, mean over training."""
    memory: float
    """Share of this machine's memory that the run's roles used at most."""
    written: int
    """Bytes that the roles wrote to disks."""


class Trials:
    """Runs scripts below a folder.

    Args:
        folder: for the runs, which are removed after they were read.
        tell: shows a line of progress.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._folder, self._tell = folder, tell

    def alone(self, name: str, module: str, args: Sequence[str], *, threads: int) -> list[StepTimes]:
        """Run `python -m module args` by itself, with so many threads."""
        with self._place(name) as place:
            done = subprocess.run(
                [sys.executable, "-m", module, "--folder", str(place), *args],
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise PacelineError(f"{name}: the script failed alone.\n{done.stderr[-_TAIL:]}")
            return step_times(place)

    def run(self, name: str, job: Job, *, conditions: str = "") -> TrialFacts:
        """Run a job whose script is a module that takes `--folder`.

        Args:
            conditions: of its links, as in PACELINE_LINK_CONDITIONS.
        """
        with self._place(name) as place, contextlib.ExitStack() as settings:
            settings.enter_context(environment("PACELINE_RUNS", str(place / "runs")))
            if conditions:
                settings.enter_context(environment(LINK_CONDITIONS, conditions))
            path = place / "run"
            arguments = ("--folder", str(place), *job.args)
            status = run_job(replace(job, module=True, args=arguments, run_dir=str(path), keep_checkpoints=1))
            if status.state == "stopped":
                raise KeyboardInterrupt
            if status.state != "succeeded":
                raise PacelineError(f"{name}: the run {status.state}: {status.error}")
            return _trial(load_run(path), step_times(place))

    @contextlib.contextmanager
    def _place(self, name: str) -> Iterator[Path]:
        self._tell(name)
        place = self._folder / "".join(c if c.isalnum() else "-" for c in name)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _trial(run: RunData, workers: list[StepTimes]) -> TrialFacts:
    facts = facts_of(run)
    status = run.status
    idle, computing = _step_shares(run)
    cpu, memory, written = _used(run)
    return TrialFacts(
        facts=facts,
        workers=workers,
        train_s=max(0.0, status.ended_s - status.startup_s),
        idle=idle,
        computing_s=computing,
        cpu=cpu,
        memory=memory,
        written=written,
    )


def _step_shares(run: RunData) -> tuple[float, float]:
    """The idle share of the workers' inner steps, and their mean seconds of computing in all steps."""
    spans = run.columns("spans")
    main = (spans["role"] == ROLES.index("worker")) & (spans["lane"] == 0)
    idle = total = computing = 0
    ranks = np.unique(spans["rank"][main])
    for rank in ranks:
        mine = main & (spans["rank"] == rank)
        steps = spans["step"][mine]
        inside = (steps > steps.min()) & (steps < steps.max())
        ns, phases = spans["ns"][mine], spans["phase"][mine]
        idle += int(ns[inside & np.isin(phases, _WAITING)].sum())
        total += int(ns[inside].sum())
        computing += int(ns[np.isin(phases, tuple(COMPUTATION))].sum())
    return (idle / total if total else 0.0), computing / 1e9 / max(1, len(ranks))


def _used(run: RunData) -> tuple[float, float, int]:
    """Mean share of the cores, highest share of the memory, and bytes written, of all roles together."""
    table = run.columns("resources")
    roles = table["role"] != ROLES.index("host")
    if not roles.any():
        return 0.0, 0.0, 0
    _, at = np.unique(table["time"][roles], return_inverse=True)
    cpu = np.bincount(at, table["cpu"][roles])
    memory = np.bincount(at, table["memory"][roles])
    key = table["role"][roles].astype(np.int64) << 32 | table["rank"][roles].astype(np.int64)
    written = sum(int(table["written"][roles][key == each].max()) for each in np.unique(key))
    busy = cpu[cpu >= cpu.max() / 2]
    cores = len(os.sched_getaffinity(0))
    return float(busy.mean()) / cores, float(memory.max()) / psutil.virtual_memory().total, written
