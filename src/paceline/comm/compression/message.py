"""A received message. Every field is hostile: nothing is taken before its length is checked.

    method u8 | dtype u8 | fields of the method

Method 255 says that the gradient was not finite and has no other field.
"""

import struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.compression.bits import (
    golomb_bits,
    pack_positions,
    plane_bytes,
    unpack_positions,
)
from paceline.exceptions import FrameError

__all__ = ["Buffer", "Reader", "bytes_of", "positions_parts"]

Buffer = bytes | memoryview
"""A part of a message, as an encoder hands it over."""

_POSITIONS = struct.Struct("<QBQ")
_MOST_LOW_BITS = 48


def bytes_of(values: Tensor | NDArray[Any]) -> memoryview:
    """The memory of a contiguous tensor or array, as a part of a message."""
    array = values.reshape(-1).view(torch.uint8).numpy() if isinstance(values, Tensor) else values
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def positions_parts(positions: NDArray[np.int64], n: int) -> list[Buffer]:
    """Ascending positions below `n`, to be read by `Reader.positions`."""
    low_bits = golomb_bits(positions.size, n)
    low, unary = pack_positions(positions, low_bits)
    return [_POSITIONS.pack(positions.size, low_bits, unary.size), bytes_of(low), bytes_of(unary)]


class Reader:
    """Takes fields off a message from the front. Raises FrameError for whatever is not there."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        self._data = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
        self._at = 0

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """The next bytes, in place."""
        start, stop = self._at, self._at + count
        if stop > self._data.size:
            raise FrameError(f"a compressed gradient of {self._data.size:,} bytes, at least {stop:,} are due")
        self._at = stop
        return self._data[start:stop]

    def tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """The next numbers, copied (a message has no alignment)."""
        source = self.bytes(count * dtype.itemsize)
        values = torch.empty(count, dtype=dtype)
        values.view(torch.uint8).numpy()[:] = source
        return values

    def bounded(self, count: int, dtype: torch.dtype, limit: float) -> Tensor:
        """The next numbers, each within ±limit, which neither NaN nor infinity is."""
        values = self.tensor(count, dtype)
        if count and not float(values.abs().max()) <= limit:  # a NaN is the maximum of its company
            raise FrameError("a compressed gradient with a number that is not finite")
        return values

    def positions(self, n: int) -> NDArray[np.int64]:
        """The next positions: ascending, none twice, all below `n`."""
        count, low_bits, unary_bytes = _POSITIONS.unpack(self.bytes(_POSITIONS.size).tobytes())
        # The encoder's choice of low_bits stays well inside the second bound; without it sums could overflow.
        if (
            count > n
            or low_bits > _MOST_LOW_BITS
            or count << low_bits > max(n, count) * 2
            or (low_bits and not count)
        ):
            raise FrameError(f"{count:,} positions of {low_bits} low bits in a slice of {n:,} elements")
        if unary_bytes > (count + (n >> low_bits)) // 8 + 1:
            raise FrameError(f"{unary_bytes:,} bytes of gaps for {count:,} positions among {n:,}")
        low = self.bytes(plane_bytes(count, low_bits))
        found = unpack_positions(low, self.bytes(unary_bytes), low_bits, count, n)
        if found is None:
            raise FrameError(f"positions beyond a slice of {n:,} elements, or not {count:,} of them")
        return found

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != self._data.size:
            raise FrameError(f"a compressed gradient of {self._data.size:,} bytes, {self._at:,} were due")
