"""Evaluation: the function with which a script measures its model, and how often that is done."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.exceptions import UsageError

__all__ = ["PREFIX", "Evaluation", "evaluated_inline", "evaluating"]

PREFIX = "eval_"
"""Names of measured values begin with it, so that they are no values of training."""


@dataclass(frozen=True)
class Evaluation:
    """What `paceline.evaluation` declares.

    Raises:
        UsageError: it cannot be called, or the interval is no number of updates.
    """

    function: Callable[..., Any]
    """Takes the models that prepare() got, in their order."""
    every: int
    """Number of updates between two evaluations."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(
                f"@paceline.evaluation(…) over a {type(self.function).__name__}: it takes a function."
            )
        if type(self.every) is not int or self.every < 1:
            raise UsageError(
                f"paceline.evaluation(every={self.every!r:.40}): give the number of updates between two "
                "evaluations, a whole number of at least 1."
            )

    @property
    def name(self) -> str:
        """Of the function."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def measure(self, models: Sequence[nn.Module]) -> dict[str, float]:
        """Call the function, with the models in evaluation mode and without gradients.

        Raises:
            UsageError: it did not return numbers with names.
        """
        with evaluating(models):
            return self._numbers(self.function(*models))

    def _numbers(self, found: Any) -> dict[str, float]:
        if not isinstance(found, Mapping) or not found:
            raise UsageError(
                f"{self.name}() returned {'nothing' if found is None else f'{found!r:.60}'}: an evaluation "
                "returns its values by name, as in `return {'accuracy': right / total}`."
            )
        numbers: dict[str, float] = {}
        for name, value in found.items():
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(
                    f"{self.name}() returned {name!r} with a {type(value).__name__} {value!r:.60}: a value "
                    "is one number."
                ) from None
            numbers[name if str(name).startswith(PREFIX) else f"{PREFIX}{name}"] = number
        return numbers


@contextlib.contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Within, these models are in evaluation mode and no gradients are computed."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def evaluated_inline(evaluation: Evaluation, models: Sequence[nn.Module], step: int) -> None:
    """Evaluate in a script that runs alone, and write the values to standard error."""
    found = evaluation.measure(models)
    values = ", ".join(f"{name} {_short(value)}" for name, value in found.items())
    sys.stderr.write(f"evaluation at step {step}: {values}\n")


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)
