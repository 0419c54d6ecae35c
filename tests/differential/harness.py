"""Runs a script in every way, compares, and keeps scripts that fail as files.

Plain PyTorch and `prepare` alone run in this process. Runs are real: the controller, servers and workers of
`paceline run`, from a fork server that is shared by all cases (about 0.3 s each).
"""

import contextlib
import math
import os
import random
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import paceline.worker.session as sessions
from paceline.api.jobs import latest_checkpoint
from paceline.control import Controller, RunDirectory
from paceline.exceptions import RoleFailed
from paceline.plan import Job, make_plan
from paceline.ps.saving import model_state
from paceline.testing import KeptEngine
from tests.differential.description import Case
from tests.differential.records import Record, different_bits, far_apart
from tests.differential.source import script_of

__all__ = ["Disagreement", "Harness", "script_in_process"]


NUDGED = 4
"""Number of times that the whole batch is computed with other last bits, where a run is not within 1e-10."""


class Disagreement(AssertionError):
    """Two ways of running a script that ought to agree and do not."""


def script_in_process(source: str, how: str, name: str = "case.py") -> dict[str, Any]:
    """Run a script as `python case.py HOW` would, in this process. Returns its globals."""
    code = compile(source, name, "exec")
    before = sessions._current
    sessions._current = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a run, where every role has a core
    state = torch.get_rng_state(), random.getstate(), np.random.get_state(), torch.get_default_dtype()
    module: dict[str, Any] = {"__name__": "__main__", "__file__": name}
    try:
        with mock.patch.object(sys, "argv", [name, how, ""]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code.replace(co_filename=name), module)
    finally:
        sessions._current = before
        torch.set_num_threads(threads)
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])
        torch.set_default_dtype(state[3])
    return module


class Harness:
    """Checks one case after the other.

    Args:
        directory: for run directories, which are removed again.
        artifacts: where scripts that fail are kept.
    """

    def __init__(self, engine: KeptEngine, directory: Path, artifacts: Path) -> None:
        self._engine = engine
        self._directory = directory
        self.kept = artifacts / "failing_case.py"
        """Where the last script that failed is."""
        self.checked = 0

    def check(self, case: Case) -> None:
        """Raise Disagreement, with the script and where it was written, if the ways do not agree."""
        source = script_of(case)
        clip = 0.5 if case.way == "bsp" and case.clip == "norm" else None
        found = self.disagreement(
            source, way=case.way, world=case.world, clip_norm=clip, refused=case.refused
        )
        if found is not None:
            raise Disagreement(self.keep(source, found))
        self.checked += 1

    def keep(self, source: str, found: str) -> str:
        """Write a failing script to a file. While hypothesis shrinks it, the last one is the smallest."""
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        self.kept.write_text(source)
        return f"{found}\n--- {self.kept} ---\n{source}"

    def disagreement(
        self, source: str, *, way: str, world: int, clip_norm: float | None = None, refused: str | None = None
    ) -> str | None:
        """What differs between the ways to run a script; None if nothing does.

        Args:
            refused: a word of the error with which the run must refuse it.
        """
        plain = self._local(source, "plain")
        alone = self._local(source, "alone")
        if isinstance(plain, str):
            return f"plain PyTorch fails: {plain}"
        if not all(math.isfinite(loss) for *_, loss in plain["losses"]):
            return None  # a run refuses gradients that are not finite; plain PyTorch applies them
        if isinstance(alone, str):
            return f"alone: {alone}"
        if found := different_bits(plain, alone):
            return f"alone differs from plain PyTorch: {found}"
        records = self._run(source, mode=way, workers=world, clip_norm=clip_norm)
        if refused is not None:
            said = isinstance(records, str) and "UsageError" in records and refused in records
            return None if said else f"the run ought to refuse it ({refused}): {records!r:.500}"
        if isinstance(records, str):
            return f"the run: {records}"
        if way == "asp":
            found = different_bits(plain, records[0])
            return None if found is None else f"one asp worker differs from plain PyTorch: {found}"
        whole = self._local(source, "whole")
        if isinstance(whole, str):
            return f"the whole batch: {whole}"
        found = far_apart(whole, records)
        if found is not None:
            found = self._beyond_rounding(source, whole, records)
        return None if found is None else f"two bsp workers differ from the whole batch: {found}"

    def _beyond_rounding(self, source: str, whole: Record, records: list[Record]) -> str | None:
        """How the run differs from the whole batch by more than the script itself makes of rounding."""
        nudged = []
        for number in range(1, NUDGED + 1):
            record = self._local(source, f"whole:{number}")
            if isinstance(record, str):
                return f"the whole batch with nudged inputs: {record}"
            nudged.append(record)
        return far_apart(whole, records, nudged)

    def _local(self, source: str, how: str) -> Record | str:
        """Its record, or the error that it ended with."""
        try:
            record: Record = script_in_process(source, how)["RESULT"]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return record

    def _run(self, source: str, *, workers: int, **settings: Any) -> list[Record] | str:
        """The workers' records, or the error that the run ended with. Checks what the run saved, too."""
        self._directory.mkdir(parents=True, exist_ok=True)
        script, out, runs = (self._directory / name for name in ("script.py", "out", "run"))
        for old in (out, runs):
            shutil.rmtree(old, ignore_errors=True)
        out.mkdir()
        script.write_text(source)
        job = Job(
            script=str(script),
            args=("run", str(out)),
            workers=workers,
            servers=1,
            threads=1,
            deadline_s=60.0,
            run_dir=str(runs),
            spans=False,
            **settings,
        )
        plan = make_plan(job)
        with _unsynced():
            run = RunDirectory.create(job, plan=plan)
            controller = Controller(plan, self._engine, run)
            try:
                controller.run()
            except RoleFailed as error:
                return str(error)
        records = [torch.load(out / f"run-{rank}.pt") for rank in range(workers)]
        saved = model_state(latest_checkpoint(run))
        if found := different_bits(records[0]["model"], saved):
            return f"the saved model differs from worker 0's: {found}"
        return records


@contextlib.contextmanager
def _unsynced() -> Iterator[None]:
    """Nothing here has to survive a power cut."""
    with mock.patch.object(os, "fsync", lambda _: None):
        yield
