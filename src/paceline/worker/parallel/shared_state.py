"""Parameters and buffers of models, in memory that forked processes map."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import Region
from paceline.worker.parallel.mailbox import bytes_for, views_of

__all__ = ["SharedState"]


class SharedState:
    """Of the models that were prepared. Made before the fork."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        state = [_state_of(model) for model in models]
        everything = [t for tensors in state for t in tensors]
        self._region = Region.create(bytes_for(everything))
        views = iter(views_of(self._region, everything))
        self._views = [[next(views) for _ in tensors] for tensors in state]

    @torch.no_grad()
    def write(self, model: int) -> dict[str, Any]:
        """In the worker: let the processes have a model's present state. Returns what else they need."""
        found = self._models[model]
        torch._foreach_copy_(self._views[model], [t.detach() for t in _state_of(found)])
        return {
            "model": model,
            "training": [m.training for m in found.modules()],
            "trained": [p.requires_grad for p in found.parameters()],
        }

    def views(self, model: int) -> list[Tensor]:
        """The memory of a model's parameters, and behind them of its buffers, as tensors of their own: what
        autograd keeps of them does not change with the next `write`."""
        everything = [t for tensors in self._views for t in tensors]
        start = sum(len(tensors) for tensors in self._views[:model])
        return views_of(self._region, everything)[start : start + len(self._views[model])]

    def bind(self) -> None:
        """In a forked process: let the parameters of its models be that memory."""
        for model, views in zip(self._models, self._views, strict=True):
            for p, view in zip(model.parameters(), views, strict=False):
                p.data, p.grad = view, None

    def follow(self, said: dict[str, Any]) -> nn.Module:
        """In a forked process: the model in the state that `write` told of."""
        model: nn.Module = self._models[said["model"]]
        views: list[Tensor] = self._views[said["model"]]
        for module, training in zip(model.modules(), said["training"], strict=True):
            module.training = training
        for p, trained in zip(model.parameters(), said["trained"], strict=True):
            p.requires_grad_(trained)
        # Copies: what a process makes of them must not reach the others.
        buffers = [*model.buffers()]
        with torch.no_grad():
            for buffer, view in zip(buffers, views[len(views) - len(buffers) :], strict=True):
                buffer.copy_(view)
        return model

    def close(self) -> None:
        """Release the memory."""
        self._region.close()


def _state_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
