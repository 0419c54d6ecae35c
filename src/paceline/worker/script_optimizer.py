"""Makes the user's optimizer exchange with the servers instead of updating by itself.

The object stays the same (schedulers, gradient scalers and the user hold on to it); only its class
becomes a subclass of its class whose `step` is an exchange and whose state lives on the servers.
"""

import copyreg
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.exceptions import UsageError
from paceline.params import StateBook, TensorInfo, dtype_named
from paceline.params.fused import narrow_step

__all__ = [
    "ExchangingOptimizer",
    "StateDict",
    "as_loaded",
    "as_made",
    "has_history",
    "make_exchanging",
    "pack_state",
    "stop_exchanging",
    "unpack_state",
]


StateDict = dict[str, Any]
"""torch's state_dict of an optimizer."""


class OptimizerSteps(Protocol):
    def step(self) -> None: ...
    def zeroed(self, optimizer: torch.optim.Optimizer) -> None: ...
    def optimizer_state(self) -> StateDict: ...
    def load_optimizer_state(self, state: StateDict) -> None: ...


class ExchangingOptimizer(torch.optim.Optimizer):
    """Mixed in front of the user's optimizer class by `make_exchanging`."""

    paceline_calls: OptimizerSteps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients and take fresh parameters; like the optimizer's own step otherwise."""
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (closure,), {})
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.paceline_calls.step()
        self._opt_called = True
        for post in self._optimizer_step_post_hooks.values():
            post(self, (closure,), {})
        return loss

    # A scheduler made earlier wrapped the old step; it must find this one as good.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; batches whose gradients are gone without a step are counted as skipped."""
        super().zero_grad(set_to_none)
        self.paceline_calls.zeroed(self)

    def add_param_group(self, param_group: StateDict) -> None:
        """Refused: the servers' layout is fixed."""
        raise UsageError(
            "add_param_group() after prepare(): the run's parameters are laid out already. Give the "
            "optimizer all parameter groups before prepare()."
        )

    def state_dict(self) -> StateDict:
        """The state from the servers, in torch's format."""
        return self.paceline_calls.optimizer_state()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Give the servers a state in torch's format. Call it on every worker, or on one."""
        self.paceline_calls.load_optimizer_state(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, in memory or in a file, is of the user's own class, with the state from the servers."""
        given = [p for group in self.param_groups for p in group["params"]]
        found = self.state_dict()["state"]
        state = {given[int(index)]: values for index, values in found.items()}
        # pickle refuses the usual way, copyreg.__newobj__, for an object of another class.
        new = (type(self).__bases__[1], object, None)
        return copyreg._reconstructor, new, {**self.__getstate__(), "state": defaultdict(dict, state)}  # type: ignore[attr-defined]

    def local_state(self) -> StateDict:
        """This worker's own state, where workers step by themselves."""
        return super().state_dict()

    def load_local_state(self, state_dict: StateDict) -> None:
        """Take over a state as this worker's own."""
        super().load_state_dict(state_dict)


def make_exchanging(optimizer: torch.optim.Optimizer, exchange: OptimizerSteps) -> None:
    """Turn this very object into one that exchanges."""
    kind = type(optimizer)
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = type(kind.__name__, (ExchangingOptimizer, kind), {"__module__": kind.__module__})
    optimizer.paceline_calls = exchange  # type: ignore[attr-defined]
    # A fused optimizer would have a gradient scaler leave the unscaling to its kernel.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def stop_exchanging(optimizer: torch.optim.Optimizer) -> None:
    """Undo `make_exchanging`: the optimizer is of its own class again."""
    _, optimizer.__class__ = type(optimizer).__bases__
    del optimizer.paceline_calls  # type: ignore[attr-defined]


def has_history(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has made a step, or a state was loaded. (Adagrad has a state from the start.)"""
    return any(
        "step" not in values or float(values["step"]) > 0 for values in optimizer.state.values() if values
    )


def pack_state(state: StateDict, infos: Sequence[TensorInfo | None]) -> dict[str, Tensor]:
    """torch's state_dict of an optimizer as StateBook pieces.

    Args:
        infos: of the optimizer's parameters, in its order; None for those that are not trained.
    """
    pieces: dict[str, Tensor] = {}
    for index, values in state["state"].items():
        info = infos[int(index)]
        if info is None:
            continue
        for what, value in values.items():
            if isinstance(value, Tensor):
                piece = value.detach().cpu()
                if piece.shape == info.shape and piece.dim():  # in memory order
                    laid_out = torch.empty_strided(info.shape, info.stride, dtype=piece.dtype).copy_(piece)
                    piece = laid_out.as_strided((info.numel,), (1,))
            elif isinstance(value, int | float):
                what += "#i" if isinstance(value, int) else "#f"
                piece = torch.tensor(float(value), dtype=torch.float64)
            else:
                continue
            pieces[StateBook.key(info.name, what, 0, info.numel)] = piece
    return pieces


def as_loaded(state: StateDict, infos: Sequence[TensorInfo | None], *, fused: bool) -> StateDict:
    """A state_dict with the dtypes that torch's load_state_dict gives it.

    Step counts are tensors: float32 for fused kernels, else as they are. All else has its parameter's dtype.

    Args:
        infos: of the optimizer's parameters, in its order; None for those that are not trained.
        fused: whether the servers use fused kernels.
    """
    loaded: dict[Any, StateDict] = {}
    for index, values in state["state"].items():
        info = infos[int(index)]
        loaded[index] = dict(values)
        for what, value in values.items() if info is not None else ():
            assert info is not None
            if what == "step":
                wide = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
                count = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=wide)
                loaded[index][what] = count.float() if fused else count
            elif isinstance(value, Tensor) and value.is_floating_point():
                loaded[index][what] = value.to(dtype_named(info.dtype))
    return {**state, "state": loaded}


def as_made(state: StateDict, *, fused: bool) -> StateDict:
    """The state_dict of an optimizer that has made steps, with the dtypes that its kernels need.

    Unlike a load, this converts nothing but step counts for fused kernels. NAdam keeps the product of its
    momenta and ASGD its rate in the default dtype, whatever the parameter's is.

    Args:
        fused: whether the servers use fused kernels.
    """
    kept = {index: dict(values) for index, values in state["state"].items()}
    for values in kept.values() if fused else ():
        narrow_step(values)
    return {**state, "state": kept}


def unpack_state(
    book: StateBook, infos: Sequence[TensorInfo | None], optimizer: torch.optim.Optimizer, *, fused: bool
) -> StateDict:
    """The inverse of `pack_state`: torch's state_dict, with the optimizer's present settings.

    Adagrad gives every parameter a state when it is made. Parameters that are not trained keep theirs in the
    worker's own optimizer, and it is found there.

    Args:
        fused: whether the servers use fused kernels, which count the steps of all parameters in float32.
    """
    state: dict[int, StateDict] = {}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    for index, (p, info) in enumerate(zip(given, infos, strict=True)):
        if info is None:
            if own := optimizer.state.get(p):
                state[index] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in own.items()}
                if fused:
                    narrow_step(state[index])
            continue
        kept: StateDict = {}
        for what in book.kinds(info.name):
            value = book.piece(info.name, what, 0, info.numel)
            assert value is not None
            if what[-2:] in ("#i", "#f"):
                kept[what[:-2]] = int(value) if what.endswith("#i") else float(value)
            elif value.numel() == info.numel and value.dim():
                kept[what] = value.reshape(-1).as_strided(info.shape, info.stride).clone()
            else:
                kept[what] = value.clone()
        if kept:
            state[index] = kept
    groups, start = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        packed = {k: v for k, v in group.items() if k != "params"}
        groups.append({**packed, "params": list(range(start, start + count))})
        start += count
    return {"state": state, "param_groups": groups}
