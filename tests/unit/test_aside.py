"""Links whose senders do not wait for the other side to read."""

import threading

import pytest

from paceline.comm import Kind
from paceline.exceptions import LinkError
from tests.links import linked

BIG = bytes(range(256)) * (32 << 10)  # 8 MB: more than sockets hold


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "writes aside"]


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_two_sides_can_send_more_than_sockets_hold_before_either_reads(carrier: str) -> None:
    with linked(carrier) as (a, b):
        for near in (a, b):
            near.send_aside()
        for number in range(3):
            for near in (a, b):
                near.send(Kind.STATE, {"number": number}, [memoryview(BIG)])
                near.send(Kind.ORDER, {"number": number})
        for near in (a, b):
            for number in range(3):
                frame = near.receive()
                assert (frame.kind, frame.body) == (Kind.STATE, {"number": number})
                assert near.read_blob(frame, len(BIG)) == BIG
                frame = near.receive()
                assert (frame.kind, frame.body) == (Kind.ORDER, {"number": number})
    assert threads() == []


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_what_is_small_needs_no_thread(carrier: str) -> None:
    with linked(carrier) as (a, b):
        a.send_aside()
        for number in range(20):
            a.send(Kind.ORDER, {"number": number})
        assert [b.receive().body["number"] for _ in range(20)] == [*range(20)]
        assert threads() == []


def test_very_many_small_ones_are_read_later_in_their_order() -> None:
    with linked() as (a, b):
        a.send_aside()
        for number in range(5000):
            a.send(Kind.ORDER, {"number": number})
        assert threads() == ["writes aside"]
        assert [b.receive().body["number"] for _ in range(5000)] == [*range(5000)]


def test_an_end_waits_a_moment_for_what_is_to_be_written_and_no_longer() -> None:
    with linked() as (a, b):
        a.send_aside()
        a.send(Kind.STATE, {}, [memoryview(BIG)])
        a.close()
        assert threads() == []
        frame = b.receive()
        with pytest.raises(LinkError, match="in the middle"):
            b.read_blob(frame, len(BIG))


def test_a_link_that_broke_says_so_to_who_sends_next_and_to_who_reads() -> None:
    with linked() as (a, b):
        a.send_aside()
        a.send(Kind.STATE, {}, [memoryview(BIG)])
        b.close()
        with pytest.raises(LinkError):
            a.receive()
        with pytest.raises(LinkError, match="broke"):
            while True:  # until the thread has met the end
                a.send(Kind.ORDER)
