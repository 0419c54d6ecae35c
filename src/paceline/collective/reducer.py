"""How gradients and parameters reach the other members of a group, and how a mean is computed."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Reducer", "is_finite", "ring_bytes", "shared_bytes", "weighted_mean"]


class Reducer(ABC):
    """Moves what is large between the members of a group."""

    @abstractmethod
    def mean(self, weights: Sequence[float]) -> bool:
        """Replace every member's gradient by the weighted mean; False if that is not finite."""

    @abstractmethod
    def share(self) -> None:
        """Replace every member's parameters by the root's."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and threads."""


def weighted_mean(out: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> None:
    """The mean of `parts` into `out`, which may be the first of them: as servers compute it, to the bit."""
    first, *rest = parts
    if len(set(weights)) == 1:
        if not rest:
            out.copy_(first)
            return
        torch.add(first, rest[0], out=out)
        for part in rest[1:]:
            out.add_(part)
        out.div_(len(parts))
        return
    total = math.fsum(weights)
    torch.mul(first, weights[0] / total, out=out)
    for part, weight in zip(rest, weights[1:], strict=True):
        out.add_(part, alpha=weight / total)


def is_finite(flat: Tensor) -> bool:
    """Whether all elements are finite. Usually one sum: a NaN or an infinity makes any sum non-finite."""
    total = flat.sum(dtype=torch.float32 if flat.element_size() == 2 else None)
    return math.isfinite(total.item()) or bool(torch.isfinite(flat).all())


def ring_bytes(tensor_bytes: int, members: int) -> int:
    """What every member of a ring sends, and receives, to all-reduce so many bytes: rounded down."""
    return 2 * (members - 1) * tensor_bytes // members


def shared_bytes(tensor_bytes: int, members: int, *, root: bool) -> tuple[int, int]:
    """What a member gives and gets when the root gives its parameters to all others."""
    return ((members - 1) * tensor_bytes, 0) if root else (0, tensor_bytes)
