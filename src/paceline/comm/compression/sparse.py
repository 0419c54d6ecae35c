"""Methods that send a few elements and where they stand.

topk and dgc choose among all elements of a slice, sbc in each piece. All of them find exactly the largest:
sampling only finds a threshold below which it is not worth looking.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.compression.form import Dice, Form, Method
from paceline.comm.compression.message import Buffer, Reader, bytes_of, positions_parts
from paceline.comm.compression.spec import CompressionSpec
from paceline.exceptions import FrameError

__all__ = ["Dgc", "Sbc", "TopK", "largest"]

_SAMPLED = 1 << 16
"""From this size on a sample is looked at first."""
_STRIDE = 61


class TopK(Method):
    """topk:p: the largest elements of a slice, with their values.

    For the elements sent the residual is zero (in a slice of 16-bit floats: what was rounded off), for the
    others it is the whole value, so residual + sent is the corrected gradient exactly.
    """

    code = 6

    def __init__(self, form: Form, spec: CompressionSpec) -> None:
        super().__init__(form, spec)
        assert spec.fraction is not None
        self._fraction = spec.fraction

    def encode(self, values: Tensor, dice: Dice) -> list[Buffer] | None:
        return self._send(values, self._fraction)[0]

    def _send(self, values: Tensor, fraction: float) -> tuple[list[Buffer], Tensor]:
        """Write a fraction of the values; returns the message and the positions in it."""
        places = largest(values.abs().numpy(), _count(fraction, self.form.size))
        positions = torch.from_numpy(places)
        chosen = values[positions]
        sent = self.form.narrow(chosen)
        values[positions] = chosen.sub_(self.form.delivered(sent)) if sent is not chosen else 0.0
        return [*positions_parts(places, self.form.size), bytes_of(sent)], positions

    def decode(self, reader: Reader, out: Tensor) -> None:
        positions = torch.from_numpy(reader.positions(self.form.size))
        values = reader.bounded(positions.numel(), self.form.dtype, self.form.limit)
        reader.end()
        out.zero_()
        out[positions] = values


class Dgc(TopK):
    """dgc:p: topk of accumulated velocities (Lin 2018). The servers' optimizer must have no momentum.

    u = momentum * u + gradient, v = v + u; the largest of v are sent, and u and v are zeroed there. v is
    the residual.
    """

    code = 7

    def __init__(self, form: Form, spec: CompressionSpec) -> None:
        super().__init__(form, spec)
        self.momentum = 0.0
        self.clip_norm: float | None = None
        self.warmup = 0
        self._velocity: Tensor | None = None  # a decoder needs none
        self._next: Tensor | None = None

    def gather(self, flat: Tensor, residual: Tensor | None) -> Tensor:
        assert residual is not None
        velocity = self._own().mul(self.momentum)
        scale = 1.0
        if self.clip_norm is not None:
            norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
            scale = min(1.0, self.clip_norm / norm) if norm > 0 else 1.0
        self._next = velocity.add_(flat, alpha=scale)
        return residual + velocity

    def encode(self, values: Tensor, dice: Dice) -> list[Buffer]:
        assert self._next is not None
        parts, positions = self._send(values, self._warm(dice.step))
        self._next[positions] = 0.0
        self._velocity, self._next = self._next, None
        return parts

    def _warm(self, step: int) -> float:
        """25, 6.3, 1.6, 0.4 % for a quarter of the warm-up each, but never less than is sent later."""
        if step >= self.warmup:
            return self._fraction
        return max(self._fraction, 0.25 ** (1 + 4 * step // self.warmup))

    def _own(self) -> Tensor:
        if self._velocity is None:
            self._velocity = torch.zeros(self.form.size, dtype=self.form.work)
        return self._velocity

    def state(self) -> dict[str, Tensor]:
        return {"velocity": self._own()}

    def load(self, state: dict[str, Tensor]) -> None:
        self._velocity = state["velocity"].clone()


class Sbc(TopK):
    """sbc:p: where the largest elements of one sign stand, and their mean (Sattler 2018).

    In each piece the largest positive and the largest negative elements are compared, and the side with
    the larger mean is sent: positions in a Golomb code, and one number.
    """

    code = 8

    def __init__(self, form: Form, spec: CompressionSpec) -> None:
        super().__init__(form, spec)
        self._stops = np.array([piece.stop for piece in form.pieces], np.int64)
        self._starts = np.array([piece.start for piece in form.pieces], np.int64)

    def encode(self, values: Tensor, dice: Dice) -> list[Buffer] | None:
        form = self.form
        means = torch.zeros(len(form.pieces), dtype=form.work)
        chosen: list[NDArray[np.int64]] = []
        array = values.numpy()
        for i, piece in enumerate(form.pieces):
            part = array[piece.start : piece.stop]
            count = _count(self._fraction, part.size)
            up, up_mean = _side(part, count)
            down, down_mean = _side(-part, count)
            mean = float(form.delivered(torch.tensor(max(up_mean, down_mean), dtype=torch.float64)))
            if not mean <= form.limit:
                return None
            if mean > 0:  # not where all is zero, or rounds to it
                places, mean = (up, mean) if up_mean >= down_mean else (down, -mean)
                chosen.append(places + piece.start)
                part[places] -= part.dtype.type(mean)
                means[i] = mean
        places = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
        return [*positions_parts(places, form.size), bytes_of(means)]

    def decode(self, reader: Reader, out: Tensor) -> None:
        form = self.form
        places = reader.positions(form.size)
        means = reader.bounded(len(form.pieces), form.work, form.limit)
        reader.end()
        owners = np.searchsorted(self._stops, places, side="right")
        if places.size and bool((places < self._starts[owners]).any()):
            raise FrameError("a position in the padding of a slice")
        out.zero_()
        out[torch.from_numpy(places)] = means[torch.from_numpy(owners)].to(form.dtype)


def largest(keys: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Where the `count` largest positive keys stand, in ascending order; fewer if fewer are positive."""
    if count >= keys.size:
        return _where(keys > 0)
    threshold = 0.0
    if keys.size >= _SAMPLED:
        sample = keys[::_STRIDE]
        # Four deviations more than expected: too low a guess is found out below and costs a second look.
        expected = sample.size * count / keys.size
        guess = math.ceil(expected + 4 * math.sqrt(expected) + 4)
        if guess < sample.size // 2:
            threshold = max(0.0, float(np.partition(sample, sample.size - guess)[sample.size - guess]))
    found = _where(keys >= threshold) if threshold else _where(keys > 0)
    if found.size < count and threshold:
        found = _where(keys > 0)
    if found.size <= count:
        return found
    among = keys[found]
    best = np.argpartition(among, among.size - count)[among.size - count :]
    best.sort()
    return found[best]


def _side(part: NDArray[np.floating], count: int) -> tuple[NDArray[np.int64], float]:
    """The largest positive elements and their mean; 0 if there is none."""
    places = largest(part, count)
    return places, float(part[places].mean(dtype=np.float64)) if places.size else 0.0


def _where(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.flatnonzero(mask).astype(np.int64, copy=False)


def _count(fraction: float, size: int) -> int:
    """How many a fraction is: at least one where there is one."""
    return min(size, max(1, round(fraction * size)))
