"""Runs that diverge: seen early, named, and with a guard brought back. The script learns in bsp only."""

from pathlib import Path
from typing import Any

import pytest

from paceline.cli import outcome
from paceline.control import training_guard
from paceline.observe import RunStatus
from paceline.observe.analyse import wording
from paceline.observe.analyse.run_data import RunData
from paceline.observe.analyse.summary import diagnosis_of, known_facts
from tests.speed import first

SCRIPT = str(Path(__file__).parents[1] / "diverging" / "train.py")
ASYNC: dict[str, Any] = {"script": SCRIPT, "workers": 4, "threads": 1, "mode": "asp+damping=none"}


def assert_every_sample_once(status: RunStatus, epochs: int) -> None:
    assert status.samples == 2048 * epochs
    applied = [account["applied"] for account in status.leases]
    assert [each for each in applied if each] == [2048] * min(epochs, len(applied) - 1)


@pytest.mark.parametrize("seed", first(1, range(5)))
def test_the_guard_brings_a_run_back(run, seed):
    """It goes back to the beginning, since nothing was kept yet, and in bsp it learns."""
    ran = run("", **ASYNC, guard=True, args=("--seed", str(seed)), seed=seed)
    status = ran.status
    assert ran.error is None and status.state == "succeeded" and status.mode == "bsp"
    (back,) = [message for message in status.messages if "guard" in message]
    assert back.startswith("guard: the loss ") and "; bsp has no" in back
    assert "It goes on in mode bsp. The run went back to its beginning" in back
    assert status.lost_updates > 0 and status.restarts == 0
    assert_every_sample_once(status, epochs=4)
    assert status.metrics["loss"] < 0.1 < 10 < status.first_losses["loss"]
    assert status.diverged is None and wording.state(status) == "succeeded"
    assert ran.run.record()["job"]["mode"] == "bsp"  # so does a resume


def test_a_run_that_diverges_is_named_as_what_it_is(run, capsys):
    """Not "Succeeded" and "Network-bound", with a loss of 2.4e33."""
    ran = run("", **ASYNC, args=("--epochs", "3"))
    status = ran.status
    assert ran.error is None and status.state == "succeeded"
    (said,) = status.messages
    assert said.startswith("The run diverged: the loss ") and "gradients are applied " in said
    for knob in ("--damping momentum", "ssp:1 or bsp", "--guard", "fewer workers", "lower the learning rate"):
        assert knob in said
    assert status.restarts == 0
    assert status.diverged is not None and status.diverged.startswith("The run diverged: the loss ")
    assert wording.state(status) == "succeeded, but diverged"
    outcome.finish(status)
    assert "Succeeded, but diverged, after " in capsys.readouterr().err
    data = RunData(ran.run.path)
    found = diagnosis_of(data, known_facts(data))
    assert (found.limit, found.text) == ("divergence", status.diverged)
    # A resume is judged by how the run began, not by where it is.
    assert ran.run.read_status()["first_losses"]["loss"] == status.first_losses["loss"] > 10


KEEPS = """
import time

def kept():
    return any((RUN_DIR / "checkpoints").glob("version-*"))

draw = torch.Generator().manual_seed(0)
x = torch.randn(2048, 8, generator=draw)
model = nn.Linear(8, 1, bias=False)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
loader = DataLoader(TensorDataset(x, 2 * x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
since = None
for _, batches in until_enough(loader):
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(model(inputs), targets)
        time.sleep(0.002)
        optimizer.zero_grad()
        loss.backward()
        since = since or (time.monotonic() if kept() else None)
        # Some time after a checkpoint, which all have heard of then, the rate is too high for asp.
        late = since is not None and time.monotonic() > since + 0.6
        optimizer.param_groups[0]["lr"] = 0.5 if late and "asp" in paceline.mode() else 0.02
        optimizer.step()
        paceline.log(loss=loss.item())
"""


@pytest.mark.slow
def test_the_guard_goes_back_to_what_was_kept(run, monkeypatch):
    monkeypatch.setattr(training_guard, "_SNAPSHOT_S", 0.3)
    versions = []

    def watch(status: RunStatus, lines: Any, engine: Any) -> None:
        versions.append(status.version)
        back = any("went back" in message for message in status.messages)
        if (back and status.metrics.get("loss", 1.0) < 0.01) or status.elapsed_s > 120:
            (Path(status.run_dir) / "enough").touch()

    ran = run(KEEPS, workers=4, threads=1, mode="asp+damping=none", guard=True, watch=watch)
    status = ran.status
    # By the guard's slower sense, which compares with the lowest loss, or the quicker one.
    assert ran.error is None and status.mode in ("ssp:4+damping=none", "bsp")
    back = next(message for message in status.messages if "went back" in message)
    assert "The run went back to checkpoint version-" in back
    at = int(back.partition("version-")[2].partition(":")[0])
    assert 0 < at < max(versions)
    assert_every_sample_once(status, epochs=status.samples // 2048)
    assert status.metrics["loss"] < 0.1 and status.diverged is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_nan_in_all_workers_is_the_run_s_and_not_theirs(run, seed):
    """They were each said to have "pushed NaN while other workers did not", then to be killed for memory."""
    ran = run("", **ASYNC, args=("--epochs", "12", "--seed", str(seed)))
    said = "\n".join([*ran.status.messages, ran.error or ""])
    assert "while other workers did not" not in said and "SIGKILL" not in said and ran.status.restarts == 0
    assert ran.status.diverged is not None and "The run diverged: " in said
    # Pushes are refused until the script ends, unless an update overflows first.
    assert ran.status.refused > 100 if ran.error is None else "UpdateOverflow" in ran.error


@pytest.mark.slow
def test_the_guard_gives_up_where_no_mode_helps(run):
    """Also when an update overflows, which is quicker than any report."""
    ran = run("", **ASYNC, guard=True, args=("--lr", "4"))
    assert ran.status.state == "failed" and ran.error is not None
    assert (
        ran.error.startswith("run: The run diverged: ")
        and "The learning rate is the likely cause" in ran.error
    )
    ran = run("", **ASYNC, guard=True, args=("--lr", "1e30"))
    assert ran.error is not None and "The run diverged: an update overflowed." in ran.error
    assert "SIGKILL" not in ran.error and "Traceback" not in ran.error


@pytest.mark.slow
def test_a_script_that_logs_no_loss_is_judged_by_its_gradients(run):
    ran = run("", **ASYNC, args=("--no-loss", "--epochs", "6"))
    assert ran.status.diverged is not None
    assert any(
        "The run diverged: the norm of the gradients rose" in message for message in ran.status.messages
    )
    ran = run("", **{**ASYNC, "mode": "asp"}, args=("--no-loss",))
    assert ran.status.diverged is None and not ran.status.messages


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bsp", "asp", "ssp:2", "local:4"])
def test_a_run_that_learns_is_left_alone(run, mode):
    ran = run("", **{**ASYNC, "mode": mode})
    assert ran.error is None and ran.status.diverged is None and ran.status.metrics["loss"] < 0.1
    assert not [message for message in ran.status.messages if "diverge" in message]
