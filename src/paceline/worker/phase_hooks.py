"""When a script's own phases begin and end: the model's forward, and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import Lane

__all__ = ["on_backward", "watch_backward", "watch_forward"]


def watch_forward(model: nn.Module, lane: Lane) -> None:
    """From here on calling the model is a phase of its own, unless it is an evaluation (without autograd)."""
    phases: list[int] = []

    def begins(*_: Any) -> None:
        phases.append(lane.enter(Phase.FORWARD if torch.is_grad_enabled() else Phase.OTHER))

    def ends(*_: Any) -> None:
        if phases:
            lane.enter(phases.pop())

    compiled = getattr(model, "_compiled_call_impl", None)
    if compiled is not None:  # model.compile(): a hook would be compiled, too

        def call(*args: Any, **kwargs: Any) -> Any:
            begins()
            try:
                return compiled(*args, **kwargs)
            finally:
                ends()

        model._compiled_call_impl = call
        return
    model.register_forward_pre_hook(begins)
    model.register_forward_hook(ends, always_call=True)


def watch_backward(lane: Lane) -> None:
    """From here on backward is a phase of its own, in this process.

    `Tensor.backward` calls `torch.autograd.backward`; there is no hook for when it begins and ends.
    """
    backward = torch.autograd.backward

    def timed(*args: Any, **kwargs: Any) -> None:
        phase = lane.enter(Phase.BACKWARD)
        try:
            backward(*args, **kwargs)
        finally:
            lane.enter(phase)

    torch.autograd.backward = timed


def on_backward(begins: Callable[[], None], ended: Callable[[], None]) -> None:
    """From here on have it told when gradients are computed in this process: by backward, or by
    `torch.autograd.grad` unless its result is differentiated again (a penalty on gradients is a part of a
    loss, and a backward pass follows).
    """
    backward, grad = torch.autograd.backward, torch.autograd.grad

    def told_backward(*args: Any, **kwargs: Any) -> None:
        begins()
        backward(*args, **kwargs)
        ended()

    def told_grad(*args: Any, **kwargs: Any) -> Any:
        found = grad(*args, **kwargs)
        if not kwargs.get("create_graph") and not (len(args) > 4 and args[4]):
            ended()
        return found

    torch.autograd.backward = told_backward
    torch.autograd.grad = told_grad
