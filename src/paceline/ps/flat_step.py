"""FlatStep: an optimizer's step on a whole slice at once, as if it were one tensor.

On a GPU a fused step of 161 tensors takes 0.5 ms of the CPU, and a step of one tensor of the same size 0.06.
What the kernel does to an element does not depend on the tensor that it is in, so the results are the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.params import Layout
from paceline.ps.slice_state import SliceState

__all__ = ["FlatStep"]

_Kernel = Callable[..., Any]


class FlatStep:
    """Of one slice. Its optimizer's state lies flat from here on; each tensor's is a view of it.

    Raises:
        ValueError: the optimizer's state is not one number a parameter for every tensor.
    """

    def __init__(self, state: SliceState, layout: Layout) -> None:
        self._group = state.optimizer.param_groups[0]
        self._flat = state.flat
        self._adam = isinstance(state.optimizer, torch.optim.Adam | torch.optim.AdamW)
        self._kernel: _Kernel = _kernel_of(state.optimizer)
        start, item = state.piece.start, state.flat.element_size()
        self._extents = [(layout.byte_of(g)[0] - start) // item for g in state.piece.segments]
        self._segments = state.segments
        kept = [state.optimizer.state.get(tensor) or {} for tensor in state.segments]
        self._flats = {name: self._lay_flat(name, kept) for name in _names(state.optimizer, self._group)}
        self._step: Tensor | None = None
        if self._adam:
            self._step = kept[0]["step"]
            for each in kept:
                each["step"] = self._step
        self._kept = kept
        self._optimizer = state.optimizer

    @property
    def fits(self) -> bool:
        """Whether the optimizer still keeps what it kept: its settings may have changed."""
        return [*self._flats] == _names(self._optimizer, self._group)

    @staticmethod
    def suits(state: SliceState) -> bool:
        """Whether a slice can be stepped so, once every tensor of it has had a step."""
        kind, group = type(state.optimizer), state.optimizer.param_groups[0]
        known = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
        return kind in known and bool(group.get("fused")) and not isinstance(group["lr"], Tensor)

    @staticmethod
    def can_begin(state: SliceState) -> bool:
        """Whether every tensor has all the state that the optimizer keeps, and has had as many steps."""
        names = _names(state.optimizer, state.optimizer.param_groups[0])
        kept = [state.optimizer.state.get(tensor) or {} for tensor in state.segments]
        if not all(isinstance(each.get(name), Tensor) for each in kept for name in names):
            return False
        if isinstance(state.optimizer, torch.optim.SGD):
            return True
        return bool(torch.stack([each["step"] for each in kept]).unique().numel() == 1)

    def _lay_flat(self, name: str, kept: list[dict[str, Any]]) -> Tensor:
        flat = torch.zeros_like(self._flat)
        for each, tensor, first in zip(kept, self._segments, self._extents, strict=True):
            view = flat[first : first + tensor.numel()].as_strided(tensor.shape, tensor.stride())
            each[name] = view.copy_(each[name])
        return flat

    def __call__(self, gradient: Tensor, found_inf: Tensor | None) -> None:
        """One step; none if `found_inf` is 1."""
        group = self._group
        if self._adam:
            assert self._step is not None
            self._step.add_(1)
            beta1, beta2 = group["betas"]
            largest = [self._flats["max_exp_avg_sq"]] if group["amsgrad"] else []
            self._kernel(
                [self._flat],
                [gradient],
                [self._flats["exp_avg"]],
                [self._flats["exp_avg_sq"]],
                largest,
                [self._step],
                amsgrad=group["amsgrad"],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                grad_scale=None,
                found_inf=found_inf,
            )
            if found_inf is not None:
                self._step.sub_(found_inf)
            return
        self._kernel(
            [self._flat],
            [gradient],
            [self._flats["momentum_buffer"]] if group["momentum"] else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            grad_scale=None,
            found_inf=found_inf,
        )

    def end(self) -> None:
        """The optimizer steps tensor by tensor from here on: each counts its own steps."""
        if self._step is not None:
            for each in self._kept:
                each["step"] = self._step.clone()


def _names(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[str]:
    """What the optimizer keeps for every parameter."""
    if isinstance(optimizer, torch.optim.SGD):
        return ["momentum_buffer"] if group["momentum"] else []
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


def _kernel_of(optimizer: torch.optim.Optimizer) -> _Kernel:
    if isinstance(optimizer, torch.optim.SGD):
        name = "_fused_sgd_"
    else:
        decoupled = type(optimizer) is torch.optim.AdamW or optimizer.param_groups[0].get(
            "decoupled_weight_decay"
        )
        name = "_fused_adamw_" if decoupled else "_fused_adam_"
    kernel: _Kernel | None = getattr(torch, name, None)
    if kernel is None:
        raise ValueError(f"this torch has no {name}")
    return kernel
