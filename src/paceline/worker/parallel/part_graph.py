"""One replica's share of a call: its part of the forward pass, and later its part of the backward pass."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Plain: what the session counts as the script's backward passes must not count those of parts.
from torch.autograd import grad as plain_grad
from torch.utils import _pytree as pytree

__all__ = ["Circumstances", "PartGraph"]


class Circumstances(NamedTuple):
    """What torch keeps for each thread, and a replica must have as the script has it."""

    needs_gradients: bool
    autocast: torch.dtype | None = None
    """The dtype that the script lets torch compute in on the CPU, if it does."""

    @classmethod
    def now(cls, *, needs_gradients: bool) -> "Circumstances":
        """The caller's."""
        amp = torch.is_autocast_enabled("cpu")
        return cls(needs_gradients, torch.get_autocast_dtype("cpu") if amp else None)

    @contextlib.contextmanager
    def apply(self) -> Any:
        """Within, the calling thread has them."""
        with (
            torch.set_grad_enabled(self.needs_gradients),
            torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None),
        ):
            yield


class PartGraph:
    """Of one part of one call.

    Args:
        parameters: for which a gradient is wanted, as the replica has them.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._inputs: list[Tensor] = []
        self._outputs: list[Any] = []
        self.spec: Any = None
        """The structure of what the model returned."""

    def forward(
        self,
        model: Callable[..., Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        inputs: list[Tensor],
        circumstances: Circumstances,
    ) -> list[Any]:
        """What the model returns, without its structure; tensors without their graph, which stays here.

        Args:
            inputs: those of the arguments for which a gradient is wanted.
        """
        args, kwargs = arguments
        with circumstances.apply():
            outputs, self.spec = pytree.tree_flatten(model(*args, **kwargs))
        if circumstances.needs_gradients:
            self._outputs, self._inputs = outputs, inputs
        return [o.detach() if isinstance(o, Tensor) else o for o in outputs]

    def differentiable(self) -> list[bool]:
        """Of each output: whether it has a gradient."""
        return [isinstance(o, Tensor) and o.requires_grad for o in self._outputs]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, and behind them those of the parameters. The graph is gone then.

        Args:
            gradients: of the outputs.
        """
        outputs, self._outputs = self._outputs, []
        pairs = [
            (out, g)
            for out, g in zip(outputs, gradients, strict=True)
            if g is not None and isinstance(out, Tensor) and out.requires_grad
        ]
        wanted = [*self._inputs, *self._parameters]
        if not pairs or not wanted:
            return [None] * len(wanted)
        roots, seeds = zip(*pairs, strict=True)
        return [*plain_grad(roots, wanted, seeds, allow_unused=True)]
