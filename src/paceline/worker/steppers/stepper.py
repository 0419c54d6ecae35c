"""What a worker does at optimizer.step(): local steps, and requests to exchange with the servers.

A stepper is a generator of requests. The session answers them over its links, the simulator in
`paceline.testing` by events; both run the same update rules (docs/modes.md).
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.core.modes import ModeSpec
from paceline.params import Layout, flat_view

__all__ = ["Request", "Stepper", "StepperMemory", "all_finite"]


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
class StepperMemory:
    """A worker's memory on its model's device, each the bytes of the whole parameter space."""

    slot: Tensor
    """What is pushed."""
    base: Tensor
    """The parameters as they were fetched last."""
    near: Tensor
    """The parameters that the model computes with: `base` itself, or the worker's own."""
    checks_gradients: bool = True
    """Whether the worker looks for NaN and Inf before it pushes. Otherwise the servers do."""


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
        memory: StepperMemory,
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

    def step_ended(self) -> None:
        """The step is made, and the account has its samples. No other thread flushes meanwhile."""
        return

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
        return Request(push=push, fetch=fetch, finite=not push or all_finite(self._slot))

    @torch.no_grad()
    def _take_fresh(self) -> None:
        torch._foreach_copy_(self._near, self._base)


def _wide(flat: Tensor) -> torch.dtype:
    """The squares of half precision do not fit it."""
    return flat.dtype if flat.element_size() >= 4 else torch.float32


def all_finite(flats: Sequence[Tensor]) -> bool:
    """One reduction a slice in the common case: a NaN or an infinity makes any sum non-finite."""
    if flats and flats[0].is_cuda:  # wait for the device once
        largest = [torch.linalg.vector_norm(flat, math.inf).double() for flat in flats]
        return math.isfinite(torch.stack(largest).amax().item())
    return all(math.isfinite(flat.sum().item()) or bool(flat.isfinite().all()) for flat in flats)
