"""The wire format: what goes in comes out, and nothing else does."""

import struct
import tracemalloc
from typing import Any

import pytest

from paceline.comm import frames
from paceline.comm.frames import HEADER_BYTES, Kind
from paceline.exceptions import FrameError, MessageError

KEY = b"k" * 32
PAYLOADS = [Kind.WEIGHTS, Kind.ADOPT, Kind.ADOPTED, Kind.ATTACHED, Kind.PUSH, Kind.ADMIT]
PAYLOADS += [Kind.ASSIGN, Kind.STATE, Kind.SAVED, Kind.SLICE]


def header(kind: int, body_bytes: int, payload_bytes: int, *, magic: bytes = b"PL") -> bytes:
    return struct.pack("<2sBBIQQ", magic, kind, 0, body_bytes, 0, payload_bytes) + bytes(16)


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_what_goes_in_comes_out(kind: Kind) -> None:
    body: dict[str, Any] = {
        "text": "Größe ✓",
        "numbers": [1, -2, 3.5, 1e300],
        "none": None,
        "nested": {"a": [{}]},
    }
    payload = 1 << 40 if kind in PAYLOADS else 0
    data = frames.encode(kind, body, sequence=2**63, payload_bytes=payload, key=KEY)
    got = frames.parse_header(data[:HEADER_BYTES])
    assert (got.kind, got.sequence, got.payload_bytes) == (kind, 2**63, payload)
    assert got.body_bytes == len(data) - HEADER_BYTES
    frames.verify(got, data[HEADER_BYTES:], sequence=2**63, key=KEY)
    assert frames.decode_body(data[HEADER_BYTES:]) == body


def test_another_key_another_body_and_another_header_have_a_wrong_tag() -> None:
    data = frames.encode(Kind.PUSH, {"sequence": 1}, sequence=0, payload_bytes=8, key=KEY)
    good, body = frames.parse_header(data[:HEADER_BYTES]), data[HEADER_BYTES:]
    frames.verify(good, body, sequence=0, key=KEY)
    more = bytearray(data[:HEADER_BYTES])
    more[16] += 1  # the payload's length
    for head, text, key in [
        (good, body, b"K" * 32),
        (good, body.replace(b"1", b"2"), KEY),
        (good, body + b" ", KEY),
        (frames.parse_header(bytes(more)), body, KEY),
    ]:
        with pytest.raises(FrameError, match="PUSH frame with a wrong tag"):
            frames.verify(head, text, sequence=0, key=key)


@pytest.mark.parametrize("due", [0, 6, 8, 2**64 - 1], ids=["first", "replayed", "lost", "last"])
def test_a_replayed_or_reordered_frame_is_refused(due: int) -> None:
    data = frames.encode(Kind.PUSH, {}, sequence=7, payload_bytes=0, key=KEY)
    got = frames.parse_header(data[:HEADER_BYTES])
    with pytest.raises(FrameError, match=f"frame 7 where {due} was due"):
        frames.verify(got, data[HEADER_BYTES:], sequence=due, key=KEY)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a header of 0 bytes, expected 40"),
        (bytes(39), "a header of 39 bytes"),
        (bytes(41), "a header of 41 bytes"),
        (bytes(40), "not a Paceline frame"),
        (header(Kind.PUSH, 2, 0, magic=b"LP"), "not a Paceline frame"),
        (b"PL\x09\x01" + header(Kind.PUSH, 2, 0)[4:], "not a Paceline frame"),
        (header(0, 2, 0), "unknown kind of frame 0"),
        (header(255, 2, 0), "unknown kind of frame 255"),
        (header(Kind.TAKE, (64 << 10) + 1, 0), "TAKE body of 65,537 bytes is over its limit of 65,"),
        (header(Kind.OFFER, (64 << 20) + 1, 0), "OFFER body of 67,108,865 bytes is over"),
        (header(Kind.OFFER, 2**32 - 1, 0), "OFFER body of 4,294,967,295 bytes is over"),
        (header(Kind.HELLO, 2, 1), "HELLO payload of 1 bytes is over its limit of 0"),
        (header(Kind.PUSH, 2, (1 << 44) + 1), "PUSH payload of 17,592,186,044,417 bytes is over"),
        (header(Kind.PUSH, 2, 2**64 - 1), "PUSH payload of 18,446,744,073,709,551,615 bytes"),
    ],
)
def test_a_header_out_of_bounds_is_refused_before_anything_is_allocated(data: bytes, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match=message):
            frames.parse_header(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"text"',
        b'{"a":}',
        b"\xff\xfe",
        b'{"a":"\xff"}',
        b"[" * 65_000,
        b'{"a":' * 13_000,
        b'{"a":' + b"9" * 10_000 + b"}",
        b"{}{}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="a body that is not"):
        frames.decode_body(body)


@pytest.mark.parametrize(
    ("kind", "body", "payload_bytes", "message"),
    [
        (Kind.TAKE, {"a": "x" * 70_000}, 0, "TAKE body of 70,008 bytes is over"),
        (Kind.HELLO, {}, 5, "HELLO payload of 5 bytes is over"),
        (Kind.STATS, {"loss": float("nan")}, 0, "STATS body that is not JSON"),
        (Kind.STATS, {"loss": {1, 2}}, 0, "STATS body that is not JSON"),
    ],
)
def test_what_no_one_would_take_is_not_sent(
    kind: Kind, body: dict[str, object], payload_bytes: int, message: str
) -> None:
    # Not a LinkError: on one of those the sender would reconnect and try again.
    with pytest.raises(MessageError, match=message):
        frames.encode(kind, body, sequence=0, payload_bytes=payload_bytes, key=KEY)


def test_the_kinds_with_a_large_body_take_one() -> None:
    for kind in (Kind.OFFER, Kind.ADOPT, Kind.ADOPTED, Kind.STATE, Kind.START, Kind.STATS):
        data = frames.encode(kind, {"a": "x" * (1 << 20)}, sequence=0, payload_bytes=0, key=KEY)
        assert frames.parse_header(data[:HEADER_BYTES]).body_bytes > 1 << 20


def test_field_takes_exactly_the_type_asked_for() -> None:
    body = {"n": 3, "t": "x", "b": True, "none": None, "long": "x" * 1000}
    assert frames.field(body, "n", int) == 3
    assert frames.field(body, "b", bool) is True
    assert frames.field(body, "absent", int, 7) == 7
    for name, kind in [("absent", int), ("n", str), ("b", int), ("none", str), ("n", bool)]:
        with pytest.raises(FrameError, match=f"field '{name}' is .*, expected {kind.__name__}"):
            frames.field(body, name, kind)
    with pytest.raises(FrameError) as caught:
        frames.field(body, "long", int)
    assert len(str(caught.value)) < 150
