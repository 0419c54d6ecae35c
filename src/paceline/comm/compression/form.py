"""What both ends know of a slice, and what a way to write it must do."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.comm.compression.message import Buffer, Reader
from paceline.comm.compression.spec import CompressionSpec

__all__ = ["Dice", "Form", "Method", "Piece", "is_finite"]


@dataclass(frozen=True)
class Piece:
    """A tensor, or a part of one, in a slice: elements start to stop of the flat slice.

    `shape` is in the order in which the elements lie in memory, and () or 1-D for a part of a tensor.
    """

    start: int
    stop: int
    shape: tuple[int, ...] = ()

    @classmethod
    def whole(cls, start: int, shape: Sequence[int], stride: Sequence[int]) -> "Piece":
        """A whole tensor with any dense strides. Dimensions of size 1 are left out: they say nothing."""
        laid = sorted(((s, n) for n, s in zip(shape, stride, strict=True) if n > 1), reverse=True)
        return cls(start, start + math.prod(shape), tuple(n for _, n in laid))

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop or (
            len(self.shape) > 1 and math.prod(self.shape) != self.stop - self.start
        ):
            raise ValueError(f"a piece from {self.start} to {self.stop} of shape {self.shape}")


class Form:
    """The pieces of a slice and its dtype. Between pieces lies padding, which is zero on both ends.

    Args:
        bucket: cut pieces into runs of this many elements, each with a number of its own; None: one a piece.
    """

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype, bucket: int | None = None) -> None:
        self.pieces = tuple(pieces)
        self.dtype = dtype
        self.work = torch.float64 if dtype == torch.float64 else torch.float32
        """In which everything is computed."""
        self.limit = torch.finfo(dtype).max
        self.size = self.pieces[-1].stop if self.pieces else 0
        self._gaps: list[tuple[int, int]] = []
        self._runs: list[tuple[int, int, int]] = []
        end = 0
        for piece in self.pieces:
            if piece.start < end:
                raise ValueError(f"pieces overlap or are out of order at element {piece.start}")
            if piece.start > end:
                self._gaps.append((end, piece.start))
            end, n = piece.stop, piece.stop - piece.start
            length = bucket or max(n, 1)
            if full := n // length:
                self._runs.append((piece.start, full, length))
            if rest := n % length:
                self._runs.append((piece.stop - rest, 1, rest))
        self.scales = sum(rows for _, rows, _ in self._runs)
        """How many runs there are."""

    def runs(self, flat: Tensor) -> list[Tensor]:
        """The runs as matrices over `flat`, a run a row; neighbours of one length share a matrix."""
        return [flat[a : a + rows * n].view(rows, n) for a, rows, n in self._runs]

    def multiply(self, flat: Tensor, scales: Tensor) -> None:
        """Multiply every run by its own number."""
        if len(self._runs) == 1:
            self.runs(flat)[0].mul_(scales[:, None])
            return
        at = 0
        for run in self.runs(flat):
            run.mul_(scales[at : at + len(run), None])
            at += len(run)

    def clear_gaps(self, flat: Tensor) -> None:
        """Zero the padding."""
        for a, b in self._gaps:
            flat[a:b].zero_()

    def narrow(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As the slice's (or another) dtype; what is too large for it becomes its largest number."""
        dtype = dtype or self.dtype
        if values.dtype == dtype:
            return values
        limit = torch.finfo(dtype).max
        if limit < torch.finfo(values.dtype).max:
            wide = values.float() if values.dtype == torch.bfloat16 else values  # it has no 65504
            values = wide.clamp(-limit, limit)
        return values.to(dtype)

    def delivered(self, values: Tensor) -> Tensor:
        """What the other end will have of these values, for the encoder to reckon with."""
        return self.narrow(values).to(self.work)


class Dice:
    """Random numbers of one encoder: a torch.Generator that starts afresh from (seed, step) every step.

    So the number of the step is all the state there is.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = torch.Generator()
        self.step = 0

    def start(self) -> None:
        """Begin the step's own sequence."""
        digest = hashlib.blake2b(f"{self._seed} {self.step}".encode(), digest_size=8).digest()
        self._generator.manual_seed(int.from_bytes(digest, "little"))

    def uniform(self, n: int) -> Tensor:
        """`n` float32 numbers, uniform in [0, 1) with 24 bits.

        The upper 16 bits are each element's own; the lower 8 are one draw for all. Every single number is
        exactly uniform, which is what makes a rounding unbiased, at a third of the cost of `uniform_`.
        """
        words = torch.empty(-(-n // 4) + 1, dtype=torch.int64)
        words.random_(-(1 << 63), None, generator=self._generator)
        low = int(words[-1]) & 255
        own = words.view(torch.int16)[:n]
        return own.to(torch.float32).mul_(2.0**-16).add_(0.5 + low * 2.0**-24)

    def normal_like(self, values: Tensor) -> Tensor:
        """As many normal numbers."""
        return torch.empty_like(values).normal_(generator=self._generator)


class Method(ABC):
    """One way to write a slice. An encoder and a decoder each have one of their own.

    `encode` and `decode` stand side by side because the encoder must know what arrives to the last bit.
    """

    code: ClassVar[int]
    """Its number in a message."""
    feedback: ClassVar[bool] = True
    """Whether what `encode` leaves is added to the next gradient."""

    def __init__(self, form: Form, spec: CompressionSpec) -> None:
        self.form = form
        self.spec = spec

    def gather(self, flat: Tensor, residual: Tensor | None) -> Tensor:
        """What is to be sent, in new memory."""
        return flat.to(self.form.work, copy=True) if residual is None else residual + flat

    @abstractmethod
    def encode(self, values: Tensor, dice: Dice) -> list[Buffer] | None:
        """Write finite values, and leave in them what the other end will not have.

        Returns None, having changed nothing but `values`, if a number to be sent would not be finite.
        """

    @abstractmethod
    def decode(self, reader: Reader, out: Tensor) -> None:
        """Read a message into `out`, whole or not at all. Raises FrameError."""

    def state(self) -> dict[str, Tensor]:
        """What must survive besides the residual and the step, not copied."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:  # noqa: B027 - most have nothing to load
        """Take over what `state` gave; names, dtypes and shapes were checked."""


def is_finite(values: Tensor) -> bool:
    """One reduction in the common case: a NaN or an infinity makes any sum non-finite."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())
