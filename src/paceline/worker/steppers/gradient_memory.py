"""Gradients go into the slot: a small model's all at once before a push, others as autograd makes them.

There a hook on every parameter copies its gradient into the slot while it is in the cache and makes `.grad` a
view of the slot; what later accumulates (a second backward, a clip in place) then happens in the slot
itself. Presetting `.grad` to the slot instead would cost a pass to zero it and an addition.

They are summed to see whether they are finite, as they come or all at once as well.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.protection import protection
from paceline.exceptions import UsageError

__all__ = ["GradientMemory", "check_dense"]

_SMALL_BYTES = 1 << 20
"""Up to here a call for every tensor costs more than what it does."""


class GradientMemory:
    """The gradients of all parameters as views of flat memory.

    Args:
        flats: the same memory in few pieces; without them gradients are always put there one by one.
        names: of the parameters, for error messages.
        checks: False leaves it to the servers to see whether gradients are finite. Then they are put into the
            memory all at once, which on a GPU is one launch instead of many, and the CPU waits for none.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        views: Sequence[Tensor],
        flats: Sequence[Tensor] = (),
        names: Sequence[str] = (),
        *,
        checks: bool = True,
    ) -> None:
        self._names = names or [f"number {i}" for i in range(len(parameters))]
        self._parameters = list(parameters)
        self._views = [view.data for view in views]  # so that each counts its own changes
        self._sums: list[Tensor | None] = [None] * len(self._views)
        self._summed = [0] * len(self._views)
        """The versions of the views that were summed: whoever changes a gradient in place counts it up."""
        small = sum(flat.nbytes for flat in flats) <= _SMALL_BYTES
        # A GPU is slow at many small pieces of work, and has no cache that a gradient would stay in.
        self._flats = flats if small or any(flat.is_cuda for flat in flats) else ()
        self._zeroed = [False] * len(self._views)
        self._on_gradient: Callable[[int], None] | None = None
        self._hooks: list[RemovableHandle] = []
        self._checks = checks
        if not self._flats and checks:
            self._put_one_by_one()
        for p, view in zip(self._parameters, self._views, strict=True):
            if p.grad is not None:  # a backward before prepare()
                view.copy_(p.grad)
                p.grad = view

    def watch(self, on_gradient: Callable[[int], None]) -> None:
        """Have each tensor told of, by its place, whose gradient is in the memory."""
        self._on_gradient = on_gradient
        if not self._hooks:
            self._put_one_by_one()

    def _put_one_by_one(self) -> None:
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(self._parameters)
        ]

    def release(self) -> None:
        """Gradients are no longer put into the memory; those that lie there stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        view, name = self._views[i], self._names[i]
        zeroed = self._zeroed

        def hook(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not view:
                assert gradient is not None
                if gradient.requires_grad:  # create_graph=True: collect() takes the values
                    return
                check_dense(gradient, name)
                view.copy_(gradient)
                parameter.grad = view
            zeroed[i] = False
            if not self._flats and self._checks and not protection.resting:
                self._sum(i, view)
            if self._on_gradient is not None:
                self._on_gradient(i)

        return hook

    def _sum(self, i: int, view: Tensor) -> None:
        self._sums[i] = view.sum()
        self._summed[i] = view._version

    def collect(self) -> tuple[list[int], bool]:
        """Before a push: tensors without a gradient, and whether all gradients are finite now."""
        missing = []
        absent: dict[int, Tensor] = {}
        resting = protection.resting or not self._checks
        by_tensor = not self._flats and not resting
        for i, (p, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            gradient = p.grad
            if gradient is view:
                if by_tensor and view._version != self._summed[i]:  # clipped, say, since backward
                    self._sum(i, view)
                continue
            if gradient is None:
                missing.append(i)
                self._sums[i] = None
                if not self._zeroed[i]:
                    view.zero_()
                    self._zeroed[i] = True
            else:  # there are no hooks, or the script put another tensor there
                absent[i] = check_dense(gradient, self._names[i]).detach()
                self._zeroed[i] = False
        if absent:
            torch._foreach_copy_([self._views[i] for i in absent], [*absent.values()])
        if resting:
            return missing, True
        sums = [flat.sum() for flat in self._flats] or [s for s in self._sums if s is not None]
        if (absent and by_tensor) or not sums or not _all_finite(sums):
            return missing, all(bool(torch.isfinite(v).all()) for v in self._views)
        return missing, True

    def received(self, tensors: Iterable[int]) -> None:
        """The memory holds gradients of these now, whoever computed them."""
        for i in tensors:
            self._zeroed[i] = False
            if self._parameters[i].grad is not self._views[i]:
                self._parameters[i].grad = self._views[i]

    def overwritten(self) -> None:
        """Somebody else used the memory: it holds no gradients, nor zeros, any more."""
        for p in self._parameters:
            p.grad = None
        self._zeroed[:] = [False] * len(self._zeroed)


def _all_finite(sums: list[Tensor]) -> bool:
    if len(sums) == 1:
        return math.isfinite(sums[0].item())
    if len({s.dtype for s in sums}) > 1:
        sums = [s.double() for s in sums]
    return math.isfinite(torch.stack(sums).sum().item())


def check_dense(gradient: Tensor, name: str) -> Tensor:
    """The gradient itself; UsageError if it is sparse."""
    if gradient.layout != torch.strided:
        raise UsageError(
            f"parameter {name!r} {list(gradient.shape)} got a sparse gradient, and pushes are dense: "
            "build its layer with sparse=False."
        )
    return gradient
