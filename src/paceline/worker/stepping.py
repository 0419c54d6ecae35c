"""What a worker does at optimizer.step(): steps of its own, and requests to exchange with the servers.

A stepper is a generator of requests. The session answers them over its links, the simulator in
`paceline.testing` by events; both run the same update rules (docs/modes.md).

| stepper    | between two pushes                       | what it pushes                          |
|------------|------------------------------------------|-----------------------------------------|
| Gradients  | nothing: every step is a push            | the gradient                            |
| Sums       | plain SGD steps                          | the sum of the gradients                |
| Deltas     | steps of the script's optimizer          | how far it moved, as a gradient         |
| Elastic    | steps of the script's optimizer          | its parameters                          |
| InPlace    | -                                        | nothing: it wrote to the shared memory  |
| Free       | steps of the script's optimizer          | what changed, from a thread of its own  |
"""

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.core.modes import ModeSpec
from paceline.core.modes.lbfgs import Lbfgs
from paceline.exceptions import UsageError
from paceline.params import Layout, flat_view, tensor_views
from paceline.worker.gradients import GradientMemory, check_dense

__all__ = [
    "Memory",
    "Request",
    "Stepper",
    "follows_rate",
    "local_step_of",
    "make_stepper",
    "runs_here",
    "served_optimizer",
]


@dataclass(frozen=True, slots=True)
class Request:
    """An exchange that a stepper wants before it goes on."""

    push: bool = True
    """Push what lies in the slot; False is a fetch only."""
    fetch: bool = True
    """Have fresh parameters afterwards."""
    missing: tuple[int, ...] = ()
    """Tensors without a gradient."""
    finite: bool = True
    """False: there is a NaN or an infinity in it, so it is not to be applied."""
    covers_step: bool = True
    """Whether the step that is being made is in it; False: only the steps before."""
    carries: Literal["slot", "parameters", "nothing"] = "slot"
    """What goes with the push: what lies in the slot; in allreduce the worker's parameters, if the lead
    server needs them, or nothing."""


@dataclass(frozen=True)
class Memory:
    """A worker's memory on its model's device, each the bytes of the whole parameter space."""

    slot: Tensor
    """What is pushed."""
    base: Tensor
    """The parameters as they were fetched last."""
    near: Tensor
    """The parameters that the model computes with: `base` itself, or the worker's own."""


class Stepper(ABC):
    """One worker's side of a mode.

    Args:
        parameters: in the layout's order, bound to `memory.near`.
        local_step: one step of the script's optimizer on them.
    """

    def __init__(
        self,
        mode: ModeSpec,
        layout: Layout,
        memory: Memory,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        local_step: Callable[[], Any],
    ) -> None:
        self.mode = mode
        self.memory = memory
        self.steps = 0
        """Steps since the worker joined."""
        self.unsent = 0
        """Steps that no push has covered yet."""
        self._layout = layout
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._local_step = local_step
        self._slot = [flat_view(memory.slot, s) for s in layout.slices]
        self._base = [flat_view(memory.base, s) for s in layout.slices]
        self._near = [flat_view(memory.near, s) for s in layout.slices]

    def step(self) -> Iterator[Request]:
        """One step of the script. The gradients lie in the parameters' `.grad`."""
        self.steps += 1
        self.unsent += 1
        yield from self._step()

    def flush(self) -> Iterator[Request]:
        """Push what no push has covered: the script is through."""
        if self.unsent:
            yield from self._exchange()

    def caught_up(self) -> None:
        """It rested, with all its steps pushed, and fresh parameters came meanwhile."""
        if self.memory.near is not self.memory.base:
            self._take_fresh()

    def overwritten(self) -> None:
        """The parameters were assigned: take them over, and forget what was on its way."""
        self.unsent = 0
        if self.memory.near is not self.memory.base:
            self._take_fresh()

    def slot_norm(self) -> float:
        """The norm of what is about to be pushed, which is finite. It takes a pass over all of it."""
        norm = math.hypot(*(torch.linalg.vector_norm(s, dtype=_wide(s)).item() for s in self._slot))
        return norm if math.isfinite(norm) else sys.float_info.max  # the squares of huge numbers do not fit

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it beside parameters and the optimizer's state."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from `state()`."""
        assert not state, "this stepper keeps nothing"

    @abstractmethod
    def _step(self) -> Iterator[Request]: ...

    @abstractmethod
    def _exchange(self) -> Iterator[Request]: ...

    def _request(self, *, push: bool = True, fetch: bool = True) -> Request:
        """Of what lies in the slot."""
        if push:
            self.unsent = 0
        return Request(push=push, fetch=fetch, finite=not push or _all_finite(self._slot))

    @torch.no_grad()
    def _take_fresh(self) -> None:
        torch._foreach_copy_(self._near, self._base)


class Gradients(Stepper):
    """bsp, backup, ssp, asp: every step is an exchange, and the servers' optimizer makes it.

    In sandblaster a push brings nothing back: parameters change when an epoch is over, and are fetched then.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        views = tensor_views(self.memory.slot, self._layout)
        self.gradients = GradientMemory(
            self._parameters, views, self._slot, [t.name for t in self._layout.tensors]
        )

    def overwritten(self) -> None:
        """The slot held parameters meanwhile."""
        super().overwritten()
        self.gradients.overwritten()

    def _step(self) -> Iterator[Request]:
        return self._exchange()

    def _exchange(self) -> Iterator[Request]:
        missing, finite = self.gradients.collect()
        self.unsent = 0
        yield Request(fetch=not self.mode.by_epoch, missing=tuple(missing), finite=finite)


class Sums(Stepper):
    """Downpour, and any mode with a period: plain SGD between exchanges, gradients add up in the slot."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        views = tensor_views(self.memory.slot, self._layout)
        self._sums = {id(p): view for p, view in zip(self._parameters, views, strict=True)}
        self._names = {id(p): t.name for p, t in zip(self._parameters, self._layout.tensors, strict=True)}
        self._behind = 0

    @torch.no_grad()
    def _add_up(self) -> None:
        for group in self._optimizer.param_groups:
            trained = [p for p in group["params"] if p.grad is not None and id(p) in self._sums]
            if not trained:
                continue
            gradients = [check_dense(p.grad, self._names[id(p)]) for p in trained]
            sign = -1.0 if group.get("maximize") else 1.0
            torch._foreach_add_([self._sums[id(p)] for p in trained], gradients)
            torch._foreach_add_(trained, gradients, alpha=-sign * float(group["lr"]))

    def _step(self) -> Iterator[Request]:
        self._add_up()
        self._behind += 1
        fetch = self._behind >= self.mode.fetch_every
        if self.unsent >= self.mode.push_every:
            yield from self._exchange(fetch=fetch)
        elif fetch:
            yield self._request(push=False)
            self._fetched()

    def _exchange(self, *, fetch: bool = True) -> Iterator[Request]:
        yield self._request(fetch=fetch)
        torch._foreach_zero_(self._slot)
        if fetch:
            self._fetched()

    def overwritten(self) -> None:
        """The slot held parameters meanwhile."""
        super().overwritten()
        torch._foreach_zero_(self._slot)

    def _fetched(self) -> None:
        self._behind = 0
        self._take_fresh()


class Deltas(Stepper):
    """local, diloco: the script's optimizer steps here; what it moved is the gradient of the outer one."""

    def _step(self) -> Iterator[Request]:
        self._local_step()
        if self.unsent >= self.mode.push_every:
            yield from self._exchange()

    def _exchange(self) -> Iterator[Request]:
        with torch.no_grad():
            for slot, base, near in zip(self._slot, self._base, self._near, strict=True):
                torch.sub(base, near, out=slot)
        request = self._request()
        yield request
        self._take_fresh()
        if not request.finite:  # its momentum is as broken as what it moved
            self._optimizer.state.clear()


class Elastic(Stepper):
    """easgd, eamsgd: every period the worker and the centre are drawn together by the same difference.

    In the order of the authors' code: the gradient was taken at the value before the elastic step. With
    Nesterov momentum (eamsgd) the model stands where the gradient is taken, at x + momentum·v, and x is what
    is exchanged.
    """

    def _step(self) -> Iterator[Request]:
        if self.steps > 1 and (self.steps - 1) % self.mode.push_every == 0:
            sound = True
            for request in self._exchange(covers_step=False):
                sound = request.finite
                yield request
            if not sound:
                return  # the gradient was taken at what is not finite, and is not either
            self.unsent = 1
        self._local_step()

    def _exchange(self, *, covers_step: bool = True) -> Iterator[Request]:
        with torch.no_grad():
            torch._foreach_copy_(self._slot, self._near)
            ahead = self._ahead()
            for view, p in zip(tensor_views(self.memory.slot, self._layout), self._parameters, strict=True):
                if p in ahead:
                    view.sub_(ahead[p])
        request = self._request()
        yield replace(request, covers_step=covers_step or not request.finite)
        self._take_fresh()
        if not request.finite:
            self._optimizer.state.clear()
            return
        with torch.no_grad():
            for p, distance in ahead.items():
                p.add_(distance)

    def _ahead(self) -> dict[nn.Parameter, Tensor]:
        """How far the model stands ahead of the worker's value, parameter by parameter."""
        if self.mode.name != "eamsgd":
            return {}
        found = {}
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                velocity = self._optimizer.state.get(p, {}).get("momentum_buffer")
                if velocity is not None:
                    found[p] = velocity * (-float(group["lr"]) * float(group["momentum"]))
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Start from the centre, as a replaced worker does.

        Checkpoints do not keep the worker's own parameters (older ones did): they hold steps that the centre
        of the checkpoint has not had, and whose samples are dealt again.
        """


class InPlace(Stepper):
    """hogwild: the optimizer writes into the shared memory, without locks; the servers only count.

    No server sees the gradients, so the worker itself refuses those that are not finite.
    """

    def _step(self) -> Iterator[Request]:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        finite = _all_finite([g if g.layout == torch.strided else g.coalesce().values() for g in gradients])
        if finite:
            self._local_step()
        return self._exchange(finite=finite)

    def _exchange(self, *, finite: bool = True) -> Iterator[Request]:
        self.unsent = 0
        yield Request(fetch=False, finite=finite)


class Free(Stepper):
    """dogwild: the script's optimizer steps here; `flush`, called by another thread, carries what changed.

    The two threads share the parameters and no lock, so a write can get lost.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sent = [near.clone() for near in self._near]

    def _step(self) -> Iterator[Request]:
        self._local_step()
        yield from ()

    def _exchange(self) -> Iterator[Request]:
        with torch.no_grad():
            torch._foreach_copy_(self._sent, self._near)
            for slot, base, sent in zip(self._slot, self._base, self._sent, strict=True):
                torch.sub(base, sent, out=slot)
        request = replace(self._request(), covers_step=False)
        yield request
        if not request.finite:
            self._take_fresh()
            self._optimizer.state.clear()
            return
        with torch.no_grad():  # what the others did meanwhile
            for near, base, sent in zip(self._near, self._base, self._sent, strict=True):
                near.add_(base - sent)


_STEPPERS: dict[str, type[Stepper]] = {
    "gradient": Gradients,
    "sum": Sums,
    "delta": Deltas,
    "elastic": Elastic,
    "none": InPlace,
}


def make_stepper(
    mode: ModeSpec,
    layout: Layout,
    memory: Memory,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    local_step: Callable[[], Any],
) -> Stepper:
    """The stepper that a mode asks for."""
    kind = Free if mode.name == "dogwild" else _STEPPERS[mode.payload]
    return kind(mode, layout, memory, parameters, optimizer, local_step)


def runs_here(mode: ModeSpec) -> bool:
    """Whether the script's optimizer is the worker's own, and not the servers'."""
    return mode.payload in ("delta", "elastic", "none") or mode.outer != "own"


def served_optimizer(mode: ModeSpec, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that the servers run: the script's own, or the mode's outer one over the same groups.

    Raises:
        UsageError: the script's optimizer does not fit the mode.
    """
    mode = mode.inner or mode
    if mode.name == "eamsgd":
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


def _wide(flat: Tensor) -> torch.dtype:
    """The squares of half precision do not fit it."""
    return flat.dtype if flat.element_size() >= 4 else torch.float32


def _all_finite(flats: Sequence[Tensor]) -> bool:
    """One reduction a slice in the common case: a NaN or an infinity makes any sum non-finite."""
    return all(math.isfinite(flat.sum().item()) or bool(flat.isfinite().all()) for flat in flats)
