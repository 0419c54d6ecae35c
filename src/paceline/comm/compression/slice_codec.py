"""Encoder and Decoder: a slice of a gradient to bytes and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.compression.dense import Bfloat16, Float8, Float16, Plain, Qsgd, SignSgd, TernGrad
from paceline.comm.compression.form import Dice, Form, Method, Piece, is_finite
from paceline.comm.compression.lowrank import PowerSgd
from paceline.comm.compression.message import Reader
from paceline.comm.compression.sparse import Dgc, Sbc, TopK
from paceline.comm.compression.spec import CompressionSpec
from paceline.exceptions import CheckpointError, FrameError

__all__ = ["Decoder", "Encoder", "Piece"]

_METHODS: dict[str, type[Method]] = {
    "none": Plain,
    "fp16": Float16,
    "bf16": Bfloat16,
    "fp8": Float8,
    "terngrad": TernGrad,
    "qsgd": Qsgd,
    "signsgd": SignSgd,
    "topk": TopK,
    "dgc": Dgc,
    "sbc": Sbc,
    "powersgd": PowerSgd,
}
_DTYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float64: 4}
_VOID = 255
"""Instead of a method: the gradient was not finite."""


class Encoder:
    """Writes one worker's gradients of one slice. One thread at a time; CPU memory.

    With error feedback, what a message does not carry is kept and added to the next gradient:
    `residual == corrected - delivered`, to the bit, where corrected is gradient plus old residual and
    delivered is what the decoder will write. (Where the method sends an element as it is, or rounds it to
    fewer bits, residual + delivered is also exactly corrected; elsewhere that sum may round.)

    A gradient that is not finite, or whose sum with the residual is not, is sent as such in two bytes: the
    decoder fills its slice with NaN, which servers refuse and count. The residual stays as it was.

    Args:
        pieces: the tensors in the slice, in order; the slice ends with the last one.
        seed: one for each worker and slice: equal ones would make workers' rounding errors add up.
        dtype: of the slice. Computed is in float32, or float64 if it is that.
        momentum: of dgc, which takes it over from the servers' optimizer.
        clip_norm: of dgc: scale a gradient down to this norm before it is accumulated. The paper's bound
            is the usual one divided by the square root of the number of workers.
        warmup: of dgc: over how many messages the fraction goes from 25 % down to its own.
        feedback: False keeps nothing: what is not sent is the caller's to remember.
    """

    def __init__(
        self,
        spec: CompressionSpec,
        pieces: Sequence[Piece],
        seed: int,
        *,
        dtype: torch.dtype = torch.float32,
        momentum: float = 0.0,
        clip_norm: float | None = None,
        warmup: int = 0,
        feedback: bool = True,
    ) -> None:
        self.spec = spec
        self._method = _METHODS[spec.name](Form(pieces, dtype), spec)
        self._form = self._method.form
        self._dice = Dice(seed)
        if isinstance(self._method, Dgc):
            self._method.momentum = momentum
            self._method.clip_norm = clip_norm
            self._method.warmup = warmup
        elif momentum or clip_norm is not None or warmup:
            raise ValueError(f"momentum, clip_norm and warmup are dgc's, not {spec}'s")
        self._residual: Tensor | None = None
        if self._method.feedback and feedback:
            self._residual = torch.zeros(self._form.size, dtype=self._form.work)

    @torch.no_grad()
    def encode(self, flat: Tensor) -> bytes:
        """The message for a gradient, which is not changed."""
        form = self._form
        if flat.dtype != form.dtype or flat.shape != (form.size,):
            raise ValueError(
                f"a gradient of {flat.dtype} {list(flat.shape)}, expected {form.dtype} [{form.size}]"
            )
        self._dice.start()
        values = self._method.gather(flat, self._residual)
        parts = self._method.encode(values, self._dice) if is_finite(values) else None
        self._dice.step += 1
        if parts is None:
            return bytes([_VOID, _DTYPES[form.dtype]])
        if self._residual is not None:
            self._residual = values
        return b"".join([bytes([self._method.code, _DTYPES[form.dtype]]), *parts])

    def residual_norm(self) -> float:
        """L2 norm of what was not sent yet: what is lost if this worker is."""
        if self._residual is None:
            return 0.0
        return float(torch.linalg.vector_norm(self._residual, dtype=torch.float64))

    def state(self) -> dict[str, Tensor]:
        """A copy of all that the next message depends on, besides the gradient and the arguments."""
        return {name: value.clone() for name, value in self._state().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a `state`. Raises CheckpointError, having changed nothing, if it is not one of ours."""
        own = self._state()
        if state.keys() != own.keys():
            raise CheckpointError(
                f"state of compression {self.spec} has {sorted(state)}, expected {sorted(own)}: it was saved "
                "with another compression"
            )
        for name, value in own.items():
            given = state[name]
            if given.dtype != value.dtype or given.shape != value.shape:
                raise CheckpointError(
                    f"{name} of compression {self.spec} is {given.dtype} {list(given.shape)}, expected "
                    f"{value.dtype} {list(value.shape)}: it was saved with another model or another cut"
                )
            if not is_finite(given):  # every later message would be void
                raise CheckpointError(f"{name} of compression {self.spec} is not finite")
        self._dice.step = int(state["step"])
        if self._residual is not None:
            self._residual = state["residual"].clone()
        self._method.load(state)

    def mark(self) -> dict[str, Tensor]:
        """Where the encoder is now, not copied: `encode` makes new tensors and changes none of these."""
        return self._state()

    def back_to(self, mark: dict[str, Tensor]) -> None:
        """Be where a `mark` was made: what was encoded since then was never encoded."""
        self._dice.step = int(mark["step"])
        if self._residual is not None:
            self._residual = mark["residual"]
        self._method.load(mark)

    def take_out(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        """Undo one message, encoded between two marks, although later ones have been encoded since.

        What it left behind (of dgc also the velocity) is subtracted. Later messages may have carried some of
        that already; it is then missing from the next ones, so that the sum of all is right again.
        """
        now = self._state()
        for name in ("residual", "velocity"):
            if name in now:
                now[name] = now[name] + (before[name] - after[name])
        self.back_to(now)

    def _state(self) -> dict[str, Tensor]:
        state = {"step": torch.tensor(self._dice.step), **self._method.state()}
        if self._residual is not None:
            state["residual"] = self._residual
        return state


class Decoder:
    """Reads one worker's messages of one slice. Keeps nothing between them. One thread at a time."""

    def __init__(
        self, spec: CompressionSpec, pieces: Sequence[Piece], *, dtype: torch.dtype = torch.float32
    ) -> None:
        self.spec = spec
        self._method = _METHODS[spec.name](Form(pieces, dtype), spec)
        self._form = self._method.form

    @torch.no_grad()
    def decode(self, data: bytes | bytearray | memoryview, out: Tensor) -> None:
        """Write the gradient that a message holds into `out`, which keeps its values if there is none.

        Numbers may be NaN or infinite only where the message says so plainly (see Encoder) or holds them
        as they are (none, fp16, bf16, powersgd's small pieces) or where factors overflow: servers check.

        Raises:
            FrameError: the message is not one of this compression for this slice.
        """
        form = self._form
        if out.dtype != form.dtype or out.shape != (form.size,) or not out.is_contiguous():
            raise ValueError(f"memory of {out.dtype} {list(out.shape)}, expected {form.dtype} [{form.size}]")
        reader = Reader(data)
        code, dtype = reader.bytes(2).tolist()
        if dtype != _DTYPES[form.dtype] or code not in (self._method.code, _VOID):
            raise FrameError(f"not a gradient of {form.dtype} in compression {self.spec}")
        if code == _VOID:
            reader.end()
            out.fill_(torch.nan)
        else:
            self._method.decode(reader, out)
