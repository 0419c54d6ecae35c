"""The processor's own record of overflows, which saves a look at every result.

By IEEE 754 an operation on finite numbers whose result is infinite or NaN raises a flag of the thread that
computes it: overflow, division by zero or invalid operation. A flag stays up until it is cleared. So where
all operands were finite and no flag is up, all results are finite.

Two things are not covered: an operand that was infinite or NaN before, and conversions to two-byte floats,
which torch does partly with integers.
"""

import ctypes
import functools
import platform
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["FloatFlags", "float_flags"]

_FLAGS = {"x86_64": 0b1101, "aarch64": 0b0111}
"""Invalid operation, division by zero and overflow, as <fenv.h> numbers them."""


class FloatFlags:
    """Of the calling thread.

    Raises:
        OSError, AttributeError: the system's C library does not offer them.
    """

    def __init__(self, mask: int) -> None:
        library = ctypes.PyDLL(None)  # keeps the GIL: a call takes less time than to give it up
        self._mask = mask
        self._clear: Callable[[int], int] = library.feclearexcept
        self._test: Callable[[int], int] = library.fetestexcept

    def clear(self) -> None:
        """Take the flags down."""
        self._clear(self._mask)

    def raised(self) -> bool:
        """Whether a result has been infinite or NaN since `clear`, of finite operands."""
        return bool(self._test(self._mask))


@functools.cache
def float_flags() -> FloatFlags | None:
    """The flags, or None where they cannot be had or do not show what torch computes."""
    mask = _FLAGS.get(platform.machine())
    if mask is None:
        return None
    try:
        flags = FloatFlags(mask)
    except (OSError, AttributeError):
        return None
    return flags if _shows_what_torch_computes(flags) else None


def _shows_what_torch_computes(flags: FloatFlags) -> bool:
    def seen(numbers: Tensor, compute: Callable[[Tensor], object]) -> bool:
        flags.clear()
        compute(numbers)
        return flags.raised()

    for dtype in (torch.float32, torch.float64):
        zeros = torch.zeros(67, dtype=dtype)  # more than one vector register, and not a multiple of them
        ones, largest = zeros + 1, zeros + torch.finfo(dtype).max
        overflow = seen(largest, lambda x: x * 2) and seen(largest, lambda x: x + x)
        if not (overflow and seen(ones, lambda x: x / 0) and seen(zeros, lambda x: x / 0)):
            return False
        if seen(ones, lambda x: (x * 1.5 + x / 3).sqrt_()):
            return False
    return True
