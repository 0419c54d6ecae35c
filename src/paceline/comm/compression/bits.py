"""Packing, vectorised: ternary digits, bit planes, Golomb-coded positions. numpy only."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "code_bytes",
    "golomb_bits",
    "pack_codes",
    "pack_planes",
    "pack_positions",
    "pack_trits",
    "plane_bytes",
    "trit_bytes",
    "unpack_codes",
    "unpack_planes",
    "unpack_positions",
    "unpack_trits",
]

Bytes = NDArray[np.uint8]
_TRITS = 5  # in a byte: 3^5 = 243
_LARGEST_TRITS = 3**_TRITS - 1


def trit_bytes(n: int) -> int:
    """Bytes that hold `n` ternary digits."""
    return -(-n // _TRITS)


def pack_trits(trits: Bytes) -> Bytes:
    """Digits 0, 1, 2, five to a byte. Digit i stands in byte i mod m of m, so every pass is contiguous."""
    m = trit_bytes(trits.size)
    planes = np.ones((_TRITS, m), np.uint8)
    planes.reshape(-1)[: trits.size] = trits
    codes: Bytes = planes[-1].copy()
    for plane in planes[-2::-1]:
        codes *= 3
        codes += plane
    return codes


def unpack_trits(codes: Bytes, n: int) -> NDArray[np.int8] | None:
    """The `n` digits as -1, 0, 1; None if a byte holds no five digits."""
    if codes.size and int(codes.max()) > _LARGEST_TRITS:
        return None
    planes = np.empty((_TRITS, codes.size), np.uint8)
    for plane in planes:
        higher = codes // 3
        np.subtract(codes, higher * 3, out=plane)
        codes = higher
    planes -= 1  # 0 wraps to 255, which is -1
    return planes.reshape(-1)[:n].view(np.int8)


def code_bytes(n: int, bits: int) -> int:
    """Bytes that hold `n` codes of `bits` bits."""
    return -(-n // (8 // bits)) if 8 % bits == 0 else plane_bytes(n, bits)


def pack_codes(codes: Bytes, bits: int) -> Bytes:
    """Codes of 1 to 8 bits: side by side in a byte where they fill it, else in planes."""
    if 8 % bits:
        return pack_planes(codes, bits)
    fields = np.zeros((8 // bits, code_bytes(codes.size, bits)), np.uint8)
    fields.reshape(-1)[: codes.size] = codes
    packed: Bytes = fields[0]
    for i, part in enumerate(fields[1:], 1):
        packed |= part << (bits * i)
    return packed


def unpack_codes(data: Bytes, bits: int, n: int) -> Bytes:
    """The `n` codes of a `pack_codes`; `data` has exactly code_bytes(n, bits) bytes."""
    if 8 % bits:
        return unpack_planes(data, bits, n, np.uint8)
    fields = np.empty((8 // bits, data.size), np.uint8)
    for i, part in enumerate(fields):
        np.right_shift(data, bits * i, out=part)
    fields &= (1 << bits) - 1
    return fields.reshape(-1)[:n]


def plane_bytes(n: int, bits: int) -> int:
    """Bytes that hold `n` numbers of `bits` bits."""
    return bits * -(-n // 8)


def pack_planes(values: NDArray[Any], bits: int) -> Bytes:
    """Unsigned numbers of any width, their lowest `bits` bits, one plane of bits after the other."""
    planes = np.empty((bits, -(-values.size // 8)), np.uint8)
    for i, plane in enumerate(planes):
        plane[:] = np.packbits((values & values.dtype.type(1 << i)) != 0)
    return planes.reshape(-1)


def unpack_planes(data: Bytes, bits: int, n: int, dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """The `n` numbers of a `pack_planes`; `data` has exactly plane_bytes(n, bits) bytes."""
    values = np.zeros(n, dtype)
    for i, plane in enumerate(data.reshape(bits, data.size // bits) if bits else ()):
        values |= np.unpackbits(plane, count=n).astype(dtype, copy=False) << dtype(i)
    return values


def golomb_bits(count: int, n: int) -> int:
    """Low bits of a gap that are written plainly when `count` of `n` places are taken (Sattler 2018)."""
    if count == 0 or count == n:
        return 0
    best = math.log((math.sqrt(5) - 1) / 2) / math.log1p(-count / n)
    return max(0, 1 + math.floor(math.log2(best)))


def pack_positions(positions: NDArray[np.int64], low_bits: int) -> tuple[Bytes, Bytes]:
    """Ascending positions as a Golomb code: the gaps' low bits, and their high parts in unary.

    The two halves of each code word go into two streams, which costs no bit and lets both be read
    without a loop.
    """
    gaps = np.diff(positions, prepend=-1) - 1
    low = pack_planes((gaps & ((1 << low_bits) - 1)).astype(np.uint64), low_bits)
    ends = np.cumsum((gaps >> low_bits) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1 if ends.size else 0, np.uint8)
    unary[ends] = 1
    return low, np.packbits(unary)


def unpack_positions(low: Bytes, unary: Bytes, low_bits: int, count: int, n: int) -> NDArray[np.int64] | None:
    """Positions below `n` in ascending order; None if the streams do not hold exactly `count` of them.

    The caller has bounded `count << low_bits` and the size of `unary` by a multiple of `n`.
    """
    ends = np.flatnonzero(np.unpackbits(unary)).astype(np.int64, copy=False)
    if ends.size != count or unary.size != (int(ends[-1]) // 8 + 1 if count else 0):
        return None
    gaps = (np.diff(ends, prepend=-1) - 1) << low_bits
    gaps |= unpack_planes(low, low_bits, count, np.uint64).view(np.int64)
    positions = np.cumsum(gaps + 1) - 1
    return None if count and int(positions[-1]) >= n else positions
