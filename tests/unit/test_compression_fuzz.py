"""Whatever arrives, a Decoder decodes it or raises FrameError, allocates little, and leaves `out` whole."""

import random
import struct
import tracemalloc

import pytest
import torch

from paceline.comm.compression import parse_compression
from paceline.comm.compression.slice_codec import Decoder, Encoder, Piece
from paceline.exceptions import FrameError
from tests.speed import first

PIECES = (Piece(0, 80, (10, 8)), Piece(80, 93, (13,)), Piece(96, 127))
SIZE = 127
ROUNDS = 20_000
EDGES = (0, 1, 2, 7, 8, 127, 128, 242, 243, 254, 255)


WITH_NUMBERS = ("fp8", "terngrad", "qsgd:4", "signsgd", "topk:0.01", "sbc:0.01", "powersgd:1")


def mutated(data: bytes, rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.15:
        return data[: rng.randrange(len(data))]
    if kind < 0.25:
        return data + rng.randbytes(rng.randrange(1, 9))
    if kind < 0.3:
        return data[:2] + rng.randbytes(rng.randrange(2 * len(data)))
    changed = bytearray(data)
    # Most fields that steer the reading stand in front.
    reach = len(data) if rng.random() < 0.5 else min(len(data), 16)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(reach)] = rng.choice(EDGES) if rng.random() < 0.5 else rng.randrange(256)
    if kind > 0.9:
        at = rng.randrange(len(changed))
        del changed[at : at + rng.randrange(1, 5)]
    return bytes(changed)


@pytest.mark.parametrize(
    "text", first(4, ["topk:0.1", "terngrad", "sbc:0.1", "qsgd:3", "fp16", "signsgd", "powersgd:2"])
)
def test_mutated_messages(text: str) -> None:
    spec = parse_compression(text)
    encoder = Encoder(spec, PIECES, 1)
    decoder = Decoder(spec, PIECES)
    flat = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    flat[93:96] = 0
    messages = [encoder.encode(flat) for _ in range(3)]
    rng = random.Random(text)
    out = torch.zeros(SIZE)
    mark = torch.full((SIZE,), 7.0)
    refused = 0
    for i in range(ROUNDS):
        data = mutated(messages[i % 3], rng)
        out.copy_(mark)
        try:
            decoder.decode(data, out)
        except FrameError:
            refused += 1
            assert torch.equal(out, mark), f"a refused message left its trace: {data.hex()}"
    assert 0 < refused < ROUNDS


@pytest.mark.parametrize(
    "text", ["fp8", "terngrad", "qsgd:4", "signsgd", "topk:0.01", "sbc:0.01", "powersgd:1"]
)
def test_random_bytes(text: str) -> None:
    spec = parse_compression(text)
    decoder = Decoder(spec, PIECES)
    head = Encoder(spec, PIECES, 1).encode(torch.ones(SIZE))[:2]
    rng = random.Random(1)
    out = torch.zeros(SIZE)
    for n in range(2000):
        data = rng.randbytes(n % 300)
        for candidate in (data, head + data):
            try:
                decoder.decode(candidate, out)
            except FrameError:
                continue


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "text", ["fp8", "terngrad", "qsgd:4", "signsgd", "topk:0.01", "sbc:0.01", "powersgd:1"]
)
def test_scales_and_values_are_finite(text: str, value: float) -> None:
    spec = parse_compression(text)
    pieces = (Piece(0, 120, (12, 10)),)
    data = bytearray(Encoder(spec, pieces, 1).encode(torch.linspace(-1, 2, 120)))
    at = len(data) - 4 if text.startswith(("topk", "sbc")) else 2
    data[at : at + 4] = struct.pack("<f", value)
    with pytest.raises(FrameError, match="not finite"):
        Decoder(spec, pieces).decode(data, torch.zeros(120))


@pytest.mark.parametrize("text", ["topk:0.01", "sbc:0.01"])
@pytest.mark.parametrize(
    ("count", "low_bits", "unary_bytes"),
    [
        (2**32 - 1, 0, 16),
        (2**32 - 1, 255, 2**32 - 1),
        (1000, 32, 0),
        (1, 255, 1),
        (0, 200, 0),
        (1, 0, 2**32 - 1),
        (1000, 0, 300),
        (3, 5, 10**6),
    ],
)
def test_lengths_are_checked_before_memory_is_taken(
    text: str, count: int, low_bits: int, unary_bytes: int
) -> None:
    spec = parse_compression(text)
    pieces = (Piece(0, 1000),)
    head = Encoder(spec, pieces, 1).encode(torch.ones(1000))[:2]
    decoder = Decoder(spec, pieces)
    data = head + struct.pack("<QBQ", count, low_bits, unary_bytes) + bytes(64)
    out = torch.zeros(1000)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decoder.decode(data, out)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_positions_are_range_checked() -> None:
    """A well-formed message for a larger slice, whose last position is just outside."""
    spec = parse_compression("topk:0.01")
    flat = torch.zeros(101)
    flat[100] = 1.0
    data = Encoder(spec, (Piece(0, 101),), 1).encode(flat)
    out = torch.full((100,), 7.0)
    with pytest.raises(FrameError, match="positions beyond a slice of 100 elements"):
        Decoder(spec, (Piece(0, 100),)).decode(data, out)
    assert (out == 7).all()
    Decoder(spec, (Piece(0, 101),)).decode(data, torch.zeros(101))


def test_no_position_is_in_the_padding() -> None:
    spec = parse_compression("sbc:0.01")
    flat = torch.zeros(101)
    flat[50] = 1.0
    data = Encoder(spec, (Piece(0, 50), Piece(50, 101)), 1).encode(flat)
    with pytest.raises(FrameError, match="in the padding"):
        Decoder(spec, (Piece(0, 50), Piece(51, 101))).decode(data, torch.zeros(101))
