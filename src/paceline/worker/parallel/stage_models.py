"""A prepared model as the processes of a pipeline have it: the same modules, on memory that all map."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.worker.parallel.module_copy import copy_modules
from paceline.worker.parallel.shared_state import SharedState

__all__ = ["StageModel"]


class StageModel:
    """A copy of a model. Made before the fork, so every process has it.

    Args:
        index: the model's place in the shared state.
    """

    def __init__(self, model: nn.Module, state: SharedState, index: int) -> None:
        views = state.views(index)
        parameters = [*model.parameters()]
        buffers = dict(zip([id(b) for b in model.buffers()], views[len(parameters) :], strict=True))
        self.parameters = [
            nn.Parameter(view, requires_grad=p.requires_grad)
            for p, view in zip(parameters, views, strict=False)
        ]
        known = {id(p): mine for p, mine in zip(parameters, self.parameters, strict=True)}
        modules = copy_modules(model, known, buffers)
        self.model = modules[id(model)]
        self._modules = [modules[id(m)] for m in model.modules()]
        self._buffers = [(*_holder(self._modules, b), b) for b in buffers.values()]
        self._before: dict[int, Tensor] = {}
        """The buffers that this process's stage uses, as they were when the call began."""

    def follow(self, said: dict[str, Any]) -> None:
        """Be in the state that `SharedState.write` told of, in which the memory is."""
        for module, training in zip(self._modules, said["training"], strict=True):
            module.training = training
        for p, trained in zip(self.parameters, said["trained"], strict=True):
            p.requires_grad_(trained)

    def watch_buffers(self, places: Sequence[int]) -> None:
        """Remember these buffers for `changed_buffers`."""
        self._before = {k: self._buffers[k][2].clone() for k in places}

    def buffer_views(self) -> list[Tensor]:
        """The memory of the buffers."""
        return [view for _, _, view in self._buffers]

    @torch.no_grad()
    def changed_buffers(self) -> list[int]:
        """The places of those buffers that have other values than they had; the new ones are in the shared
        memory. (BatchNorm writes to its buffers without counting that as a change.)"""
        changed = []
        for k, before in self._before.items():
            module, name, view = self._buffers[k]
            now = vars(module)["_buffers"][name]
            if now is not view:  # it was not written to but replaced
                view.copy_(now)
                vars(module)["_buffers"][name] = view
            if not torch.equal(view, before):
                changed.append(k)
        self._before = {}
        return changed


def _holder(modules: list[nn.Module], buffer: Tensor) -> tuple[nn.Module, str]:
    for module in modules:
        for name, value in vars(module)["_buffers"].items():
            if value is buffer:
                return module, name
    raise AssertionError("a buffer of no module")
