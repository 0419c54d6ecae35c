"""Frames over a link: descriptors, payloads, carriers, and peers that go away."""

import array
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.comm import Address, Kind, Listener, Region, connect, frames
from paceline.comm.impairment import LinkConditions
from paceline.exceptions import FrameError, LinkError
from tests.links import KEYS, PATIENCE_S, SECRET, Echo, client, echoes, linked, open_descriptors, running

CARRIERS = pytest.mark.parametrize("carrier", ["unix", "tcp"])


@CARRIERS
def test_frames_arrive_in_order_both_ways(carrier: str) -> None:
    with linked(carrier) as (a, b):
        for i in range(20):
            a.send(Kind.TAKE, {"i": i})
            b.send(Kind.GRANT, {"i": -i})
        for i in range(20):
            frame = b.receive()
            assert (frame.kind, frame.body, frame.payload_bytes) == (Kind.TAKE, {"i": i}, 0)
            assert a.receive().body == {"i": -i}


@CARRIERS
def test_a_payload_in_several_views_is_one_stream(carrier: str) -> None:
    data = os.urandom(3_000_000)
    parts = [memoryview(data)[:1], memoryview(data)[1:1_000_000], memoryview(data)[1_000_000:]]
    with linked(carrier) as (a, b):
        sender = threading.Thread(target=a.send, args=(Kind.PUSH, {"n": 1}, parts))
        sender.start()
        assert b.receive().payload_bytes == len(data)
        into = [bytearray(2_000_000), bytearray(999_999), bytearray(1)]
        b.read_into([memoryview(room) for room in into])
        sender.join()
        assert b"".join(into) == data
        a.send(Kind.BYE)
        assert b.receive().kind is Kind.BYE


def test_views_of_numbers_count_in_bytes() -> None:
    with linked() as (a, b):
        a.send(Kind.PUSH, {}, [memoryview(array.array("d", [1.5, 2.5])), memoryview(b"")])
        room = array.array("d", [0, 0])
        assert b.receive().payload_bytes == 16
        b.read_into([memoryview(room)])
        assert list(room) == [1.5, 2.5]


def test_a_payload_of_another_size_is_refused_and_the_link_is_over() -> None:
    with linked() as (a, b):
        a.send(Kind.PUSH, {}, [memoryview(b"12345678")])
        b.receive()
        with pytest.raises(FrameError, match="a payload of 8 bytes from worker:1, expected 9"):
            b.read_into([memoryview(bytearray(9))])
        with pytest.raises(FrameError, match="a payload of 8 bytes from worker:1 nobody expected"):
            b.receive()


def test_a_blob_is_read_once_within_its_limit() -> None:
    with linked() as (a, b):
        a.send(Kind.STATE, {}, [memoryview(b"1234"), memoryview(b"5")])
        frame = b.receive()
        with pytest.raises(FrameError, match="STATE payload of 5 bytes from worker:1 is over the li"):
            b.read_blob(frame, 4)
        assert b.read_blob(frame, 5) == b.read_blob(frame, 0) == b"12345"


def test_a_streamed_payload_arrives_as_it_gets_ready() -> None:
    with linked() as (a, b):
        step = threading.Event()

        def pieces() -> Iterator[memoryview]:
            yield memoryview(b"first")
            assert step.wait(5)
            yield memoryview(b"second")

        args = (Kind.ADMIT, {"version": 3}, pieces(), [memoryview(b"firstsecond")])
        sender = threading.Thread(target=a.send_streamed, args=args)
        sender.start()
        assert b.receive().body == {"version": 3}
        rooms = bytearray(5), bytearray(6)
        reading = b.read_each([*map(memoryview, rooms)])
        assert next(reading) == 0 and rooms[0] == b"first"
        step.set()
        assert [*reading] == [1] and rooms[1] == b"second"
        sender.join(5)
        assert not sender.is_alive()


@pytest.mark.parametrize("pieces", [[], [b"only"], [b"far too long for it"]])
def test_a_streamed_payload_of_another_size_is_an_error(pieces: list[bytes]) -> None:
    with linked() as (a, _), pytest.raises(LinkError, match="a ADMIT to server:0 ended .* short"):
        a.send_streamed(Kind.ADMIT, {}, map(memoryview, pieces), [memoryview(bytes(8))])


# --- descriptors ----------------------------------------------------------------------------------


def test_a_descriptor_comes_with_its_frame() -> None:
    before = open_descriptors()
    region = Region.create(4096)
    with linked() as (a, b):
        a.send(Kind.ATTACH, {"n": 1}, descriptors=[region.fd])
        a.send(Kind.TAKE, {"n": 2})
        a.send(Kind.ADOPTED, {"n": 3}, [memoryview(b"payload")], [region.fd, region.fd])
        first, second, third = b.receive(), b.receive(), b.receive()
        assert [len(f.descriptors) for f in (first, second, third)] == [1, 0, 2]
        assert b.read_blob(third, 10) == b"payload"
        other = Region.attach(first.descriptors[0], 4096)
        region.buffer[0] = 5
        assert other.buffer[0] == 5
        assert not os.get_inheritable(other.fd)
        for fd in third.descriptors:
            os.close(fd)
        other.close()
    region.close()
    assert open_descriptors() == before


def test_a_descriptor_comes_with_a_large_body() -> None:
    before = open_descriptors()
    with linked() as (a, b), open(os.devnull) as file:
        body = {"text": "x" * 5_000_000}
        args = (Kind.ADOPT, body, (), [file.fileno()])
        sender = threading.Thread(target=a.send, args=args)
        sender.start()
        frame = b.receive()
        sender.join(5)
        assert frame.body == body and len(frame.descriptors) == 1
        os.close(frame.descriptors[0])
    assert open_descriptors() == before


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.PUSH, Kind.TAKE, Kind.STATE])
def test_descriptors_that_nobody_asked_for_are_refused_and_closed(kind: Kind) -> None:
    before = open_descriptors()
    with linked() as (a, b), open(os.devnull) as file:
        a.send(kind, {}, descriptors=[file.fileno()])
        with pytest.raises(FrameError, match=f"a {kind.name} with a descriptor"):
            b.receive()
    assert open_descriptors() == before


def test_too_many_descriptors_are_refused_and_closed() -> None:
    before = open_descriptors()
    with linked() as (a, b), open(os.devnull) as file:
        a.send(Kind.ATTACH, {}, descriptors=[file.fileno()] * 3)
        with pytest.raises(FrameError, match="worker:1 sent too many descriptors"):
            b.receive()
    assert open_descriptors() == before


@pytest.mark.parametrize("cut", [1, 20, 39, 40, 50])
def test_descriptors_of_a_broken_frame_are_closed(cut: int) -> None:
    before = open_descriptors()
    data = frames.encode(Kind.ATTACH, {"a": "text"}, sequence=0, payload_bytes=0, key=KEYS.send)
    with linked() as (a, b), open(os.devnull) as file:
        socket.send_fds(a.sock, [data[:cut]], [file.fileno()])
        a.close()
        with pytest.raises(LinkError, match="worker:1 closed the link in the middle of a frame"):
            b.receive()
    assert open_descriptors() == before


# --- peers that go away ---------------------------------------------------------------------------

FRAME = frames.encode(Kind.PUSH, {"text": "abc"}, sequence=0, payload_bytes=100, key=KEYS.send)


@pytest.mark.parametrize("cut", range(len(FRAME)))
@CARRIERS
def test_a_peer_that_closes_inside_header_or_body_is_named(carrier: str, cut: int) -> None:
    with linked(carrier) as (a, b):
        a.sock.sendall(FRAME[:cut])
        a.close()
        message = "closed the link in the middle of a frame" if cut else "closed the link$"
        with pytest.raises(LinkError, match=f"worker:1 {message}"):
            b.receive()


@pytest.mark.parametrize("cut", [0, 1, 50, 99])
@CARRIERS
def test_a_peer_that_closes_inside_a_payload_is_named(carrier: str, cut: int) -> None:
    with linked(carrier) as (a, b):
        a.sock.sendall(FRAME + bytes(cut))
        a.close()
        assert b.receive().payload_bytes == 100
        with pytest.raises(LinkError, match="worker:1 closed the link in the middle of a frame"):
            b.read_into([memoryview(bytearray(60)), memoryview(bytearray(40))])


@CARRIERS
def test_a_peer_that_stops_inside_a_frame_is_named_but_silence_between_frames_is_not(
    carrier: str,
) -> None:
    with linked(carrier) as (a, b):
        b.sock.settimeout(0.02)
        with pytest.raises(TimeoutError):
            b.receive()
        a.sock.sendall(FRAME[:10])
        with pytest.raises(LinkError, match="worker:1 stopped in the middle of a frame"):
            b.receive()
    with linked(carrier) as (a, b):
        b.sock.settimeout(0.02)
        a.sock.sendall(FRAME + bytes(99))
        b.receive()
        with pytest.raises(LinkError, match="worker:1 stopped in the middle of a frame"):
            b.read_into([memoryview(bytearray(100))])


@CARRIERS
def test_sending_to_a_peer_that_is_gone_names_it(carrier: str) -> None:
    with linked(carrier) as (a, b):
        b.close()
        big = memoryview(bytes(1 << 20))
        with pytest.raises(LinkError, match="the link to server:0 broke"):
            for _ in range(50):
                a.send(Kind.PUSH, {}, [big])
        with pytest.raises(LinkError, match="the link to server:0 broke"):
            a.send_streamed(Kind.ADMIT, {}, iter([big]), [big])
        a.close()
        a.close()
        with pytest.raises(LinkError, match="the link to server:0 broke"):
            a.send(Kind.BYE)
        with pytest.raises(LinkError, match="the link to server:0 broke"):
            a.receive()


def test_sending_to_a_peer_that_does_not_read_names_it() -> None:
    with linked() as (a, _):
        a.sock.settimeout(0.02)
        with pytest.raises(LinkError, match="server:0 does not read what is sent to it"):
            a.send(Kind.PUSH, {}, [memoryview(bytes(8 << 20))])


# --- carriers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("link", "local"), [("tcp", False), ("shm", True), ("auto", True)])
def test_the_link_that_was_asked_for_is_used(link: str, local: bool) -> None:
    with running(Echo()) as hub, client(hub, link=link) as connection:
        assert connection.local is local
        assert connection.peer == "server:0"
        assert echoes(connection)
        if not local:
            assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_auto_uses_tcp_when_the_unix_name_is_of_another_host() -> None:
    with running(Echo()) as hub:
        here = hub.listener.address
        for name in ("paceline-elsewhere", None):
            away = Address(unix=name, host=here.host, port=here.port)
            connection = connect(away, SECRET, peer="server:0")
            assert not connection.local
            connection.close()
            with pytest.raises(LinkError, match="cannot meet server:0 on this host .*--link auto"):
                connect(away, SECRET, peer="server:0", link="shm")


def test_a_listener_without_tcp_is_met_on_the_host_only() -> None:
    with running(Echo(), tcp=False) as hub:
        assert len(hub.listener.sockets) == 1
        with client(hub) as connection:
            assert connection.local and echoes(connection)
        with pytest.raises(LinkError, match=r"cannot connect to server:0 at 127.0.0.1:0"):
            connect(hub.listener.address, SECRET, peer="server:0", link="tcp")


@pytest.mark.parametrize("link", ["tcp", "shm", "auto"])
def test_nobody_there_is_a_link_error_with_the_address(link: str) -> None:
    listener = Listener()
    address = listener.address
    listener.close()
    before = open_descriptors()
    with pytest.raises(LinkError, match="server:2"):
        connect(address, SECRET, peer="server:2", link=link)
    assert open_descriptors() == before


def test_an_interface_that_is_not_here_is_a_link_error() -> None:
    before = open_descriptors()
    with pytest.raises(LinkError, match=r"cannot listen on 192.0.2.1: "):
        Listener(host="192.0.2.1")
    assert open_descriptors() == before


def test_unix_names_cannot_be_guessed_and_leave_no_file() -> None:
    listeners = [Listener(tcp=False) for _ in range(5)]
    names = {listener.address.unix for listener in listeners}
    for listener in listeners:
        listener.close()
    assert len(names) == 5
    assert all(name is not None and len(name) == len("paceline-") + 32 for name in names)
    assert not any(os.path.exists(name) for name in names if name)


def test_an_address_travels_as_json() -> None:
    for unix in ("paceline-1", None):
        address = Address(unix=unix, host="127.0.0.1", port=4711)
        assert Address.from_json(address.to_json()) == address
    for odd in ({}, {"unix": 1, "host": "x", "port": 1}, {"unix": None, "host": "x", "port": "1"}):
        with pytest.raises(FrameError, match="field"):
            Address.from_json(odd)


def test_only_unix_sockets_are_local() -> None:
    for carrier, local in (("unix", True), ("tcp", False)):
        with linked(carrier) as (a, b):
            assert a.local is b.local is local
            assert a.fileno() == a.sock.fileno()


def test_payload_bytes_are_counted_at_both_ends() -> None:
    with linked() as (a, b):
        a.send(Kind.PUSH, {"text": "not counted"}, [memoryview(b"abc"), memoryview(b"de")])
        frame = b.receive()
        assert b.read_blob(frame, 5) == b"abcde"
        whole = [memoryview(b"fg"), memoryview(b"hi")]
        b.send_streamed(Kind.ADMIT, {}, iter(whole), whole)
        a.receive()
        rooms = [bytearray(1), bytearray(3)]
        assert list(a.read_each([memoryview(room) for room in rooms])) == [0, 1]
        assert rooms == [b"f", b"ghi"]
        assert (a.payload_sent, a.payload_received) == (b.payload_received, b.payload_sent) == (5, 4)


def test_an_emulated_link_is_a_tcp_link_that_takes_its_time() -> None:
    conditions = LinkConditions(latency_s=0.02)
    with running(Echo()) as hub:
        connection = connect(hub.listener.address, SECRET, peer="server:0", conditions=conditions)
        connection.sock.settimeout(PATIENCE_S)
        try:
            connection.send(Kind.HELLO, {"role": "worker", "rank": 0})
            started = time.monotonic()
            assert not connection.local and echoes(connection)
            assert time.monotonic() - started >= 0.04
        finally:
            connection.close()


def test_frames_that_two_threads_send_at_once_leave_one_after_the_other() -> None:
    """As a server does: its main thread grants leases while the link's own thread answers a probe."""
    count = 300
    with linked("tcp") as (a, b):
        a.keep()

        def send(kind: Kind) -> None:
            for i in range(count):
                a.send(kind, {"i": i} if kind is Kind.GRANT else {})

        threads = [threading.Thread(target=send, args=(kind,)) for kind in (Kind.GRANT, Kind.PROBE)]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            got = [b.receive() for _ in range(2 * count)]
        finally:
            sys.setswitchinterval(before)
            for thread in threads:
                thread.join(PATIENCE_S)
        assert [frame.body["i"] for frame in got if frame.kind is Kind.GRANT] == list(range(count))
        assert b.received == count  # probes do not count: they may be lost


def test_a_frame_does_not_get_into_the_payload_of_another_threads_frame() -> None:
    data = os.urandom(16 << 20)  # more than the sockets hold: its sender waits in the middle
    with linked("tcp") as (a, b):
        large = threading.Thread(target=a.send, args=(Kind.PUSH, {}, [memoryview(data)]))
        small = threading.Thread(target=a.send, args=(Kind.PROBE,))
        large.start()
        frame = b.receive()
        small.start()
        assert b.read_blob(frame, len(data)) == data
        assert b.receive().kind is Kind.PROBE
        large.join(PATIENCE_S)
        small.join(PATIENCE_S)


def test_a_frame_sent_while_another_is_streamed_follows_it_and_keeps_nobody_waiting() -> None:
    """The main thread sends while the link's thread waits for the main thread's next slice."""
    pieces = [memoryview(b"first"), memoryview(b"second")]

    def making() -> Iterator[memoryview]:
        yield pieces[0]
        sender = threading.Thread(target=a.send, args=(Kind.GRANT, {"n": 1}))
        sender.start()
        sender.join(PATIENCE_S)
        assert not sender.is_alive()
        yield pieces[1]

    with linked("tcp") as (a, b):
        a.send_streamed(Kind.ADMIT, {}, making(), pieces)
        assert b.read_blob(b.receive(), 100) == b"firstsecond"
        assert b.receive().body == {"n": 1}


def test_a_frame_sent_behind_a_stream_that_stops_short_is_not_read_as_its_payload() -> None:
    def making() -> Iterator[memoryview]:
        a.send(Kind.GRANT, {"n": 1})
        yield memoryview(b"first")

    with linked("tcp") as (a, b):
        with pytest.raises(LinkError, match="ended 200 bytes short"):
            a.send_streamed(Kind.ADMIT, {}, making(), [memoryview(bytes(205))])
        with pytest.raises(LinkError, match="closed the link in the middle of a frame"):
            b.read_blob(b.receive(), 1000)


def test_the_tag_covers_header_and_message_and_not_the_payload() -> None:
    """What docs/security.md says is not promised: with TLS a payload is checked, too (test_tls.py)."""
    with linked("tcp") as (a, b):
        data = frames.encode(Kind.PUSH, {"n": 1}, sequence=0, payload_bytes=4, key=KEYS.send)
        a.sock.sendall(data + b"abcd")
        assert b.read_blob(b.receive(), 4) == b"abcd"
        damaged = bytearray(frames.encode(Kind.PUSH, {"n": 1}, sequence=1, payload_bytes=4, key=KEYS.send))
        damaged[-2] ^= 1
        a.sock.sendall(bytes(damaged) + b"abcd")
        with pytest.raises(FrameError, match="wrong tag"):
            b.receive()
