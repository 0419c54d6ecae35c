"""More than 100,000 malformed frames: clear refusals, bounded memory, and the hub goes on."""

import random
import socket
import struct
import tracemalloc

import pytest

from paceline.comm import Address, connect, frames
from paceline.comm.frames import HEADER_BYTES, Kind
from paceline.exceptions import FrameError, LinkError
from tests.links import KEYS, SECRET, Echo, client, echoes, linked, open_descriptors, running

PARSED = 100_000
RECEIVED = 3_000
SERVED = 1_200
STRANGERS = 600
_EDGES = [0, 1, 2, 255, 65_535, 65_536, 65_537, 2**26, 2**26 + 1, 2**31, 2**32 - 1]
_LONG_EDGES = [*_EDGES, 2**44, 2**44 + 1, 2**63, 2**64 - 1]


def good_frames(random_: random.Random, key: bytes) -> list[bytes]:
    """Valid frames of every kind, the first of their connection."""
    found = []
    for kind in Kind:
        for size in (0, 3, 40, random_.randrange(2000)):
            body = {"sequence": size, "text": "x" * size, "list": [None, 1.5, {"a": []}]}
            found.append(frames.encode(kind, body, sequence=0, payload_bytes=0, key=key))
    return found


def damaged(random_: random.Random, good: list[bytes], key: bytes) -> bytes:
    """A frame that is wrong in one of many ways (or, rarely, right)."""
    data = bytearray(random_.choice(good))
    way = random_.randrange(9)
    if way == 0:
        return random_.randbytes(random_.randrange(200))
    if way == 1:
        return bytes(data[: random_.randrange(len(data))])
    if way == 2:
        for _ in range(random_.randrange(1, 9)):
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    elif way == 3:  # one bit of the header
        data[random_.randrange(HEADER_BYTES)] ^= 1 << random_.randrange(8)
    elif way == 4:
        struct.pack_into("<I", data, 4, random_.choice(_EDGES))
    elif way == 5:
        struct.pack_into("<Q", data, random_.choice([8, 16]), random_.choice(_LONG_EDGES))
    elif way == 6:  # the head of one frame and the body of another
        data[HEADER_BYTES:] = random_.choice(good)[HEADER_BYTES:]
    elif way == 7:
        return b"PL" + random_.randbytes(HEADER_BYTES - 2 + random_.randrange(60))
    else:  # rightly signed nonsense
        return signed(random_, key)
    return bytes(data)


def signed(random_: random.Random, key: bytes) -> bytes:
    """A frame by someone who knows the key: wrong body, sequence or payload, right tag."""
    depth = random_.randrange(1, 4_000)
    body = random_.choice(
        [
            b"",
            b"[1]",
            b'{"a":',
            b"\xff" * 9,
            b"[" * depth,
            b'{"a":' * (depth // 5),
            b'{"n":' + b"1" * 5000 + b"}",
            random_.randbytes(random_.randrange(99)),
        ]
    )
    kind = random_.choice([*Kind, 0, 24, 99, 255])
    sequence = random_.choice([0, 0, 0, 1, 2**64 - 1])
    payload = random_.choice([0, 0, 1, 2**40, 2**44 + 1])
    raw = struct.pack("<2sBBIQQ", b"PL", kind, 0, len(body), sequence, payload)
    return raw + frames.tag_of(key, raw, body) + body


def parse(data: bytes, key: bytes) -> None:
    """What a connection does with the bytes of a frame."""
    head = frames.parse_header(data[:HEADER_BYTES])
    body = data[HEADER_BYTES : HEADER_BYTES + head.body_bytes]
    frames.verify(head, body, sequence=0, key=key)
    frames.decode_body(body)


@pytest.mark.slow
def test_a_hundred_thousand_damaged_frames_are_refused_by_the_parser() -> None:
    random_ = random.Random(20261115)
    key = KEYS.send
    good = good_frames(random_, key)
    unharmed = set(good)
    refused = parsed = 0
    tracemalloc.start()
    try:
        for _ in range(PARSED):
            data = damaged(random_, good, key)
            parsed += 1
            try:
                parse(data, key)
            except FrameError as error:
                refused += 1
                assert 0 < len(str(error)) < 300
            else:
                head = frames.parse_header(data[:HEADER_BYTES])
                assert data[: HEADER_BYTES + head.body_bytes] in unharmed, "a damaged frame was taken"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert parsed >= 100_000
    assert refused > 0.97 * parsed
    # A body of 64 KiB as text and as objects, and no more: nothing trusted a length.
    assert peak < 16 << 20


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_damaged_frames_are_refused_by_a_connection(carrier: str) -> None:
    random_ = random.Random(7)
    key = KEYS.send
    good = good_frames(random_, key)
    count = RECEIVED if carrier == "unix" else RECEIVED // 3
    before = open_descriptors()
    worst = 0
    tracemalloc.start()
    try:
        for _ in range(count):
            with linked(carrier) as (sender, receiver):
                sender.sock.sendall(damaged(random_, good, key))
                sender.sock.shutdown(socket.SHUT_WR)
                # Frames that were taken are followed by the end of the link.
                with pytest.raises(LinkError):
                    for _ in range(3):
                        receiver.receive()
            worst = max(worst, tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    assert worst < (64 << 20) + (1 << 20), "more than the largest body was allocated"
    assert open_descriptors() == before


def test_a_hub_goes_on_serving_through_damaged_frames_and_strangers() -> None:
    random_ = random.Random(11)
    handler = Echo()
    before = open_descriptors()
    with running(handler) as hub, client(hub, rank=1) as faithful:
        assert echoes(faithful)
        for i in range(SERVED):
            link = "tcp" if i % 4 == 0 else "auto"
            bad = connect(hub.listener.address, SECRET, peer="server:0", link=link)
            key = bad.socket_state.keys.send
            bad.sock.settimeout(5)
            if i % 3:  # after a good hello; else in its place
                bad.send(Kind.HELLO, {"role": "worker", "rank": 2 + i})
            good = [frames.encode(k, {}, sequence=i % 2, payload_bytes=0, key=key) for k in Kind]
            _give_and_wait(bad.sock, damaged(random_, good, key))
            bad.close()
            if i % 50 == 0:
                assert echoes(faithful)
        for i in range(STRANGERS):
            _give_and_wait(_stranger(hub.listener.address, tcp=i % 2 == 0), _noise(random_, i))
            if i % 50 == 0:
                assert echoes(faithful)
        assert echoes(faithful)
        with client(hub, rank=0) as late, client(hub, rank=0, link="tcp") as later:
            assert echoes(late) and echoes(later)
    assert len(handler.strangers) >= STRANGERS
    assert open_descriptors() == before


def _stranger(address: Address, *, tcp: bool) -> socket.socket:
    if tcp:
        return socket.create_connection((address.host, address.port), timeout=5)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(f"\0{address.unix}")
    return sock


def _noise(random_: random.Random, i: int) -> bytes:
    """A port scan, another protocol, a wrong version, half a greeting, a wrong proof."""
    nonce = random_.randbytes(32)
    return [
        b"",
        random_.randbytes(random_.randrange(300)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PACELINE\x02" + nonce,
        b"PACELINE\x01" + nonce[: random_.randrange(32)],
        b"PACELINE\x01" + nonce + random_.randbytes(32),
    ][i % 6]


def _give_and_wait(sock: socket.socket, data: bytes) -> None:
    """Send, say that no more comes, and wait until the other side has closed."""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    except TimeoutError:
        pytest.fail("the hub neither answered nor closed")
    except OSError:
        pass  # it closed before all was sent
    finally:
        sock.close()


def test_what_is_random_is_the_same_every_time() -> None:
    first, second = (
        [damaged(r, good_frames(r, KEYS.send), KEYS.send) for _ in range(50)]
        for r in (random.Random(3), random.Random(3))
    )
    assert first == second
