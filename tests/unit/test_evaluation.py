"""The script's evaluation: what it may be, what it may return, and what becomes of it alone."""

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.exceptions import UsageError
from paceline.worker import session as sessions
from paceline.worker.evaluation import Evaluation


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_current", None)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10"])
def test_intervals_that_are_none(every: Any) -> None:
    with pytest.raises(UsageError, match=r"evaluation\(every=.*a whole number of at least 1"):
        Evaluation(len, every)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, r"measure\(\) returned nothing: an evaluation returns its values by name"),
        (0.5, r"measure\(\) returned 0\.5"),
        ({}, r"measure\(\) returned \{\}"),
        ({"accuracy": torch.ones(2)}, r"measure\(\) returned 'accuracy' with a Tensor"),
        ({"accuracy": "high"}, r"returned 'accuracy' with a str 'high'"),
    ],
)
def test_results_that_are_none(found: Any, said: str) -> None:
    def measure(model: nn.Module) -> Any:
        return found

    with pytest.raises(UsageError, match=said):
        Evaluation(measure, 1).measure([nn.Linear(1, 1)])


def test_models_are_put_back_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()

    def measure(model: nn.Module) -> dict[str, float]:
        assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
        return {"a": torch.tensor(3), "eval_b": 4}

    assert Evaluation(measure, 1).measure([model]) == {"eval_a": 3.0, "eval_b": 4.0}
    assert model.training and model[0].training and not model[1].training
    with pytest.raises(ZeroDivisionError):
        Evaluation(lambda model: 1 / 0, 1).measure([model])
    assert model.training


def test_alone_it_is_called_in_between(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    @paceline.evaluation(every=2)
    def measure(model: nn.Module) -> dict[str, float]:
        calls.append(model)
        return {"weight": model.weight.item()}

    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = paceline.prepare(model, optimizer)
    for _ in range(5):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls == [model, model] and model.training
    assert measure(model) == {"weight": -5.0}, "the function is still the script's"
    said = capsys.readouterr().err.splitlines()
    assert said == ["evaluation at step 2: eval_weight -2", "evaluation at step 4: eval_weight -4"]


def test_it_is_declared_once_and_before_prepare() -> None:
    paceline.evaluation(every=1)(lambda model: {"a": 1})
    with pytest.raises(UsageError, match="a script has one evaluation"):
        paceline.evaluation(every=1)(lambda model: {"a": 1})
    model = nn.Linear(1, 1)
    paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UsageError, match="came after prepare"):
        paceline.evaluation(every=1)(lambda model: {"a": 1})
