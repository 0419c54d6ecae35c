"""SliceState: one slice of a shard with its optimizer, and copies of what it holds."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.params import Slice, dtype_named

__all__ = ["Scratch", "SliceState", "detached", "fill", "for_kernel"]


@dataclass(slots=True)
class SliceState:
    """Parameters, optimizer and vectors of one slice."""

    piece: Slice
    owned: bool
    """Whether this server answers for it; else it holds a copy, in memory of its own."""
    flat: Tensor
    segments: list[Tensor]
    optimizer: torch.optim.Optimizer
    step: Callable[[], Any]
    settings: Any = None
    holds: Any = None
    """Whose gradient views the segments' .grad are now: a worker's Gradients, or the address of a mean."""
    gap: Tensor | None = None
    gap_steps: int = 0
    """The mean length of a step, element by element, and over how many (gap-aware damping)."""
    sound: bool = False
    """Parameters and optimizer state are known to be finite: the processor's flags tell of an overflow."""
    regular: bool = True
    """All numbers among the settings are finite."""
    alarms: int = 0
    """Updates in a row after which everything had to be looked at, although flags can be read."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """Sandblaster's, beside w, which is `flat`: the sum of gradients g, and what L-BFGS remembers."""


class Scratch(threading.local):
    """Memory for one slice, for each lane its own."""

    def __init__(self, nbytes: int, where: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=where)

    def of(self, piece: Slice) -> Tensor:
        return self._memory[: piece.nbytes].view(dtype_named(piece.dtype))


def detached(tensor: Tensor, elements: int) -> Tensor:
    """A copy: flat in memory order when it has one value for each element, else as it is."""
    if tensor.numel() == elements and tensor.dim():
        return torch.as_strided(tensor, (elements,), (1,)).clone() if _dense(tensor) else tensor.clone()
    return tensor.detach().clone()


def _dense(tensor: Tensor) -> bool:
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel()


def for_kernel(value: Tensor, tensor: Tensor, group: dict[str, Any]) -> Tensor:
    """A copy of a count of steps, say, on the device where the parameter's optimizer kernel wants it."""
    near = group.get("fused") or group.get("capturable")
    return value.to(tensor.device, copy=True) if near else value.clone()


def fill(tensor: Tensor, flat: Tensor) -> None:
    """Write values given in memory order into a dense tensor of any strides."""
    torch.as_strided(tensor, (tensor.numel(),), (1,)).copy_(flat.reshape(-1))
