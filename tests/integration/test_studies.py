"""paceline study with real runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.api import load_study

SCRIPT = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
lr = parser.parse_args().lr
torch.manual_seed(0)
x = torch.randn(64, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch in range(100):
    for a, b in loader:
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        paceline.log(loss=loss.item())
"""


@pytest.mark.slow
def test_a_study_of_two_modes_and_two_rates(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = "study --grid mode=bsp,asp --grid arg:lr=0.1,0.001 --budget samples=480 --dir mine train.py"
    command = [sys.executable, "-m", "paceline", *words.split()]
    environment = {**os.environ, "PACELINE_RUNS": str(tmp_path / "home")}
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of them have ended already" in done.stdout  # the second time
    study = load_study(tmp_path / "mine")
    runs = study.runs
    assert set(runs["state"]) == {"succeeded"} and len(runs) == 4
    assert ((runs["samples"] >= 480) & (runs["samples"] <= 480 + 16)).all()
    assert (runs["samples_per_s"] > 0).all()
    by_rate = study.cells.groupby("lr")["final_loss"].mean()
    assert by_rate[0.1] < by_rate[0.001]
    for over, least in (("samples", 300), ("updates", 40), ("seconds", 0)):
        curves = study.curves("loss", over)
        assert len(curves) == 4 and all(curve.at[-1] > least for curve in curves)
    page = study.page_path.read_text()
    assert "loss over samples" in page and "mode bsp, lr 0.1" in page
