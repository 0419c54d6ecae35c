"""Real runs: real processes, real sockets, a fork server shared by all tests of a session."""

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.api import export_run
from paceline.control import Controller, RunDirectory
from paceline.control.tail import Tail
from paceline.exceptions import RoleFailed
from paceline.observe import RunStatus
from paceline.plan import Job, make_plan
from paceline.testing import KeptEngine


@dataclass
class Ran:
    """A finished run."""

    status: RunStatus
    run: RunDirectory
    error: str | None

    @property
    def model(self) -> dict[str, torch.Tensor]:
        """The exported model."""
        target = self.run.path / "exported.safetensors"
        export_run(self.run, target)
        return load_file(target)

    def log(self, role: str, rank: int) -> str:
        """All that it wrote, and that is said of it, in order."""
        pieces = Tail(self.run.log_path(role, rank)).read_all()
        return b"".join(data for _, data in pieces).decode()

    def results(self) -> dict[int, Any]:
        """What the workers' scripts wrote with `result(...)`, by rank."""
        return {
            int(p.stem.split("-")[1]): json.loads(p.read_text()) for p in self.run.path.glob("result-*.json")
        }


PRELUDE = """
import contextlib, itertools, json, os, sys, signal, pathlib
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

RANK = paceline.rank()
RUN_DIR = pathlib.Path(os.environ["TEST_RUN_DIR"])

def result(value):
    (RUN_DIR / f"result-{RANK}.json").write_text(json.dumps(value))

def until_enough(loader):
    # Epochs, each with its batches, until the test has made the file `enough`. Who sees it while it has a
    # batch says which epoch is the last: the one after its own, since others may have done the last batches
    # in its place and be there already; but nobody is further than that, so all hear of it in time.
    enough, last = RUN_DIR / "enough", RUN_DIR / "last"
    def batches(epoch):
        for batch in loader:
            if enough.exists() and not last.exists():
                mine = RUN_DIR / f"last-{os.getpid()}"
                mine.write_text(str(epoch + 1))
                with contextlib.suppress(FileExistsError):
                    os.link(mine, last)  # whoever says it first
            yield batch
    for epoch in itertools.count():
        if last.exists() and epoch > int(last.read_text()):
            return
        yield epoch, batches(epoch)
"""


@pytest.fixture
def run(engine: KeptEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run a script (source text; PRELUDE comes before it) as a job: run(source, workers=2, mode="bsp", …).

    Keyword arguments are Job's fields; `args` the script's; `resume` an earlier Ran to go on from;
    `watch(status, lines, engine)` is called about ten times a second.
    """
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    count = iter(range(1000))

    def start(
        source: str,
        *,
        resume: Ran | None = None,
        watch: Callable[[RunStatus, list[str], KeptEngine], None] | None = None,
        **settings: Any,
    ) -> Ran:
        number = next(count)
        directory = resume.run.path if resume is not None else tmp_path / f"run{number}"
        script = tmp_path / f"script{number}.py"
        header = f"import os; os.environ['TEST_RUN_DIR'] = {str(directory)!r}\n"
        script.write_text(header + PRELUDE + textwrap.dedent(source))
        job = Job(**{"script": str(script), "deadline_s": 60.0, "run_dir": str(directory), **settings})
        plan = make_plan(job)
        checkpoint = None
        if resume is None:
            where = RunDirectory.create(job, plan=plan)
        else:
            from paceline.api.jobs import latest_checkpoint

            where = resume.run
            checkpoint = latest_checkpoint(where).path
            where.record_resume(job, plan=plan)
        controller = Controller(
            plan,
            engine,
            where,
            resume=checkpoint,
            watch=None if watch is None else lambda status, lines: watch(status, lines, engine),
        )
        try:
            controller.run()
        except RoleFailed as error:
            return Ran(controller.status, where, str(error))
        return Ran(controller.status, where, None)

    return start
