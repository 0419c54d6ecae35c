"""paceline stop: another terminal ends a run, in order."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.api.jobs import latest_checkpoint
from paceline.observe import RunStatus
from tests.speed import first

SOURCE = """
torch.manual_seed(0)
x = torch.randn(64, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for epoch, batches in until_enough(loader):
    for a, b in batches:
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


class Stopping:
    """A watch that runs the command when the run has made some updates."""

    def __init__(self, *words: str) -> None:
        self._words = words
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, status: RunStatus, lines: list[str], engine: Any) -> None:
        if self.process is None and status.version >= 10:
            code = "from paceline.cli import main; main()"
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "stop", status.run_dir, *self._words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "COLUMNS": "300"},
            )

    def said(self) -> tuple[int, str]:
        assert self.process is not None
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


@pytest.mark.parametrize(("mode", "words"), first(1, [("asp", ()), ("bsp", ()), ("bsp", ("--now",))]))
def test_stop(run: Any, mode: str, words: tuple[str, ...]) -> None:
    stopping = Stopping(*words)
    ran = run(SOURCE, workers=2, threads=1, mode=mode, watch=stopping)
    code, said = stopping.said()
    assert code == 0, said
    status = ran.status
    assert (status.state, status.stopped_by) == ("stopped", signal.SIGTERM)
    assert f"Run {ran.run.id} stopped at update {status.version:,}." in said
    if words:
        assert status.checkpoints == []
        assert "It has no checkpoint to go on from.\nnote: stopped without waiting for the checkpoint" in said
        return
    assert latest_checkpoint(ran.run).version >= 10
    assert f"`paceline resume {ran.run.id}` goes on there" in said
    (Path(ran.run.path) / "enough").touch()
    again = run(SOURCE, workers=2, threads=1, mode=mode, resume=ran)
    assert (again.status.state, again.error) == ("succeeded", None)
