"""Contributions: gradients that workers pushed, their weighted mean, and whether it is finite."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.protection import protection
from paceline.params import Layout, Slice, flat_view, segment_view

__all__ = ["Contribution", "Copy", "Gradients", "finite", "refresh", "sum_into", "wide"]

Copy = Sequence[Tensor | None]
"""A worker's copy of a shard, slice by slice: None where another server fills it."""


class Gradients:
    """Views of one worker's gradient memory for the slices of a shard. Made once, used every push."""

    def __init__(self, base: Tensor, layout: Layout, slices: Sequence[Slice]) -> None:
        self.flat = [flat_view(base, s) for s in slices]
        self.segments = [[segment_view(base, layout, g) for g in s.segments] for s in slices]


@dataclass(slots=True)
class Contribution:
    """One worker's part of an update."""

    worker: int
    gradients: Gradients
    weight: float = 1.0
    missing: frozenset[int] = frozenset()
    """Tensors that got no gradient in this step."""
    scale: float = 1.0
    """How much of its step is made (damping by staleness)."""
    backup: Sequence[Tensor] = ()
    """The parameters that it was computed from, slice by slice, where the damping needs them."""
    checked: bool = False
    """Its worker found it finite, in this same memory."""
    groups: Collection[int] | None = None
    """Parameter groups that it is for, where the run has several optimizers; None: all."""

    def touches(self, piece: Slice) -> bool:
        """Whether it has anything for a slice."""
        return self.groups is None or piece.group in self.groups


def refresh(copies: Sequence[Copy], i: int, values: Tensor) -> None:
    """Write slice `i` into workers' copies."""
    for copy in copies:
        into = copy[i]
        if into is not None:
            into.copy_(values)


def sum_into(out: Tensor, i: int, contributions: Sequence[Contribution]) -> None:
    """The weighted mean of slice `i`, in the order given."""
    if out.element_size() == 2 and len(contributions) > 1:
        mean = torch.empty_like(out, dtype=torch.float32)
        _sum_all(mean, [c.gradients.flat[i].float() for c in contributions], contributions)
        out.copy_(mean)
    else:
        _sum_all(out, [c.gradients.flat[i] for c in contributions], contributions)


def _sum_all(out: Tensor, parts: Sequence[Tensor], contributions: Sequence[Contribution]) -> None:
    """The weighted mean of `parts`, one of each contribution."""
    first, *rest = contributions
    total = math.fsum(c.weight for c in contributions)
    if all(c.weight == first.weight for c in rest) and all(c.scale == 1.0 for c in contributions):
        if rest:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)
            out.div_(len(contributions))
        else:
            out.copy_(parts[0])
        return
    torch.mul(parts[0], first.scale * first.weight / total, out=out)
    for part, c in zip(parts[1:], rest, strict=True):
        out.add_(part, alpha=c.scale * c.weight / total)


def wide(flat: Tensor) -> Tensor:
    """A copy of two-byte floats as float32; others themselves."""
    return flat.float() if flat.element_size() == 2 else flat


def finite(flat: Tensor) -> bool:
    """One reduction in the common case: a NaN or an infinity makes any sum non-finite."""
    if protection.resting:
        return True
    total = flat.sum(dtype=torch.float32 if flat.element_size() == 2 else None)
    return math.isfinite(total.item()) or bool(torch.isfinite(flat).all())
