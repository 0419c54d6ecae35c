"""What a compression is, as a value, and its text form. Free of torch.

| text          | sent for each element            | error feedback | default   |
|---------------|----------------------------------|----------------|-----------|
| `none`        | the element itself               | nothing is lost |          |
| `fp16` `bf16` | 16 bits                          | yes            |           |
| `fp8`         | 8 bits, times its bucket's scale | yes            |           |
| `terngrad`    | -1, 0 or 1 times the piece's scale | no: unbiased |           |
| `qsgd:b`      | b bits, times its bucket's norm  | no: unbiased   | b = 4     |
| `signsgd`     | a sign, times the piece's mean   | yes            |           |
| `topk:p`      | the largest p of the slice       | yes            | p = 0.01  |
| `dgc:p`       | the same, with momentum corrected | yes           | p = 0.001 |
| `sbc:p`       | places of the largest p of one sign, and a mean | yes | p = 0.01 |
| `powersgd:r`  | two factors of rank r for a matrix | yes          | r = 1     |

Error feedback keeps what was not sent and adds it to the next gradient. TernGrad and QSGD have none, as
in their papers: what they send is right on average, and feedback would make it depend on the past.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.exceptions import UsageError

__all__ = ["COMPRESSION_FORMS", "CompressionSpec", "parse_compression", "refuse_useless"]


@dataclass(frozen=True)
class _Kind:
    """A way to write gradients, as the text form knows it."""

    number: str | None = None
    """The field of CompressionSpec that the number after the colon is; None: it takes none."""
    default: Any = None
    """The number, if none is given."""
    letter: str = ""
    """The number in the list of valid forms."""
    feedback: bool = True
    """Whether an encoder keeps what it did not send."""
    momentum: bool = False
    """Whether the worker applies the momentum instead of the servers' optimizer."""
    whole_tensors: bool = False
    """Whether a slice that cuts a tensor spoils it."""


_KINDS = {
    "none": _Kind(feedback=False),
    "fp16": _Kind(),
    "bf16": _Kind(),
    "fp8": _Kind(),
    "terngrad": _Kind(feedback=False),
    "signsgd": _Kind(),
    "qsgd": _Kind("bits", 4, "B", feedback=False),
    "topk": _Kind("fraction", 0.01, "P"),
    "dgc": _Kind("fraction", 0.001, "P", momentum=True),
    "sbc": _Kind("fraction", 0.01, "P"),
    "powersgd": _Kind("rank", 1, "R", whole_tensors=True),
}
COMPRESSION_FORMS = tuple(f"{name}:{kind.letter}" if kind.number else name for name, kind in _KINDS.items())
"""The valid texts, with a letter for a number."""
_VALID = (
    f"{', '.join(COMPRESSION_FORMS)}, where B is 2 to 8 bits, P a fraction 0 < P <= 1 (topk:0.01 sends 1 %) "
    "and R a rank of at least 1"
)


@dataclass(frozen=True, kw_only=True)
class CompressionSpec:
    """One way to write gradients. `str(spec)` is its text form, which `parse_compression` reads back."""

    name: str
    bits: int | None = None
    """qsgd: bits for an element, its sign among them."""
    fraction: float | None = None
    """topk, dgc, sbc: how much of a slice is sent."""
    rank: int | None = None
    """powersgd: columns of each factor."""

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            raise UsageError(f"there is no compression {self.name!r}. Valid: {_VALID}")
        given = {
            what
            for what, value in (("bits", self.bits), ("fraction", self.fraction), ("rank", self.rank))
            if value is not None
        }
        takes = self._kind.number
        if given != ({takes} if takes else set()):
            raise UsageError(f"compression {self.name} takes {takes or 'no number'}, got {sorted(given)}")
        if self.bits is not None and not 2 <= self.bits <= 8:
            raise UsageError(f"{self.name} needs 2 to 8 bits for an element, got {self.bits}")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise UsageError(f"{self.name} needs a fraction above 0 and up to 1, got {self.fraction}")
        if self.rank is not None and self.rank < 1:
            raise UsageError(f"{self.name} needs a rank of at least 1, got {self.rank}")

    @property
    def _kind(self) -> _Kind:
        return _KINDS[self.name]

    @property
    def has_feedback(self) -> bool:
        """Whether an encoder keeps what it did not send: state that belongs in a checkpoint."""
        return self._kind.feedback

    @property
    def has_momentum(self) -> bool:
        """Whether the worker applies the momentum, so that the servers' optimizer must have none."""
        return self._kind.momentum

    @property
    def wants_whole_tensors(self) -> bool:
        """Whether a slice that cuts a tensor spoils it: such a part would be sent uncompressed."""
        return self._kind.whole_tensors

    def __str__(self) -> str:
        if self.fraction is not None:
            return f"{self.name}:{repr(float(self.fraction)).removesuffix('.0')}"
        number = self.bits or self.rank
        return self.name if number is None else f"{self.name}:{number}"


def parse_compression(text: str) -> CompressionSpec:
    """The compression that a user's text means; see the module's table.

    Raises:
        UsageError: with the text, what is wrong with it, and the valid forms.
    """
    name, colon, number = str(text).strip().lower().partition(":")
    name, number = name.strip(), number.strip()
    if name not in _KINDS:
        near = difflib.get_close_matches(name, _KINDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _refusal(text, f"there is no such compression{hint}")
    kind = _KINDS[name]
    if kind.number is None:
        if colon:
            raise _refusal(text, f"{name} takes no number")
        return CompressionSpec(name=name)
    if colon and not number:
        raise _refusal(text, "a number is missing after the colon")
    read: Callable[[str], Any] = _fraction if kind.number == "fraction" else _count
    try:
        return CompressionSpec(name=name, **{kind.number: read(number) if colon else kind.default})
    except UsageError as error:
        raise _refusal(text, str(error)) from None


def refuse_useless(spec: CompressionSpec, shapes: Iterable[Sequence[int]]) -> None:
    """Raise UsageError if no tensor of a model with these shapes would become smaller.

    That is powersgd on 1-D tensors: it factors matrices, and a tensor with fewer than two dimensions
    larger than 1 is none.
    """
    if spec.name != "powersgd":
        return
    seen = 0
    for shape in shapes:
        seen += 1
        if sum(n > 1 for n in shape) >= 2:
            return
    raise UsageError(
        f"compression {spec}: powersgd on 1-D tensors. It sends a matrix as two thin factors, and none of "
        f"the model's {seen} trained tensors has two dimensions larger than 1. "
        "Use topk, qsgd or bf16 instead."
    )


def _count(text: str) -> int:
    # int() alone would also take "1_0", "+1", other scripts' digits, and choke on very long ones.
    if re.fullmatch("[0-9]{1,6}", text) is None:
        raise UsageError(f"{text!r} is not a whole number")
    return int(text)


def _fraction(text: str) -> float:
    if re.fullmatch(r"([0-9]{1,9}(\.[0-9]{0,18})?|\.[0-9]{1,18})(e-[0-9]{1,2})?", text) is None:
        raise UsageError(f"{text!r} is not a fraction such as 0.01")
    return float(text)


def _refusal(text: str, reason: str) -> UsageError:
    return UsageError(f"compression {str(text)!r}: {reason}. Valid: {_VALID}")
