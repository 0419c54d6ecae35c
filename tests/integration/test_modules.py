"""paceline run -m: a module of a package, run, planned and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.api import inspect_script
from paceline.api.jobs import latest_checkpoint
from paceline.control import Controller, RunDirectory
from paceline.plan import Job, make_plan
from paceline.testing import KeptEngine

TRAIN = """
import json, os, pathlib, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline
from .model import make
from .. import SCALE

torch.manual_seed(0)
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]) * SCALE)
loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for _ in range(2):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if paceline.is_main():
    seen = [sys.argv, sys.path[0], __package__]
    pathlib.Path(sys.path[0], "seen.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "vision" / "digits"
    package.mkdir(parents=True)
    (tmp_path / "vision" / "__init__.py").write_text("SCALE = 2")
    (package / "__init__.py").touch()
    (package / "model.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(4, 1)")
    (package / "train.py").write_text(TRAIN)
    return Job(script="vision.digits.train", module=True, args=("--lr", "0.1"), threads=1, deadline_s=60.0)


def test_a_module_runs_and_is_resumed(job: Job, engine: KeptEngine, tmp_path: Path) -> None:
    plan = make_plan(job)
    run = RunDirectory.create(job, plan=plan)
    assert Controller(plan, engine, run).run().state == "succeeded"
    argv, search, package = json.loads((tmp_path / "seen.json").read_text())
    assert argv == [str(tmp_path / "vision" / "digits" / "train.py"), "--lr", "0.1"]
    assert (search, package) == (str(tmp_path), "vision.digits")
    again = run.read_job()
    assert again == job and "-train-" in run.id
    (tmp_path / "seen.json").unlink()
    run.record_resume(again, plan=plan)
    status: Any = Controller(make_plan(again), engine, run, resume=latest_checkpoint(run).path).run()
    assert status.state == "succeeded" and (tmp_path / "seen.json").exists()


@pytest.mark.slow
def test_a_module_is_planned(job: Job) -> None:
    facts = inspect_script(make_plan(job))
    assert (facts.parameters, facts.samples) == (5, 16)
