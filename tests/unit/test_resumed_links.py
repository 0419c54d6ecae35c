"""Links that go on over another socket: each frame comes once and in order, whatever is done to it."""

import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm import Connection, Kind
from paceline.comm.faults import OF_FRAMES
from paceline.comm.handshake import Keys
from paceline.exceptions import LinkError


def pair() -> tuple[Connection, Connection]:
    a, b = socket.socketpair()
    return Connection(a, Keys(b"k" * 32, b"o" * 32)), Connection(b, Keys(b"o" * 32, b"k" * 32))


@given(st.lists(st.sampled_from(["", *OF_FRAMES]), max_size=12))
def test_each_frame_comes_once_and_in_order_however_often_the_link_breaks(damages):
    """A client that asks, and a server that answers, each frame damaged in some way."""

    client, server = pair()
    client.keep()
    server.keep()
    heard = []

    def mend():
        new_client, new_server = pair()
        received = server.received
        server.go_on(new_server, client.received)
        client.go_on(new_client, received)

    def passes(sender, receiver):
        """Receive what was sent, over as many sockets as it takes."""
        while True:
            if not receiver.wait(0):
                mend()  # nothing came, or nothing will
                continue
            try:
                return receiver.receive()
            except LinkError:
                mend()

    for number, damage in enumerate(damages):
        payload = bytes([number]) * 100
        client.damage_next(damage)
        with contextlib.suppress(LinkError):
            client.send(Kind.PUSH, {"number": number}, [memoryview(payload)])
        while True:
            frame = passes(client, server)
            try:
                assert server.read_blob(frame, 1000) == payload
                break
            except LinkError:
                mend()
        heard.append(frame.body["number"])
        server.damage_next(damage)
        with contextlib.suppress(LinkError):
            server.send(Kind.ADMIT, {"number": number})
        assert passes(server, client).body["number"] == number
    assert heard == [*range(len(damages))]
    client.close()
    server.close()


def test_a_pull_that_was_lost_and_answered_all_the_same_is_sent_again():
    """A server answers a pull when the lead says so, which may come sooner than the pull."""
    client, server = pair()
    client.keep()
    server.keep()
    client.damage_next("drop")
    client.send(Kind.PULL, {"n": 1})
    server.send(Kind.ADMIT, {"n": 1})
    assert client.receive().body == {"n": 1}
    client.send(Kind.PUSH, {"n": 2})
    with pytest.raises(LinkError, match="replayed or lost"):
        server.receive()
    new_client, new_server = pair()
    received = server.received
    server.go_on(new_server, client.received)
    client.go_on(new_client, received)
    assert [server.receive().body["n"] for _ in range(2)] == [1, 2]
    server.send(Kind.ADMIT, {"n": 2})
    client.receive()
    assert client.num_kept == 0
    client.close()
    server.close()


def test_what_was_not_kept_cannot_be_sent_again():
    one, two = pair()
    one.keep()
    two.keep()
    one.send(Kind.TAKE, {"a": 1})
    two.receive()
    two.send(Kind.GRANT, {"b": 1})
    one.receive()
    third, fourth = pair()
    with pytest.raises(LinkError, match="lacks frames that are gone"):
        one.go_on(third, 0)
    for each in (one, two, third, fourth):
        each.close()
