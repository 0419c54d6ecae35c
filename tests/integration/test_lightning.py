"""PyTorch Lightning's Trainer in a run, with the real library."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import PRELUDE, Ran

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
Start = Callable[..., Ran]


@pytest.fixture(autouse=True)
def installed() -> None:
    if subprocess.run([sys.executable, "-c", "import lightning"], capture_output=True).returncode:
        pytest.skip("PyTorch Lightning is not installed: pip install 'paceline[lightning]'")


SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import lightning as L
from paceline.integrations import PacelineStrategy

batch, epochs, samples = (int(each) for each in sys.argv[1:4])
draw = torch.Generator().manual_seed(1)
X = torch.randn(samples, 4, generator=draw, dtype=torch.float64)
Y = X @ torch.randn(4, 1, generator=draw, dtype=torch.float64)
seen = {"validations": 0}

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch, i):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, i):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        seen["validations"] += not self.trainer.sanity_checking

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}

def fit(**settings):
    trainer = L.Trainer(
        strategy=PacelineStrategy(), max_epochs=epochs, log_every_n_steps=1, default_root_dir=RUN_DIR,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    )
    net = Net()
    trainer.fit(
        net,
        DataLoader(TensorDataset(X, Y), batch_size=batch, shuffle=True),
        DataLoader(TensorDataset(X, Y), batch_size=32),
    )
    weights = [p.flatten().tolist() for p in net.parameters()]
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    files = sorted(p.name for p in RUN_DIR.rglob("*.ckpt"))
    result({
        "weights": weights, "steps": trainer.global_step, "epoch": trainer.current_epoch, "rate": rate,
        "val_loss": float(trainer.callback_metrics["val_loss"]), "files": files, **seen,
    })
"""


def alone(tmp_path: Path, source: str, *args: str) -> Any:
    """The same script as `python script.py`."""
    directory = tmp_path / "alone"
    directory.mkdir()
    script = tmp_path / "alone.py"
    header = f"import os; os.environ['TEST_RUN_DIR'] = {str(directory)!r}\n"
    script.write_text(header + PRELUDE + textwrap.dedent(source))
    done = subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((directory / "result-0.json").read_text())


def test_two_workers_equal_one_process_with_the_whole_batch(run: Start, tmp_path: Path) -> None:
    expected = alone(tmp_path, SCRIPT + "fit()", "16", "3", "96")
    ran = run(SCRIPT + "fit()", mode="bsp", workers=2, servers=2, args=("8", "3", "96"))
    assert ran.error is None, ran.log("worker", 0)
    found = ran.results()
    for worker in (0, 1):
        for mine, whole in zip(found[worker]["weights"], expected["weights"], strict=True):
            assert mine == pytest.approx(whole, abs=1e-10)
        for name in ("steps", "epoch", "rate", "validations"):
            assert found[worker][name] == expected[name], name
        assert found[worker]["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-10)
    assert expected["validations"] == 3 and expected["steps"] == 18
    assert len(list(ran.run.path.rglob("*.ckpt"))) == 1, "worker 0 writes Lightning's checkpoint"
    assert ran.status.metrics["val_loss"] == pytest.approx(expected["val_loss"])
    assert "val_loss" in ran.status.workers[1].metrics


@pytest.mark.parametrize("mode", ["bsp", "asp", "local:2"])
def test_every_sample_counts_and_every_epoch_is_validated(run: Start, mode: str) -> None:
    """Seven batches for two workers: neither knows beforehand how many it gets."""
    ran = run(SCRIPT + "fit()", mode=mode, workers=2, args=("8", "3", "56"))
    assert ran.error is None, ran.log("worker", 0)
    assert ran.status.samples == 3 * 56 and ran.status.skipped == 0
    assert [each["validations"] for each in ran.results().values()] == [3, 3]
    values = {round(each["val_loss"], 12) for each in ran.results().values()}
    assert len(values) == 1 or mode == "asp", "the run's parameters are validated"


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_an_early_stop_of_one_worker_stops_all(run: Start, mode: str) -> None:
    source = """
    stops = [L.pytorch.callbacks.EarlyStopping("val_loss", min_delta=1e9, patience=1)] if RANK == 1 else []
    fit(callbacks=stops)
    """
    ran = run(SCRIPT + textwrap.dedent(source), mode=mode, workers=2, args=("8", "50", "96"))
    assert ran.error is None, ran.log("worker", 0)
    epochs = [each["epoch"] for each in ran.results().values()]
    assert max(epochs) < 50
    if mode == "bsp":
        assert ran.status.samples == 2 * 96
    assert ran.status.ended_early


def test_a_resume_is_refused(run: Start) -> None:
    first = run(SCRIPT + "fit()", mode="bsp", workers=2, args=("8", "2", "96"))
    assert first.error is None, first.log("worker", 0)
    again = run(SCRIPT + "fit()", mode="bsp", workers=2, args=("8", "4", "96"), resume=first)
    assert again.error is not None and "cannot go on from a checkpoint of the run yet" in again.error


def test_limits_that_cannot_be_kept_are_refused(run: Start) -> None:
    ran = run(SCRIPT + "fit(limit_train_batches=0.5)", mode="bsp", workers=2, args=("8", "2", "96"))
    assert ran.error is not None and "limit_train_batches=0.5" in ran.error
    ran = run(SCRIPT + "fit(limit_train_batches=2)", mode="asp", workers=2, args=("8", "2", "96"))
    assert ran.error is None, ran.log("worker", 0)
    assert [each["steps"] for each in ran.results().values()] == [4, 4]
