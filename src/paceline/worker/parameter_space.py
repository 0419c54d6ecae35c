"""The trained parameters of all prepared models, as the run lays them out."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.exceptions import UsageError
from paceline.params import Layout, bind, not_finite, tensor_views
from paceline.worker.checkpoint_part import extras_of
from paceline.worker.ownership import OwnershipGuard
from paceline.worker.prepared import Models

__all__ = ["ParameterSpace"]


class ParameterSpace:
    """The parameters of a worker's models, and the layout that they have in the run.

    Args:
        parameters: the trained ones, in the layout's order.
    """

    def __init__(
        self,
        models: Models,
        optimizers: Sequence[torch.optim.Optimizer],
        layout: Layout,
        parameters: list[nn.Parameter],
    ) -> None:
        self.models = models
        self.layout = layout
        self.parameters = parameters
        names = [t.name for t in layout.tensors]
        self.trained = {*names} | {alias for alias, _ in layout.aliases}
        """Names of the trained parameters, all that they have."""
        self.guard = OwnershipGuard(models, optimizers, parameters, names)

    def weights(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Worker 0's initial weights, as the bytes of the whole space; and the rest of its models."""
        base = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        self.write_to(base)
        self.check_finite(base, "at prepare()")
        return base, extras_of(self.models, self.trained)

    def write_to(self, base: Tensor) -> None:
        """Copy the parameters to memory that has the layout's size."""
        with torch.no_grad():
            for p, view in zip(self.parameters, tensor_views(base, self.layout), strict=True):
                view.copy_(p)

    def bind_to(self, base: Tensor) -> None:
        """Let the parameters be views of this memory."""
        bind(self.parameters, tensor_views(base, self.layout))

    def check_finite(self, base: Tensor, when: str) -> None:
        """UsageError if parameters that the servers are to take over hold NaN or Inf."""
        if (name := not_finite(base, self.layout)) is not None:
            raise UsageError(
                f"parameter {name!r} held NaN or Inf {when}, and servers train finite parameters only. If "
                "that is meant (a mask, say), make it a buffer or freeze it."
            )
