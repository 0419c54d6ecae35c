"""torch's fused optimizer kernels, and what they need to give the result of the plain ones.

Servers use fused kernels because they are several times faster, and everything that must give the same bits
uses them too: a script that runs alone, and workers that step by themselves. The script did not ask for them,
so it must not notice them. Three things do not work with fused kernels and work without:

* SGD with momentum, where some parameters of a group get their first gradient later than others (stochastic
  depth, mixture of experts, a second head). Here such parameters are stepped by a call of their own.
* sparse gradients (SGD, Adagrad). The group goes back to the kernels that the script had.
* parameters that are not real floating-point numbers, or on a device without fused kernels. The group keeps
  its kernels.

A kernel can be broken in one release of torch (that of SGD for bfloat16 on CPUs once changed nothing). So
each is tried, once for a dtype and a device, on a few numbers; if it does not do what the plain one does,
groups keep their kernels, and a warning says so.
"""

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

__all__ = ["allow_late_gradients", "kernel_works", "narrow_step", "takes_fused", "use_fused"]

log = logging.getLogger("paceline")

_DEVICES = frozenset(["cpu", "cuda"])
_CLOSE = 0.02
"""Two steps of two kernels may differ by this share: two-byte floats have two or three digits."""


def takes_fused(
    kind: type, group: dict[str, Any], parameters: Iterable[Tensor], device: str | None = None
) -> bool:
    """Whether optimizer class `kind` has a fused kernel that works for these parameters, and the script chose
    none for this group.

    Args:
        device: where it is to run; None: where the parameters are.
    """
    unset = group.get("fused") is None and not group.get("foreach") and not group.get("differentiable")
    if not unset or "fused" not in inspect.signature(kind).parameters:
        return False
    kind = _of_torch(kind)
    return all(
        kernel_works(kind, dtype, on)
        for dtype, on in {(p.dtype, device or p.device.type) for p in parameters}
    )


def _of_torch(kind: type) -> type:
    """torch's class of this name, if ours stands in front of it (worker/script_optimizer.py)."""
    own = getattr(torch.optim, kind.__name__, kind)
    return own if isinstance(own, type) and issubclass(kind, own) else kind


@cache
def kernel_works(kind: type, dtype: torch.dtype, device: str) -> bool:
    """Whether a fused kernel does what the plain one does. True for classes that are not torch's, untried."""
    if not kind.__module__.startswith("torch.optim.") or not dtype.is_floating_point:
        return True
    results = []
    try:
        for chosen in ({"fused": True}, {"foreach": False}):
            p = torch.tensor([1.0, -2.0, 4.0] * 11, dtype=dtype, device=device)
            p.grad = torch.tensor([0.5, -0.25, 1.0] * 11, dtype=dtype, device=device)
            settings = {"momentum": 0.5, **chosen} if kind is torch.optim.SGD else chosen
            # Not `step` itself: what stands around it is of no use here, and takes long the first time.
            step = inspect.unwrap(kind.step).__get__(kind([p], lr=0.25, **settings))  # type: ignore[attr-defined]
            with torch.no_grad():
                step()
                step()
            results.append(p.double())
        works = torch.allclose(results[0], results[1], rtol=_CLOSE, atol=0.0)
        why = "does not do what the plain one does"
    except RuntimeError as error:
        works, why = False, f"fails ({error})"
    if not works:
        log.warning(
            "torch %s: the fused kernel of %s for %s on %s %s. Plain kernels are used, which are slower.",
            *(torch.__version__, kind.__name__, dtype, device, why),
        )
    return works


def use_fused(optimizer: torch.optim.Optimizer) -> None:
    """Let this optimizer use fused kernels where it can, without a difference that the script notices.

    It goes on using them after a `load_state_dict`, whose groups say which kernels another optimizer used.
    """
    _choose_kernels(optimizer)
    if "_init_group" not in vars(optimizer):  # not called for this optimizer before
        optimizer.register_load_state_dict_post_hook(_choose_kernels)
        allow_late_gradients(optimizer)
        _allow_sparse_gradients(optimizer)


def _choose_kernels(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        suits = all(p.device.type in _DEVICES and p.is_floating_point() for p in group["params"])
        if suits and takes_fused(type(optimizer), group, group["params"]):
            group.update(fused=True, foreach=False)
            for p in group["params"]:
                narrow_step(optimizer.state.get(p, {}))


def narrow_step(state: dict[str, Any]) -> None:
    """Fused kernels count steps in float32, whatever the default dtype was when the state was made."""
    if isinstance(state.get("step"), Tensor):
        state["step"] = state["step"].float()


def allow_late_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Let parameters of one fused group get their first gradient at different steps.

    torch's fused SGD takes either only parameters with a momentum buffer or only parameters without one.
    Adam, AdamW and Adagrad keep a step count for each parameter and need nothing.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    collect = optimizer._init_group

    def collect_stepped(
        group: dict[str, Any], params: list[Tensor], grads: list[Tensor], buffers: list[Tensor | None]
    ) -> bool:
        sparse: bool = collect(group, params, grads, buffers)
        if group["fused"] and not sparse and group["momentum"]:
            _step_late_ones(optimizer, group, params, grads, buffers)
        return sparse

    optimizer._init_group = collect_stepped  # type: ignore[method-assign]


def _step_late_ones(
    optimizer: torch.optim.SGD,
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor | None],
) -> None:
    """Step the parameters without a momentum buffer and take them out, if others have one."""
    late = [i for i, buffer in enumerate(buffers) if buffer is None]
    if not 0 < len(late) < len(buffers):
        return
    first: list[Tensor | None] = [None] * len(late)
    sgd(
        [params[i] for i in late],
        [grads[i] for i in late],
        first,
        fused=True,
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=getattr(optimizer, "found_inf", None),
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )
    for i, buffer in zip(late, first, strict=True):
        optimizer.state[params[i]]["momentum_buffer"] = buffer
    for i in reversed(late):
        del params[i], grads[i], buffers[i]


def _allow_sparse_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give a group its own kernels back as soon as one of its gradients is sparse."""
    if not isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        return  # the others refuse sparse gradients whatever their kernels
    collect: Callable[..., Any] = optimizer._init_group

    def collect_checked(group: dict[str, Any], *lists: list[Any]) -> Any:
        if group["fused"] and any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
            group.update(fused=None, foreach=None)
        return collect(group, *lists)

    optimizer._init_group = collect_checked  # type: ignore[method-assign]
