"""Impaired links: what they do to time, by an injected clock; and real ones lose and leak nothing."""

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm import Kind, connect
from paceline.comm.impairment import LINK_CONDITIONS
from paceline.exceptions import UsageError
from paceline.testing import LinkConditions, impaired, slow_links
from paceline.testing.impaired_links import THREAD_NAME, Line
from tests.links import PATIENCE_S, SECRET, Echo, echoes, open_descriptors, running, sockets, until

CARRIERS = pytest.mark.parametrize("carrier", ["unix", "tcp"])
MB = 1_000_000


# --- conditions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "latency_s", "bits_per_s"),
    [
        ("latency=200ms,rate=100mbit", 0.2, 100e6),
        ("rate=1gbit", 0.0, 1e9),
        ("latency=0.5s", 0.5, None),
        (" Latency=12.5ms , RATE=56 kbit ", 0.0125, 56e3),
        ("latency=0ms", 0.0, None),
    ],
)
def test_parse(text: str, latency_s: float, bits_per_s: float | None) -> None:
    assert LinkConditions.parse(text) == LinkConditions(latency_s=latency_s, bits_per_s=bits_per_s)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither latency=… nor rate=…"),
        ("200ms", "'200ms' is neither"),
        ("latency=200", "latency needs a number and one of ms, s, got '200'"),
        ("latency=ms", "got 'ms'"),
        ("latency=-1ms", "got '-1ms'"),
        ("latency=infs", "got 'infs'"),
        ("latency=nans", "got 'nans'"),
        ("latency=1mbit", "got '1mbit'"),
        ("latency=61s", "from 0 to 60 s, got 61 s"),
        ("latency=1ms,latency=2ms", "latency is given twice"),
        ("rate=100", "rate needs a number and one of kbit, mbit, gbit"),
        ("rate=0mbit", "at least 1 kbit"),
        ("rate=1tbit", "got '1tbit'"),
        ("rate=100mbit;latency=1ms", "got '100mbit;latency=1ms'"),
        ("latency=1ms,", "'' is neither"),
        ("loss=1%", "'loss=1%' is neither"),
    ],
)
def test_nonsense_is_refused_with_the_reason_and_the_form(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        LinkConditions.parse(text)
    assert said in str(caught.value)
    assert f"{LINK_CONDITIONS} {text!r}" in str(caught.value)
    assert "latency=200ms,rate=100mbit" in str(caught.value)


def test_values_are_checked_too() -> None:
    for bad in (-0.1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="latency must be from 0 to 60 s"):
            LinkConditions(latency_s=bad)
        with pytest.raises(UsageError, match="rate must be at least 1 kbit"):
            LinkConditions(bits_per_s=bad)


@given(
    st.integers(0, 60_000_000).map(lambda us: us / 1e6),
    st.none() | st.integers(1000, 10**12).map(float),
)
def test_text_reads_back(latency_s: float, bits_per_s: float | None) -> None:
    conditions = LinkConditions(latency_s=latency_s, bits_per_s=bits_per_s)
    read = LinkConditions.parse(str(conditions))
    assert str(read) == str(conditions)
    assert read.latency_s == pytest.approx(latency_s)
    assert read.bits_per_s == pytest.approx(bits_per_s)


def test_canonical_text() -> None:
    assert str(LinkConditions(latency_s=0.2, bits_per_s=100e6)) == "latency=200ms,rate=100mbit"
    assert str(LinkConditions()) == "latency=0ms"


def test_the_environment_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINK_CONDITIONS, raising=False)
    assert LinkConditions.from_environment() is None
    with slow_links(LinkConditions(latency_s=0.2)):
        assert LinkConditions.from_environment() == LinkConditions(latency_s=0.2)
        with slow_links("rate=1mbit"):
            assert LinkConditions.from_environment() == LinkConditions(bits_per_s=1e6)
        assert os.environ[LINK_CONDITIONS] == "latency=200ms"
    assert LINK_CONDITIONS not in os.environ
    with pytest.raises(UsageError, match="fast"), slow_links("fast"):
        pass
    assert LINK_CONDITIONS not in os.environ


# --- time, by an injected clock ------------------------------------------------------------------------


def arrivals(line: Line, sent: list[tuple[float, int]]) -> list[float]:
    """When pieces of these sizes, sent at these times, arrive."""
    for now, size in sent:
        line.put(bytes(size), now)
    found = []
    while line.due is not None:
        found.append(line.due)
        line.take(len(line.first))
    return found


def test_latency_is_applied_from_when_a_piece_was_sent() -> None:
    line = Line(LinkConditions(latency_s=0.2))
    assert arrivals(line, [(1.0, 10), (1.05, 10), (3.0, 10)]) == pytest.approx([1.2, 1.25, 3.2])


def test_pieces_sent_back_to_back_arrive_together() -> None:
    line = Line(LinkConditions(latency_s=0.2))
    assert arrivals(line, [(0.0, 100)] * 10) == pytest.approx([0.2] * 10)


def test_rate_is_applied_and_an_idle_line_saves_nothing_up() -> None:
    line = Line(LinkConditions(latency_s=0.1, bits_per_s=8e6))  # 1 MB per second
    sent = [(0.0, 10_000), (0.0, 10_000), (0.005, 10_000), (5.0, 10_000), (5.0, 10_000)]
    assert arrivals(line, sent) == pytest.approx([0.11, 0.12, 0.13, 5.11, 5.12])


@given(
    st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 2000)), min_size=1, max_size=50),
    st.floats(0, 0.5),
    st.floats(1e4, 1e9),
)
def test_nothing_arrives_before_its_time_out_of_order_or_above_the_rate(
    gaps: list[tuple[float, int]], latency_s: float, rate: float
) -> None:
    now, sent = 0.0, []
    for gap, size in gaps:
        now += gap
        sent.append((now, size))
    found = arrivals(Line(LinkConditions(latency_s=latency_s, bits_per_s=rate)), sent)
    assert found == sorted(found)
    for i, (start, _) in enumerate(sent):
        passed = 0
        for (_, size), arrival in zip(sent[i:], found[i:], strict=True):
            passed += size
            assert arrival >= start + latency_s + 8 * passed / rate - 1e-9


def test_an_end_takes_its_time_behind_what_was_sent() -> None:
    line = Line(LinkConditions(latency_s=0.1, bits_per_s=8e6))
    assert arrivals(line, [(0.0, 1000), (0.0, 0)]) == pytest.approx([0.101, 0.101])


def test_a_piece_can_be_taken_in_parts() -> None:
    line = Line(LinkConditions(latency_s=0.1))
    line.put(b"abcdef", 0.0)
    line.take(2)
    assert (bytes(line.first), line.due) == (b"cdef", pytest.approx(0.1))
    line.take(4)
    assert line.due is None


@pytest.mark.parametrize(
    ("conditions", "limit"),
    [
        (LinkConditions(latency_s=0.2), 64 << 20),
        (LinkConditions(bits_per_s=100e6), 4 << 20),
        (LinkConditions(latency_s=0.2, bits_per_s=100e6), (4 << 20) + 2_500_000),
    ],
)
def test_memory_in_flight_is_bounded_and_freed(conditions: LinkConditions, limit: int) -> None:
    line = Line(conditions)
    put = 0
    while line.room:
        put += line.room
        line.put(bytes(line.room), 0.0)
    assert put == limit
    line.take(100)
    assert line.room == 100


def test_pieces_are_small_where_the_rate_is() -> None:
    assert Line(LinkConditions(bits_per_s=1e3)).room == 1500
    assert Line(LinkConditions(bits_per_s=100e6)).room == 12_500
    assert Line(LinkConditions(bits_per_s=100e9)).room == Line(LinkConditions()).room == 256 << 10


# --- real sockets and threads ---------------------------------------------------------------------------


def pumps() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def assert_no_threads() -> None:
    for thread in pumps():
        thread.join(PATIENCE_S)
    assert not pumps()


@contextmanager
def link(conditions: LinkConditions, carrier: str = "tcp") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends with an impaired link between them; no thread or descriptor is left of it."""
    before = open_descriptors()
    raw, far = sockets(carrier)
    near = impaired(raw, conditions)
    for end in (near, far):
        end.settimeout(PATIENCE_S)
    try:
        yield near, far
    finally:
        near.close()
        far.close()
        assert_no_threads()
        assert open_descriptors() == before


def receive(sock: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        data = sock.recv(1 << 20)
        assert data, "it ended early"
        found += data
    return bytes(found)


@CARRIERS
@pytest.mark.parametrize("text", ["latency=0ms", "latency=2ms", "latency=2ms,rate=400mbit"])
def test_all_bytes_arrive_in_order_both_ways_at_once(carrier: str, text: str) -> None:
    up, down = random.Random(1).randbytes(10 * MB), random.Random(2).randbytes(10 * MB)
    with link(LinkConditions.parse(text), carrier) as (near, far):
        senders = [threading.Thread(target=near.sendall, args=(up,))]
        senders += [threading.Thread(target=far.sendall, args=(down,))]
        answer: list[bytes] = []
        reader = threading.Thread(target=lambda: answer.append(receive(near, len(down))))
        for thread in (*senders, reader):
            thread.start()
        assert receive(far, len(up)) == up
        for thread in (*senders, reader):
            thread.join()
        assert answer == [down]


def test_a_round_trip_takes_twice_the_latency() -> None:
    with link(LinkConditions(latency_s=0.03)) as (near, far):
        start = time.monotonic()
        near.sendall(b"ping")
        assert receive(far, 4) == b"ping"
        assert time.monotonic() - start >= 0.03
        far.sendall(b"pong")
        assert receive(near, 4) == b"pong"
        assert time.monotonic() - start >= 0.06


def test_messages_follow_one_another_through_the_latency() -> None:
    with link(LinkConditions(latency_s=0.1)) as (near, far):
        start = time.monotonic()
        for i in range(10):
            near.sendall(bytes([i]))
        assert receive(far, 10) == bytes(range(10))
        took = time.monotonic() - start
    assert took >= 0.1
    assert took < 0.5, "one after the other they would take 1 s"


def test_the_rate_holds_for_each_direction() -> None:
    size = 500_000
    with link(LinkConditions(bits_per_s=80e6)) as (near, far):  # 50 ms
        start = time.monotonic()
        near.sendall(bytes(size))
        far.sendall(bytes(size))
        receive(far, size)
        receive(near, size)
        took = time.monotonic() - start
    assert took >= 0.05


@CARRIERS
def test_a_sender_is_held_up_by_a_receiver_that_does_not_read(carrier: str) -> None:
    with link(LinkConditions(bits_per_s=100e9), carrier) as (near, far):
        near.settimeout(0.1)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 200 * MB:
                sent += near.send(bytes(1 << 16))
        assert receive(far, sent) == bytes(sent)


@CARRIERS
def test_close_waits_for_what_is_on_its_way(carrier: str) -> None:
    with link(LinkConditions(latency_s=0.02, bits_per_s=100e6), carrier) as (near, far):
        near.sendall(bytes(30_000))
        near.close()
        # All of it is in the far socket's buffer now, and the end behind it.
        far.setblocking(False)
        found = b""
        while data := far.recv(1 << 20):
            found += data
        assert found == bytes(30_000)
        assert near.fileno() == -1
        near.close()


@CARRIERS
def test_the_far_side_closing_ends_the_stream_after_what_it_sent(carrier: str) -> None:
    with link(LinkConditions(latency_s=0.02), carrier) as (near, far):
        far.sendall(b"last words")
        far.close()
        assert receive(near, 10) == b"last words"
        assert near.recv(1) == b""


@CARRIERS
def test_half_closed_either_way_the_other_direction_goes_on(carrier: str) -> None:
    for first in (0, 1):
        with link(LinkConditions(latency_s=0.005), carrier) as pair:
            one, other = pair[first], pair[1 - first]
            one.sendall(b"question")
            one.shutdown(socket.SHUT_WR)
            assert receive(other, 8) == b"question"
            assert other.recv(1) == b""
            other.sendall(b"answer")
            assert receive(one, 6) == b"answer"
            other.shutdown(socket.SHUT_WR)
            assert one.recv(1) == b""


@CARRIERS
def test_whoever_sends_to_a_closed_end_learns_of_it(carrier: str) -> None:
    for closed in (0, 1):
        with link(LinkConditions(latency_s=0.002), carrier) as pair:
            pair[closed].close()
            with pytest.raises(OSError) as caught:
                for _ in range(100_000):
                    pair[1 - closed].sendall(bytes(1000))
            assert isinstance(caught.value, ConnectionError)


def test_closed_while_the_peer_sends_it_leaves_no_thread() -> None:
    with link(LinkConditions(latency_s=0.05)) as (near, far):
        far.sendall(bytes(MB))
        near.shutdown(socket.SHUT_RDWR)
        near.close()
        assert_no_threads()


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.testing.impaired_links._LATENESS_S", 0.05)
    with link(LinkConditions()) as (near, far):
        near.settimeout(0.05)
        with pytest.raises(TimeoutError):
            near.sendall(bytes(200 * MB))
        near.close()
        assert pumps(), "it still holds what the receiver has not read"
        far.close()
        assert_no_threads()


def test_many_links_leave_nothing_behind() -> None:
    before = open_descriptors()
    for _ in range(20):
        with link(LinkConditions(latency_s=0.001)) as (near, far):
            near.sendall(b"x")
            assert receive(far, 1) == b"x"
    assert_no_threads()
    assert open_descriptors() == before


def test_a_connection_over_it_is_remote_and_its_last_frame_arrives() -> None:
    handler = Echo()
    with running(handler) as hub:
        conditions = LinkConditions(latency_s=0.005)
        connection = connect(hub.listener.address, SECRET, peer="server:0", conditions=conditions)
        assert not connection.local
        connection.sock.settimeout(PATIENCE_S)
        connection.send(Kind.HELLO, {"role": "worker", "rank": 3})
        start = time.monotonic()
        assert echoes(connection)
        assert time.monotonic() - start >= 0.01
        frames: list[Kind] = []
        handler.on_frame = lambda _, frame: frames.append(frame.kind)  # type: ignore[method-assign]
        connection.send(Kind.BYE)
        connection.close()
        until(hub, lambda: bool(handler.ends))
        assert frames == [Kind.BYE]
        assert handler.ends == [("worker:3", "worker:3 closed the link")]
    assert_no_threads()
