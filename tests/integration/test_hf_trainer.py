"""Hugging Face's Trainer in a run, with the real library, on a model made from a configuration."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Ran
from tests.integration.test_lightning import alone

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
Start = Callable[..., Ran]


@pytest.fixture(autouse=True)
def installed() -> None:
    code = "import transformers, accelerate"
    if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode:
        pytest.skip("transformers and accelerate are not installed: pip install 'paceline[transformers]'")


SCRIPT = """
import warnings
warnings.simplefilter("ignore")
from paceline.integrations import PacelineTrainer as Trainer
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

batch, epochs, samples = (int(each) for each in sys.argv[1:4])
draw = torch.Generator().manual_seed(1)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 50, (samples, 12), generator=draw)]
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)).double()
seen = {"evaluations": 0}

class Count(TrainerCallback):
    def on_evaluate(self, args, state, control, **rest):
        seen["evaluations"] += 1

def train(callbacks=(), **settings):
    args = TrainingArguments(**{
        "output_dir": str(RUN_DIR / "out"), "per_device_train_batch_size": batch, "seed": 3,
        "num_train_epochs": epochs, "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "epoch",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "optim": "sgd", "learning_rate": 0.5,
        "max_grad_norm": 0.0, **settings,
    })
    trainer = Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data[:8], callbacks=[Count(), *callbacks]
    )
    trainer.train()
    found = {
        "weights": [p.flatten()[:20].tolist() for p in model.parameters()],
        "steps": trainer.state.global_step,
        "rate": trainer.optimizer.param_groups[0]["lr"], **seen,
    }
    result({**found, "eval_loss": trainer.evaluate()["eval_loss"]})
    trainer.save_model(str(RUN_DIR / "final"))
"""


def test_two_workers_equal_one_process_with_the_whole_batch(run: Start, tmp_path: Path) -> None:
    expected = alone(tmp_path, SCRIPT + "train()", "8", "2", "48")
    ran = run(SCRIPT + "train()", mode="bsp", workers=2, servers=2, args=("4", "2", "48"))
    assert ran.error is None, ran.log("worker", 0)
    for found in ran.results().values():
        for mine, whole in zip(found["weights"], expected["weights"], strict=True):
            assert mine == pytest.approx(whole, abs=1e-7)  # transformers computes the loss in float32
        for name in ("steps", "rate", "evaluations"):
            assert found[name] == expected[name], name
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)
    assert expected["steps"] == 12 and expected["evaluations"] == 2
    saved = sorted(path.name for path in (ran.run.path / "out").iterdir())
    assert saved == ["checkpoint-12", "checkpoint-6"], "worker 0 saves"
    assert (ran.run.path / "final" / "model.safetensors").exists()
    assert ran.status.metrics["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)


@pytest.mark.parametrize("mode", ["bsp", "asp", "local:2"])
def test_every_sample_counts(run: Start, mode: str) -> None:
    ran = run(SCRIPT + "train()", mode=mode, workers=2, args=("4", "3", "28"))
    assert ran.error is None, ran.log("worker", 0)
    assert ran.status.samples == 3 * 28 and ran.status.skipped == 0
    assert [each["evaluations"] for each in ran.results().values()] == [3, 3]


def test_an_early_stop_of_one_worker_stops_all(run: Start) -> None:
    source = """
    class Stop(TrainerCallback):
        def on_epoch_end(self, args, state, control, **rest):
            control.should_training_stop = state.epoch >= 2
    train([Stop()] if RANK == 1 else [])
    """
    ran = run(SCRIPT + textwrap.dedent(source), mode="bsp", workers=2, args=("4", "50", "48"))
    assert ran.error is None, ran.log("worker", 0)
    assert ran.status.samples == 2 * 48 and ran.status.ended_early


def test_a_resumed_run_makes_the_epochs_that_are_left(run: Start, tmp_path: Path) -> None:
    source = SCRIPT + "train(lr_scheduler_type='constant')"
    expected = alone(tmp_path, source, "8", "3", "48")
    first = run(source, mode="bsp", workers=2, args=("4", "2", "48"))
    assert first.error is None, first.log("worker", 0)
    again = run(source, mode="bsp", workers=2, args=("4", "3", "48"), resume=first)
    assert again.error is None, again.log("worker", 0)
    assert again.status.version == 18
    for mine, whole in zip(again.results()[0]["weights"], expected["weights"], strict=True):
        assert mine == pytest.approx(whole, abs=1e-7)


def test_accumulation(run: Start, tmp_path: Path) -> None:
    source = SCRIPT + "train(gradient_accumulation_steps=2)"
    expected = alone(tmp_path, source, "8", "2", "64")
    ran = run(source, mode="bsp", workers=2, args=("4", "2", "64"))
    assert ran.error is None, ran.log("worker", 0)
    assert ran.results()[0]["steps"] == expected["steps"] == 8
    for mine, whole in zip(ran.results()[0]["weights"], expected["weights"], strict=True):
        assert mine == pytest.approx(whole, abs=1e-7)
