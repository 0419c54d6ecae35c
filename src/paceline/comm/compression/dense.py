"""Methods that send something for every element."""

import math

import numpy as np
import torch
from torch import Tensor

from paceline.comm.compression.bits import (
    code_bytes,
    pack_codes,
    pack_trits,
    plane_bytes,
    trit_bytes,
    unpack_codes,
    unpack_trits,
)
from paceline.comm.compression.form import Dice, Form, Method
from paceline.comm.compression.message import Buffer, Reader, bytes_of
from paceline.comm.compression.spec import CompressionSpec
from paceline.exceptions import FrameError

__all__ = ["QSGD_BUCKET", "Bfloat16", "Float8", "Float16", "Plain", "Qsgd", "SignSgd", "TernGrad"]

QSGD_BUCKET = 512
"""Elements that share a norm in qsgd. The variance grows with its square root (Alistarh 2017, §4)."""

_FP8_BUCKET = 512
"""Elements that share a scale in fp8: one scale for a tensor would round its small rows to zero."""

_CLIP = 2.5
_TINY = 1e-15
"""Norms below are computed again in a safer way: squares of such small numbers underflow."""


class Plain(Method):
    """none: the elements themselves."""

    code = 0
    feedback = False

    def encode(self, values: Tensor, dice: Dice) -> list[Buffer]:
        return [bytes_of(self.form.narrow(values))]

    def decode(self, reader: Reader, out: Tensor) -> None:
        source = reader.bytes(out.numel() * out.element_size())
        reader.end()
        out.view(torch.uint8).numpy()[:] = source


class Float16(Method):
    """fp16: half precision. What is rounded off, or is beyond ±65504, stays in the residual."""

    code = 1
    wire = torch.float16

    def encode(self, values: Tensor, dice: Dice) -> list[Buffer]:
        sent = self.form.narrow(values, self.wire)
        values.sub_(self.form.delivered(sent))
        return [bytes_of(sent)]

    def decode(self, reader: Reader, out: Tensor) -> None:
        values = reader.tensor(out.numel(), self.wire)
        reader.end()
        out.copy_(self.form.narrow(values) if self.form.limit < torch.finfo(self.wire).max else values)


class Bfloat16(Float16):
    """bf16: bfloat16."""

    code = 2
    wire = torch.bfloat16


class Float8(Method):
    """fp8: float8_e4m3fn, times the scale of a bucket of 512 elements, whose largest becomes ±448.

    What is rounded off stays in the residual.
    """

    code = 10
    wire = torch.float8_e4m3fn
    largest = torch.finfo(wire).max

    def __init__(self, form: Form, spec: CompressionSpec) -> None:
        super().__init__(Form(form.pieces, form.dtype, _FP8_BUCKET), spec)
        codes = torch.arange(256, dtype=torch.uint8)
        self._numbers = codes.view(self.wire).to(self.form.work).numpy()
        """The number that each of the 256 codes stands for."""

    def encode(self, values: Tensor, dice: Dice) -> list[Buffer] | None:
        form = self.form
        peaks = [run.abs().amax(dim=1) for run in form.runs(values)]
        scales = torch.cat([*peaks, torch.empty(0, dtype=form.work)]).div_(self.largest)
        factors = scales.reciprocal()
        factors[factors > form.limit] = 0.0  # of a bucket that is zero or next to it
        scaled = values.clone()
        form.multiply(scaled, factors)
        sent = form.narrow(scaled, self.wire)
        values.sub_(form.delivered(self._widened(sent, scales)))
        return [bytes_of(scales), bytes_of(sent)]

    def decode(self, reader: Reader, out: Tensor) -> None:
        form = self.form
        scales = reader.bounded(form.scales, form.work, form.limit)
        sent = reader.tensor(form.size, self.wire)
        reader.end()
        out.copy_(form.narrow(self._widened(sent, scales)))
        form.clear_gaps(out)

    def _widened(self, sent: Tensor, scales: Tensor) -> Tensor:
        """The elements that these stand for: both ends compute them alike."""
        codes = sent.view(torch.uint8).numpy()
        values = torch.from_numpy(np.take(self._numbers, codes, mode="clip"))  # torch takes 8 times as long
        self.form.multiply(values, scales)
        # Rounding may put the largest a little above what the dtype can hold.
        return values.clamp_(-self.form.limit, self.form.limit)


class TernGrad(Method):
    """terngrad: sign times the piece's scale, sent with probability |g| / scale (Wen 2017).

    Elements are clipped to ±2.5σ first. σ is taken about zero: about the mean, as the authors' code has it,
    equal values would have none and be clipped away. The scale is the worker's own: the server adds dense
    gradients, so workers need not agree on one.
    """

    code = 3
    feedback = False

    def encode(self, values: Tensor, dice: Dice) -> list[Buffer]:
        form = self.form
        scales = torch.empty(form.scales, dtype=form.work)
        for i, (run, norm) in enumerate(zip(form.runs(values), _norms(form, values), strict=True)):
            clip = float(form.delivered(norm * (_CLIP / math.sqrt(run.numel()))))
            low, high = run.aminmax()
            largest = max(-float(low), float(high))
            if largest > clip:
                run.clamp_(-clip, clip)
            scales[i] = min(largest, clip)
        chance = dice.uniform(form.size).to(form.work)
        form.multiply(chance, scales)
        value, threshold = values.numpy(), chance.numpy()
        trits = (value > threshold).view(np.uint8)
        trits += 1
        trits -= (value < np.negative(threshold, out=threshold)).view(np.uint8)
        return [bytes_of(scales), bytes_of(pack_trits(trits))]

    def decode(self, reader: Reader, out: Tensor) -> None:
        form = self.form
        scales = reader.bounded(form.scales, form.work, form.limit)
        trits = unpack_trits(reader.bytes(trit_bytes(form.size)), form.size)
        if trits is None:
            raise FrameError("a byte that is not five ternary digits")
        reader.end()
        out.copy_(torch.from_numpy(trits))
        form.multiply(out, scales)
        form.clear_gaps(out)


class Qsgd(Method):
    """qsgd:b: rounded at random to one of 2^(b-1) - 1 levels of the norm, right on average (Alistarh 2017).

    The norm is that of a bucket of 512 elements, as in the paper's experiments: of a whole tensor it would
    round nearly everything to zero.
    """

    code = 4
    feedback = False

    def __init__(self, form: Form, spec: CompressionSpec) -> None:
        super().__init__(Form(form.pieces, form.dtype, QSGD_BUCKET), spec)
        assert spec.bits is not None
        self._bits = spec.bits
        self._levels = 2 ** (spec.bits - 1) - 1

    def encode(self, values: Tensor, dice: Dice) -> list[Buffer] | None:
        form = self.form
        norms = torch.cat([*_norms(form, values), torch.empty(0, dtype=torch.float64)]).to(form.work)
        if not bool((norms <= form.limit).all()):
            return None
        negative = np.signbit(values.numpy()).view(np.uint8)
        values.abs_()
        factors = self._levels / norms
        factors[factors > form.limit] = 0.0  # of a norm that is zero or next to it
        form.multiply(values, factors)
        # Rounding may put an element a little above its norm, and chance above the last level.
        levels = values.add_(dice.uniform(form.size)).clamp_(max=self._levels)
        codes = levels.numpy().astype(np.uint8)
        codes |= negative << (self._bits - 1)
        return [bytes_of(norms), bytes_of(pack_codes(codes, self._bits))]

    def decode(self, reader: Reader, out: Tensor) -> None:
        form, bits = self.form, self._bits
        norms = reader.bounded(form.scales, form.work, form.limit)
        packed = reader.bytes(code_bytes(form.size, bits))
        reader.end()
        codes = unpack_codes(packed, bits, form.size)
        negative = codes >> (bits - 1)
        codes &= self._levels
        codes ^= -negative  # two's complement
        codes += negative
        out.copy_(torch.from_numpy(codes.view(np.int8)))
        form.multiply(out, norms / self._levels)
        form.clear_gaps(out)


class SignSgd(Method):
    """signsgd: every element's sign, times the mean size in its piece (EF-signSGD, Karimireddy 2019).

    A zero is sent as plus; the residual takes it back in the next message.
    """

    code = 5

    def encode(self, values: Tensor, dice: Dice) -> list[Buffer] | None:
        form = self.form
        means = [run.abs().mean() for run in form.runs(values)]
        for i, (run, mean) in enumerate(zip(form.runs(values), means, strict=True)):
            if not math.isfinite(mean):  # the sum overflowed, the mean may not
                means[i] = run.abs().mean(dtype=torch.float64)
        scales = form.delivered(torch.stack(means)) if means else torch.empty(0, dtype=form.work)
        if not bool((scales <= form.limit).all()):
            return None
        bits = np.packbits(np.signbit(values.numpy()))
        for run, scale in zip(form.runs(values), scales, strict=True):
            run.sub_(torch.copysign(scale, run))
        return [bytes_of(scales), bytes_of(bits)]

    def decode(self, reader: Reader, out: Tensor) -> None:
        form = self.form
        scales = reader.bounded(form.scales, form.work, form.limit)
        bits = reader.bytes(plane_bytes(form.size, 1))
        reader.end()
        out.copy_(torch.from_numpy(np.unpackbits(bits, count=form.size)))
        out.mul_(-2).add_(1)
        form.multiply(out, scales)
        form.clear_gaps(out)


def _norms(form: Form, values: Tensor) -> list[Tensor]:
    """The L2 norms of the runs, as float64 vectors in the order of `runs`."""
    found = []
    for run in form.runs(values):
        norms = torch.linalg.vector_norm(run, dim=1)
        low, high = norms.aminmax()
        if not (low >= _TINY and math.isfinite(high)):
            exact = run.to(torch.float64)
            peaks = exact.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
            norms = torch.linalg.vector_norm(exact / peaks, dim=1) * peaks[:, 0]
        found.append(norms.to(torch.float64))
    return found
