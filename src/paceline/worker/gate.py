"""Nobody sees a parameter before it has arrived.

With overlap, the reply to a push comes in while the script goes on. A module waits for its own parameters
before its forward; and because parameters are also looked at elsewhere (a tied weight, a penalty in the
loss, an average of the model, state_dict), whoever gets one from its module waits for it, too.

What is not seen: a parameter that the script keeps in a list of its own and reads between step() and the
next forward. Read it from the model there.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.params import Layout

__all__ = ["guard_parameters"]

Need = Callable[[frozenset[int]], None]


def guard_parameters(
    modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter], layout: Layout, need: Need
) -> None:
    """Call `need` with the slices of every parameter of these modules that is about to be looked at.

    Args:
        parameters: in the layout's order.
    """
    slices: dict[int, set[int]] = {id(p): set() for p in parameters}
    for piece in layout.slices:
        for segment in piece.segments:
            slices[id(parameters[segment.tensor])].add(piece.index)
    every = frozenset(piece.index for piece in layout.slices)
    for module in modules:
        own = {
            name: frozenset(slices[id(p)])
            for name, p in module._parameters.items()
            if p is not None and id(p) in slices
        }
        if own:
            module.register_forward_pre_hook(_hook(frozenset().union(*own.values()), every, need))
            # As DeepSpeed does for parameters that are elsewhere: modules look here for `self.weight`.
            module._parameters = _Guarded(module._parameters, own, need)


def _hook(slices: frozenset[int], every: frozenset[int], need: Need) -> Callable[[nn.Module, Any], None]:
    # A compiled graph takes parameters as it likes: it is interrupted, and waits for all of them.
    need_uncompiled: Need = torch.compiler.disable(need)

    # Plain functions: a copy of the model keeps them as they are, where they do no harm.
    def before_forward(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            need_uncompiled(every)
        else:
            need(slices)

    return before_forward


class _Guarded(dict[str, nn.Parameter | None]):
    """A module's parameters; looking at one waits for it. A copy of it is an ordinary dict."""

    def __init__(
        self, parameters: dict[str, nn.Parameter | None], slices: dict[str, frozenset[int]], need: Need
    ) -> None:
        super().__init__(parameters)
        self._slices = slices
        self._all: frozenset[int] = frozenset().union(*slices.values())
        self._need = need

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self._wait(self._slices.get(name))
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._wait(self._slices.get(name))
        return super().get(name, default)

    def items(self) -> Any:
        self._wait(self._all)
        return super().items()

    def values(self) -> Any:
        self._wait(self._all)
        return super().values()

    def _wait(self, slices: frozenset[int] | None) -> None:
        if slices is not None and not torch.compiler.is_compiling():  # there the hook has waited
            self._need(slices)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._wait(self._all)
        return dict, (), None, None, iter([*super().items()])
