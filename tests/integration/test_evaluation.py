"""Evaluation beside the workers: of one version, without anybody waiting for it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.api.evaluating import Evaluated, evaluate_run
from paceline.api.runs import load_run
from paceline.exceptions import CheckpointError, LayoutMismatch, UsageError
from paceline.observe import RunStatus
from paceline.observe.record.values import EVALUATION
from paceline.storage.checkpoint import committed, load
from paceline.testing import KeptEngine
from tests.integration.conftest import Ran

Start = Callable[..., Ran]

# Every update subtracts 1 from every parameter, so parameters are the negated version that they are of.
COUNTING = """
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.zeros(300_000)) for _ in range(6))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return sum(row.sum() for row in self.rows) + 0 * x.sum()

model = Counter()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=1)

@paceline.evaluation(every=7)
def evaluate(model):
    assert not model.training and not torch.is_grad_enabled()
    values = torch.stack([bound for row in model.rows for bound in (row.min(), row.max())])
    (RUN_DIR / "evaluated").write_text("")
    return {"low": values.min(), "high": values.max(), "seen": model.seen}

prepared = paceline.prepare(model, optimizer, loader)
model, optimizer, loader = prepared

def train(epochs):
    for _, batches in epochs:
        for (x,) in batches:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def measured(ran: Ran) -> dict[str, list[tuple[int, float]]]:
    """What evaluations measured: version and value, by name."""
    frame = load_run(ran.run).metrics
    frame = frame[frame["worker"] == EVALUATION]
    assert (frame["step"] == frame["version"]).all()
    return {
        str(name): list(zip(rows["version"].tolist(), rows["value"].tolist(), strict=True))
        for name, rows in frame.groupby("name")
    }


@pytest.mark.parametrize("mode", ["asp+damping=none", pytest.param("bsp", marks=pytest.mark.slow)])
def test_an_evaluation_sees_one_version_of_all_servers(run: Start, mode: str) -> None:
    evaluated: set[int] = set()

    def watch(status: RunStatus, lines: list[str], engine: KeptEngine) -> None:
        if status.evaluated_at:
            evaluated.add(status.evaluated_at)
        if len(evaluated) >= 3:
            open(os.path.join(status.run_dir, "enough"), "w").close()

    ran = run(COUNTING + "train(until_enough(loader))", mode=mode, workers=2, servers=3, watch=watch)
    assert ran.error is None
    found = measured(ran)
    versions = [version for version, _ in found["eval_low"]]
    assert len(versions) >= 4 and versions == sorted(set(versions))
    assert versions[-1] == ran.status.version, "the final model is evaluated, too"
    assert [version for version in versions[:-1] if version % 7] == []
    assert found["eval_low"] == found["eval_high"] == [(version, -version) for version in versions]
    assert found["eval_seen"][-1][1] > 0, "buffers come along"
    assert ran.status.metrics["eval_low"] == -ran.status.version
    assert not (ran.run.path / "snapshots").exists()
    assert not list((ran.run.path / "requests").iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_reader_that_is_stopped_or_killed_hurts_nobody(run: Start, number: signal.Signals) -> None:
    hit: list[tuple[int, int]] = []

    def watch(status: RunStatus, lines: list[str], engine: KeptEngine) -> None:
        pid = engine.pids().get("reader:0")
        if not hit and pid is not None and status.evaluated_at:
            os.kill(pid, number)
            hit.append((pid, status.version))
        if hit and status.version > hit[0][1] + 50:  # training goes on
            open(os.path.join(status.run_dir, "enough"), "w").close()

    ran = run(
        COUNTING + "train(until_enough(loader))",
        mode="bsp",
        workers=2,
        servers=2,
        watch=watch,
        deadline_s=8.0,
    )
    assert ran.error is None and hit
    assert ran.status.version > hit[0][1] + 50 and ran.status.restarts == 0
    assert ran.model["rows.0"].unique().tolist() == [-ran.status.version]
    said = " ".join(ran.status.messages)
    if number == signal.SIGKILL:
        assert "reader:0, which evaluates, was killed by SIGKILL" in said
    else:
        assert "the evaluation of the final model was not finished" in said
    with pytest.raises(ProcessLookupError):
        os.kill(hit[0][0], 0)


def test_an_evaluation_that_fails_does_not_end_the_run(run: Start) -> None:
    source = COUNTING.replace('(RUN_DIR / "evaluated").write_text("")', "raise ValueError('broken')")
    ran = run(source + "train((k, loader) for k in range(2))", mode="bsp", workers=2)
    assert ran.error is None and ran.status.version == 64
    assert "nothing is evaluated from here on" in " ".join(ran.status.messages)
    assert "ValueError: broken" in ran.log("reader", 0)


@pytest.mark.slow
def test_another_interval_and_none(run: Start) -> None:
    source = COUNTING + "train((k, loader) for k in range(2))"
    ran = run(source, mode="bsp", workers=2, eval_every=0)
    assert measured(ran) == {} and "reader:0" not in ran.run.log_paths()
    ran = run(source.replace("@paceline.evaluation(every=7)", ""), mode="bsp", workers=2, eval_every=5)
    assert ran.error is not None and "--eval-every 5: the script has no evaluation" in ran.error


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["allreduce", "easgd:2", "sandblaster:4"])
def test_modes_in_which_servers_have_the_parameters_now_and_then(run: Start, mode: str) -> None:
    ran = run(COUNTING + "train((k, loader) for k in range(4))", mode=mode, workers=2, eval_every=1)
    assert ran.error is None, ran.error
    found = measured(ran)
    assert found["eval_low"][-1][0] == ran.status.version
    if mode == "allreduce":
        assert all(value == -version for version, value in found["eval_low"])


@pytest.mark.slow
def test_later(run: Start) -> None:
    ran = run(COUNTING + "train((k, loader) for k in range(2))", mode="bsp", workers=2, checkpoint_every=20)
    shown: list[Evaluated] = []
    said: list[str] = []

    def evaluate(**settings: Any) -> None:
        evaluate_run(ran.run, shown=shown.append, say=said.append, **settings)

    evaluate()
    assert [(each.version, each.values["eval_low"]) for each in shown] == [(64, -64.0)]
    assert len([version for version, _ in measured(ran)["eval_low"] if version == 64]) == 2
    # One that becomes due while another is written is left out, or cut behind the next update.
    there = [load(path).version for path in reversed(committed(ran.run.checkpoints_path))]
    assert len(there) > 1 and there[-1] == 64
    listed = ", ".join(map(str, there))
    evaluate(version=there[0])
    assert shown[-1].version == there[0] and shown[-1].values["eval_high"] == -there[0]
    with pytest.raises(CheckpointError, match=f"no checkpoint of version 7; it has {listed}$"):
        evaluate(version=7)
    with pytest.raises(UsageError, match="does not go on"):
        evaluate(every=3)
    other = ran.run.path / "other.py"
    text = Path(ran.run.read_job().script or "").read_text()
    other.write_text(text.replace("300_000", "200_000"))
    with pytest.raises(LayoutMismatch, match=r"'rows\.0' has the shape \[200000\] in the script's model"):
        evaluate(script=str(other))
    other.write_text(text.replace("range(6)", "range(7)"))
    with pytest.raises(LayoutMismatch, match=r"'rows\.6' is in the script's model and not in the run's"):
        evaluate(script=str(other))
    other.write_text(text.replace("@paceline.evaluation(every=7)", ""))
    with pytest.raises(UsageError, match="has no evaluation"):
        evaluate(script=str(other))
    other.write_text("pass")
    with pytest.raises(UsageError, match=r"without calling paceline\.prepare"):
        evaluate(script=str(other))


@pytest.mark.slow
def test_beside_a_run_that_goes_on(run: Start) -> None:
    found: list[subprocess.Popen[str]] = []

    def watch(status: RunStatus, lines: list[str], engine: KeptEngine) -> None:
        if not found and status.version > 5:
            command = [sys.executable, "-m", "paceline", "eval", status.run_dir]
            found.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        if found and found[0].poll() is not None:
            open(os.path.join(status.run_dir, "enough"), "w").close()

    ran = run(
        COUNTING + "train(until_enough(loader))",
        mode="asp+damping=none",
        workers=2,
        servers=2,
        eval_every=0,
        watch=watch,
    )
    said = found[0].communicate()[0]
    assert ran.error is None and found[0].returncode == 0, said
    (version, low), *more = measured(ran)["eval_low"]
    assert not more and 5 < version < ran.status.version and low == -version
    assert f"version {version:,}: eval_low {-version}" in said
