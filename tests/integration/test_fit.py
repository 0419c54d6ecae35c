"""paceline.fit(): training without a loop, from a process that knows the functions.

fit() forks its caller, so the calls are made by a fresh Python, once for all tests of this file; each test
looks at one part of what it found.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.exceptions import PlanError, UsageError

PROGRAM = """
import json, pathlib, sys, threading
import torch
from torch import nn
from torch.utils.data import TensorDataset
import psutil
import paceline
from paceline.exceptions import PacelineError

here = pathlib.Path(sys.argv[1])
torch.randn(200, 200) @ torch.randn(200, 200)  # a notebook has used torch's threads before
g = torch.Generator().manual_seed(1)
x = torch.randn(240, 6, generator=g)
y = (x @ torch.randn(6, 3, generator=g)).argmax(1)
train, test = TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])
width = 8  # known to this process only
found = {}

def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

def task(**changes):
    made = {
        "model": model,
        "data": train,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        "batch_size": 10,
        "shuffle": False,
        **changes,
    }
    return paceline.Task(**made)

def facts(name, fitted):
    torch.save(dict(fitted.state_dict), here / f"{name}.pt")
    status = fitted.status
    found[name] = {
        "metrics": fitted.metrics, "state": status.state, "samples": status.samples, "epoch": status.epoch,
        "version": status.version, "run_dir": str(fitted.run_dir), "messages": status.messages,
    }

facts("lambdas", paceline.fit(
    task(data=lambda: train, test_data=lambda: test, loss=lambda out, t: nn.functional.cross_entropy(out, t),
         epochs=3),
    quiet=True, workers=2, servers=2, run_dir=str(here / "lambdas")))
facts("half", paceline.fit(task(epochs=1), quiet=True, run_dir=str(here / "half")))
facts("resumed", paceline.fit(task(epochs=3), quiet=True, resume=str(here / "half")))

facts("scheduled", paceline.fit(
    task(epochs=2, clip_grad_norm=0.3, hyperparameters={"lr": 0.5, "net": "small"}, scheduler_every="step",
         scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 7, gamma=0.5)),
    quiet=True, workers=1, mode="asp", run_dir=str(here / "scheduled")))

def failing_loss(out, target):
    if paceline.rank() == 1:
        raise ZeroDivisionError("the user's own mistake")
    return nn.functional.cross_entropy(out, target)

def regression(out, target):
    return (out[:, 0] - target).pow(2).mean()

for name, changes in {
    "failing": {"loss": failing_loss},
    "refused": {"optimizer": lambda p: torch.optim.LBFGS(p)},
}.items():
    if name == "refused":
        print("now worker 0 fails, too", flush=True)
    try:
        paceline.fit(task(**changes), quiet=True, run_dir=str(here / name))
        found[name] = None
    except PacelineError as error:
        found[name] = [type(error).__name__, str(error)]

facts("regression", paceline.fit(
    task(data=TensorDataset(x, x.sum(1)), test_data=TensorDataset(x, x.sum(1)), loss=regression),
    quiet=True, workers=1, mode="asp", run_dir=str(here / "regression")))
found["children"] = [p.cmdline() for p in psutil.Process().children(recursive=True)]
found["threads"] = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
(here / "found.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where PROGRAM left what it found."""
    directory = tmp_path_factory.mktemp("fit")
    program = directory / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, directory], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("now worker 0 fails"), "quiet=True shows what worker 0 prints, no progress"
    assert done.stderr == ""
    return directory


@pytest.fixture(scope="module")
def found(where: Path) -> dict[str, Any]:
    return json.loads((where / "found.json").read_text())  # type: ignore[no-any-return]


def plain_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> tuple[TensorDataset, TensorDataset]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(240, 6, generator=g)
    y = (x @ torch.randn(6, 3, generator=g)).argmax(1)
    return TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])


def test_lambdas_train_and_the_state_dict_loads_in_a_plain_model(where, found):
    """Two bsp workers of batch 10 are one process of batch 20; test data are measured after each epoch."""
    facts = found["lambdas"]
    assert (facts["state"], facts["samples"], facts["version"]) == ("succeeded", 600, 30)
    assert Path(facts["run_dir"]) == where / "lambdas"
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    train, test = data()
    x, y = train.tensors
    for _ in range(3):
        for a, b in zip(x.split(20), y.split(20), strict=True):
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
    trained = plain_model()
    trained.load_state_dict(torch.load(where / "lambdas.pt"))
    for ours, reference in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        out = trained(test.tensors[0])
    right = float((out.argmax(1) == test.tensors[1]).float().mean())
    assert facts["metrics"]["test_accuracy"] == pytest.approx(right)
    loss = float(nn.functional.cross_entropy(out, test.tensors[1]))
    assert facts["metrics"]["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert facts["metrics"]["loss"] > 0
    logged = paceline.load_run(facts["run_dir"]).metrics
    tests = logged[logged["name"] == "test_loss"]
    assert tests[["worker", "step", "version", "epoch", "samples"]].to_numpy().tolist() == [
        [0, 10 * epoch, 10 * epoch, epoch - 1, 200 * epoch] for epoch in (1, 2, 3)
    ], "of every epoch, at its end"
    assert tests["value"].iloc[-1] == facts["metrics"]["test_loss"]


def test_fit_resumes_where_it_stopped_bit_for_bit(where, found):
    """1 epoch and then on to 3 is the same as 3 epochs at once."""
    assert found["half"]["samples"] == 200 and found["resumed"]["samples"] == 600
    logged = paceline.load_run(found["resumed"]["run_dir"]).metrics.query("name == 'loss' and worker == 0")
    assert logged[["attempt", "step"]].to_numpy().tolist() == [[0, 10], [1, 20], [1, 30]], "steps go on"
    whole, resumed = torch.load(where / "lambdas.pt"), torch.load(where / "resumed.pt")
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)


def test_a_task_with_a_schedule_and_clipping_is_the_plain_loop_and_is_recorded(where, found):
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)
    x, y = data()[0].tensors
    for _ in range(2):
        for a, b in zip(x.split(10), y.split(10), strict=True):
            nn.functional.cross_entropy(model(a), b).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    trained = torch.load(where / "scheduled.pt")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, atol=1e-6, rtol=1e-5)
    task = paceline.load_run(where / "scheduled").record["task"]
    assert task["hyperparameters"] == {"lr": 0.5, "net": "small"}
    assert (task["clip_grad_norm"], task["scheduler_every"], task["epochs"]) == (0.3, "step", 2)
    assert task["model"] == "model" and task["loss"] == "cross_entropy" and task["scheduler"] is None
    assert paceline.load_run(where / "scheduled").hyperparameters == {"lr": 0.5, "net": "small"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0"),
        ({"scheduler_every": "day"}, "must be 'epoch' or 'step'"),
        ({"hyperparameters": {"lr": [1, 2]}}, "give names, and numbers or texts"),
    ],
)
def test_a_task_that_makes_no_sense(changes, said):
    with pytest.raises(UsageError, match=said):
        paceline.Task(model=plain_model, data=data()[0], optimizer=torch.optim.SGD, **changes)


def test_a_failing_task_names_the_worker_and_shows_the_users_traceback(found):
    kind, message = found["failing"]
    assert kind == "RoleFailed"
    assert message.startswith("worker:1: ZeroDivisionError: the user's own mistake")
    assert "in failing_loss" in message and 'raise ZeroDivisionError("the user' in message
    assert "paceline/worker/main.py" not in message, "our own frames would bury it"


def test_what_cannot_be_trained_is_refused_with_the_reason(found):
    kind, message = found["refused"]
    assert kind == "RoleFailed"
    assert message.startswith("worker:") and "UsageError: torch.optim.LBFGS cannot run" in message


@pytest.mark.slow
def test_a_regression_has_no_accuracy(found):
    assert found["regression"]["metrics"].keys() == {"loss", "test_loss"}


def test_nothing_is_left_of_all_these_runs(found):
    assert found["children"] == [] and found["threads"] == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 0}, "workers=0"),
        ({"mode": "ssp:-1"}, "ssp:-1"),
        ({"mode": "backup:2", "workers": 2}, "backup:2"),
        ({"mode": "sometimes"}, "sometimes"),
        ({"link": "pigeon"}, "pigeon"),
        ({"resume": "no-such-run"}, "no-such-run"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"wrokers": 2}, "wrokers"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(settings, words, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    task = paceline.Task(model=plain_model, data=data()[0], optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises((UsageError, PlanError), match=words):
        paceline.fit(task, quiet=True, **settings)
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch_size": 0}, {"batch_size": 1.5}])
def test_a_task_checks_its_numbers(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(UsageError, match=rf"Task\({name}={value}\)"):
        paceline.Task(
            model=plain_model, data=data()[0], optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **wrong
        )
