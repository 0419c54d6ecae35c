"""One optimizer of the script, as the run sees it.

A script may have several (a GAN, actor and critic). The run has one parameter space for all of them; each
`optimizer.step()` pushes the part of it that this optimizer trains.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from paceline.exceptions import UsageError
from paceline.params import Layout, OptimizerSpec, TensorInfo
from paceline.worker.script_optimizer import StateDict
from paceline.worker.steppers.stepper import Stepper

__all__ = ["Incomplete", "OptimizerCalls", "OptimizerSide", "SideCalls", "incomplete"]


class OptimizerCalls(Protocol):
    """What an optimizer asks of the session."""

    def step(self, side: "OptimizerSide") -> None: ...
    def zeroed(self, optimizer: torch.optim.Optimizer) -> None: ...
    def optimizer_state(self, side: "OptimizerSide") -> StateDict: ...
    def load_optimizer_state(self, side: "OptimizerSide", state: StateDict) -> None: ...


class OptimizerSide:
    """What an optimizer trains, its stepper, and what the run does not know of its steps yet.

    Args:
        index: its place among the script's optimizers.
        served: the optimizer that the servers run for it.
        layout, parameters, spec: of the whole run.
    """

    stepper: Stepper

    def __init__(
        self,
        index: int,
        optimizer: torch.optim.Optimizer,
        served: torch.optim.Optimizer,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        spec: OptimizerSpec,
    ) -> None:
        groups = spec.groups_of[index]
        self.index = index
        self.optimizer = optimizer
        self.served = served
        self.tensors = [i for i, t in enumerate(layout.tensors) if t.group in groups]
        """The places of its tensors in the layout of the whole run."""
        self.parameters = [parameters[i] for i in self.tensors]
        self.layout = layout if len(self.tensors) == len(layout.tensors) else layout.of_groups(groups)
        self.fused = any(spec.groups[g].get("fused") for g in groups)
        """Whether the servers use torch's fused kernels for it."""
        self.weight = 0
        """Samples that its steps since its last push were computed from."""
        self.version = 0
        """The version of the parameters that it fetched last."""
        self.zeroed = False
        """Whether its gradients were zeroed since the last backward pass began."""

    @property
    def without_gradients(self) -> bool:
        """Whether none of its parameters has a gradient."""
        return all(p.grad is None for p in self.parameters)

    def infos(self) -> list[TensorInfo | None]:
        """Of the optimizer's parameters, in its order; None for those that are not trained."""
        known = {id(p): info for p, info in zip(self.parameters, self.layout.tensors, strict=True)}
        return [known.get(id(p)) for group in self.optimizer.param_groups for p in group["params"]]


class SideCalls:
    """The calls of one of the script's optimizers, passed on to the session."""

    def __init__(self, run: OptimizerCalls, side: OptimizerSide) -> None:
        self._run = run
        self._side = side
        self.zeroed = run.zeroed

    def step(self) -> None:
        """What optimizer.step() does."""
        self._run.step(self._side)

    def optimizer_state(self) -> StateDict:
        """What optimizer.state_dict() returns."""
        return self._run.optimizer_state(self._side)

    def load_optimizer_state(self, state: StateDict) -> None:
        """What optimizer.load_state_dict() does."""
        self._run.load_optimizer_state(self._side, state)


class Incomplete:
    """In the place of an OptimizerSide while this worker has prepared less than the run was prepared with.

    Args:
        calls: how many calls of prepare() the worker has made.
    """

    def __init__(self, calls: int) -> None:
        self._calls = calls

    def step(self) -> None:
        """Refused."""
        raise incomplete(self._calls)

    def zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: no batch was read."""

    def optimizer_state(self) -> StateDict:
        """Refused."""
        raise incomplete(self._calls)

    def load_optimizer_state(self, state: StateDict) -> None:
        """Nothing: what the run has is newer."""


def incomplete(calls: int) -> UsageError:
    """The error of a worker that trains before it has prepared all that the run was prepared with."""
    return UsageError(
        f"this worker has called prepare() {calls} time(s) before its first batch or step, and the run was "
        "prepared by more calls. Call prepare() for everything before the training loop, on every worker and "
        "also when the run is resumed."
    )
