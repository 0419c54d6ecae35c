"""The optimizer that the servers run in a mode, and the steps that remain the worker's own."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.modes import ModeSpec
from paceline.core.modes.lbfgs import Lbfgs
from paceline.exceptions import UsageError

__all__ = ["follows_rate", "local_step_of", "runs_here", "served_optimizer"]


def runs_here(mode: ModeSpec) -> bool:
    """Whether the script's optimizer is the worker's own, and not the servers'."""
    return mode.payload in ("delta", "elastic", "none") or mode.outer != "own"


def served_optimizer(mode: ModeSpec, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that the servers run: the script's own, or the mode's outer one over the same groups.

    Raises:
        UsageError: the script's optimizer does not fit the mode.
    """
    mode = mode.inner or mode
    if mode.local_nesterov:
        _make_nesterov(optimizer)
    if mode.by_epoch:
        return _lbfgs_settings(mode, optimizer)
    if mode.payload == "elastic":
        return torch.optim.SGD(_groups(optimizer), lr=1.0)  # the centre moves by itself
    match mode.outer:
        case "adagrad":
            return torch.optim.Adagrad(_groups(optimizer, "lr", "maximize"))
        case "average":
            return torch.optim.SGD(_groups(optimizer), lr=1.0)
        case "nesterov" | "fitted":
            lr, momentum = mode.outer_rates
            return torch.optim.SGD(_groups(optimizer), lr=lr, momentum=momentum, nesterov=momentum > 0)
        case _:
            return optimizer


def follows_rate(mode: ModeSpec, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the servers' optimizer, which is not the script's, steps at the script's learning rate."""
    return mode.outer == "adagrad" or (mode.by_epoch and isinstance(optimizer, torch.optim.LBFGS))


def _lbfgs_settings(mode: ModeSpec, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Sandblaster: an optimizer that never steps, and carries what L-BFGS on the servers is to use.

    Of the script's LBFGS that is what it says, except for a history that the mode says; max_iter and max_eval
    have no meaning where an epoch is one evaluation.
    """
    settings: dict[str, Any] = {
        "lr": 1.0,
        "line_search_fn": "backtrack",
        "tolerance_grad": 1e-7,
        "tolerance_change": 1e-9,
    }
    if isinstance(optimizer, torch.optim.LBFGS):
        settings |= {name: optimizer.param_groups[0][name] for name in (*settings, "history_size")}
        if mode.history != ModeSpec.history:
            settings["history_size"] = mode.history
    else:
        settings |= {"history_size": mode.history, "instead_of": type(optimizer).__name__}
    # What makes no sense is refused here, where the script is.
    Lbfgs(lr=float(settings["lr"]), history=settings["history_size"])
    return torch.optim.SGD([group | settings for group in _groups(optimizer)], lr=settings["lr"])


def _groups(optimizer: torch.optim.Optimizer, *kept: str) -> list[dict[str, Any]]:
    names = ("params", *kept)
    return [{k: group[k] for k in names if k in group} for group in optimizer.param_groups]


def _make_nesterov(optimizer: torch.optim.Optimizer) -> None:
    """eamsgd's local steps are SGD with Nesterov momentum; the paper's is 0.99 unless the script says."""
    if not isinstance(optimizer, torch.optim.SGD):
        raise UsageError(
            f"mode eamsgd steps with Nesterov momentum and needs torch.optim.SGD, got "
            f"{type(optimizer).__name__}: use SGD, or mode easgd, which takes any optimizer."
        )
    for group in optimizer.param_groups:
        group.update(momentum=group["momentum"] or 0.99, nesterov=True, dampening=0)


def local_step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's own step, without what torch wraps around it (hooks run in our step already)."""
    step = inspect.unwrap(type(optimizer).step).__get__(optimizer)

    @torch.no_grad()
    def local_step() -> Any:
        return step()

    return local_step
