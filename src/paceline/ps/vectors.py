"""The named vectors of one slice, and what L-BFGS's coordinator has servers do with them (modes/lbfgs.py)."""

import math

import torch
from torch import Tensor

from paceline.core.modes.lbfgs import Answer, Ops
from paceline.exceptions import FrameError

__all__ = ["run_on"]


def run_on(vectors: dict[str, Tensor], ops: Ops) -> list[Answer]:
    """Carry out operations, in order, on flat vectors of one length. Returns what the reductions came to."""
    answers: list[float] = []
    for op in ops:
        match op:
            case ["copy", x, z]:
                _made(vectors, z, vectors[x]).copy_(vectors[x])
            case ["scale", a, z]:
                vectors[z].mul_(a)
            case ["combine", z, [[a, x], *rest]]:
                out = torch.mul(vectors[x], a, out=_made(vectors, z, vectors[x]))
                for b, y in rest:
                    out.add_(vectors[y], alpha=b)
            case ["dot", x, y]:
                answers.append(torch.dot(vectors[x].double(), vectors[y].double()).item())
            case ["abs_sum", x]:
                answers.append(vectors[x].abs().sum(dtype=torch.float64).item())
            case ["abs_max", x]:
                answers.append(vectors[x].abs().max().item())
            case _:
                raise FrameError(f"{op!r:.80} is no operation on vectors")
    return [answer if math.isfinite(answer) else None for answer in answers]


def _made(vectors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    if name not in vectors:
        vectors[name] = torch.empty_like(like)
    return vectors[name]
