"""Chooses the stepper of a mode."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.core.modes import ModeSpec
from paceline.params import Layout
from paceline.worker.steppers.gradient_stepper import GradientStepper
from paceline.worker.steppers.local_steppers import (
    DeltaStepper,
    ElasticStepper,
    FreeStepper,
    InPlaceStepper,
    SumStepper,
)
from paceline.worker.steppers.stepper import Stepper, StepperMemory

__all__ = ["make_stepper"]

_STEPPERS: dict[str, type[Stepper]] = {
    "gradient": GradientStepper,
    "sum": SumStepper,
    "delta": DeltaStepper,
    "elastic": ElasticStepper,
    "none": InPlaceStepper,
}


def make_stepper(
    mode: ModeSpec,
    layout: Layout,
    memory: StepperMemory,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    local_step: Callable[[], Any],
) -> Stepper:
    """The stepper that a mode asks for."""
    kind = FreeStepper if mode.own_threads else _STEPPERS[mode.payload]
    return kind(mode, layout, memory, parameters, optimizer, local_step)
