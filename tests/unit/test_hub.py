"""The hub: many connections in one thread, none of which can stop it."""

import threading

import pytest

from paceline.comm import Connection, Frame, Hub, Kind, Listener, connect
from paceline.exceptions import LayoutMismatch, LinkError
from tests.links import SECRET, Echo, client, echoes, linked, running, until


def test_frames_go_to_the_handler_and_ends_are_reported() -> None:
    handler = Echo()
    with running(handler) as hub:
        with client(hub, rank=3) as a, client(hub, rank=4, link="tcp") as b:
            assert echoes(a, "one") and echoes(b, "two")
            assert sorted(handler.hellos) == ["worker:3", "worker:4"]
        until(hub, lambda: len(handler.ends) == 2)
    assert sorted(handler.ends) == [
        ("worker:3", "worker:3 closed the link"),
        ("worker:4", "worker:4 closed the link"),
    ]


def test_what_the_handler_refuses_is_sent_back_and_ends_the_connection() -> None:
    class Strict(Echo):
        def on_frame(self, connection: Connection, frame: Frame) -> None:
            raise LayoutMismatch("another model")

    handler = Strict()
    with running(handler) as hub, client(hub) as a:
        a.send(Kind.TAKE)
        answer = a.receive()
        assert answer.kind is Kind.ERROR
        assert answer.body == {"error": "LayoutMismatch", "message": "another model"}
        with pytest.raises(LinkError):
            a.receive()
    assert handler.ends == [("worker:0", "another model")]


def test_a_link_that_breaks_under_an_answer_and_can_go_on_is_not_refused() -> None:
    class Answering(Echo):
        def on_frame(self, connection: Connection, frame: Frame) -> None:
            a.close()
            connection.send(Kind.STATE, {"number": frame.body["number"]})

    handler = Answering()
    hub = Hub(handler, Listener(tcp=False), SECRET, patience_s=5)
    with linked() as (a, there), linked() as (again, there_again):
        there.keep()
        handler.connections.append(there)
        hub.add(there)
        a.send(Kind.TAKE, {"number": 1})
        hub.poll(5)
        assert len(handler.ends) == 1
        there.go_on(there_again, 0)
        assert again.receive().kind is Kind.STATE
        assert not again.wait(0)  # in particular no ERROR
    hub.close()


def test_a_hello_that_is_refused_is_answered() -> None:
    class Strict(Echo):
        def on_hello(self, connection: Connection, body: dict[str, object]) -> None:
            super().on_hello(connection, body)
            raise LayoutMismatch("not you")

    with running(Strict()) as hub, client(hub) as a:
        assert a.receive().body["message"] == "not you"


def test_a_payload_that_the_handler_leaves_unread_ends_the_connection_only() -> None:
    class Careless(Echo):
        def on_frame(self, connection: Connection, frame: Frame) -> None:
            if frame.kind is Kind.STATE:
                super().on_frame(connection, frame)

    handler = Careless()
    with running(handler) as hub, client(hub, rank=1) as a, client(hub, rank=2) as b:
        a.send(Kind.SAVED, {}, [memoryview(b"unexpected")])
        assert a.receive().body["error"] == "FrameError"
        assert echoes(b)
    assert any("a payload of 10 bytes from worker:1 nobody expected" in e[1] for e in handler.ends)


def test_a_connection_ended_while_another_is_served_is_not_read_again() -> None:
    """Both are ready in one round; the first one's handler ends the second."""

    class Rival(Echo):
        def on_frame(self, connection: Connection, frame: Frame) -> None:
            for other in list(self.connections):
                if other is not connection:
                    self.hub.end(other, "replaced")

    handler = Rival()
    with linked() as (a, hub_a), linked() as (b, hub_b):
        hub = Hub(handler, Listener(tcp=False), SECRET, patience_s=5)
        handler.hub = hub
        handler.connections = [hub_a, hub_b]
        for connection in (hub_a, hub_b):
            hub.add(connection)
        a.send(Kind.TAKE)
        b.send(Kind.TAKE)
        hub.poll(5)
        assert [reason for _, reason in handler.ends] == ["replaced"]
        assert len(handler.connections) == 1
        hub.close()


def test_a_released_connection_is_somebody_elses_to_read() -> None:
    class Releasing(Echo):
        def on_frame(self, connection: Connection, frame: Frame) -> None:
            for each in self.connections:
                self.hub.release(each)

    handler = Releasing()
    with linked() as (a, hub_a), linked() as (b, hub_b):
        hub = Hub(handler, Listener(tcp=False), SECRET, patience_s=5)
        handler.hub = hub
        handler.connections = [hub_a, hub_b]
        for connection in (hub_a, hub_b):
            hub.add(connection)
        a.send(Kind.TAKE, {"from": "a"})
        b.send(Kind.TAKE, {"from": "b"})
        hub.poll(5)
        unread = [c for c in (hub_a, hub_b) if c.received == 0]
        assert len(unread) == 1
        assert unread[0].receive().kind is Kind.TAKE
        hub.poll(0)
        assert handler.ends == []
        hub.close()


def test_connections_served_have_the_hubs_patience() -> None:
    with linked() as (_, b):
        hub = Hub(Echo(), Listener(tcp=False), SECRET, patience_s=7)
        b.sock.settimeout(None)
        hub.add(b)
        assert b.sock.gettimeout() == 7
        hub.close()


def test_a_peer_that_stops_inside_a_frame_is_dropped_and_the_others_served() -> None:
    handler = Echo()
    with running(handler, patience_s=0.05) as hub, client(hub, rank=1) as a:
        with client(hub, rank=2) as b:
            assert echoes(a) and echoes(b)
            b.sock.sendall(b"PL\x09")
            with pytest.raises(LinkError):
                b.receive()
        assert echoes(a)
    assert ("worker:2", "worker:2 stopped in the middle of a frame") in handler.ends


def test_posting_never_blocks_however_far_behind_the_hub_is() -> None:
    hub = Hub(Echo(), Listener(tcp=False), SECRET, patience_s=5)
    calls: list[int] = []
    count = 20_000

    def post_all() -> None:
        for i in range(count):
            hub.post(lambda i=i: calls.append(i))  # type: ignore[misc]

    poster = threading.Thread(target=post_all, daemon=True)
    poster.start()
    poster.join(10)
    assert not poster.is_alive(), "post waits for the hub"
    while len(calls) < count:
        hub.poll(0)
    assert calls == list(range(count))
    hub.close()
    hub.post(lambda: calls.append(-1))  # nobody will call, and nothing happens


def test_a_newcomer_that_left_before_it_was_accepted_does_not_block_the_hub() -> None:
    hub = Hub(Echo(), Listener(), SECRET, patience_s=5)
    for sock in hub.listener.sockets:
        assert sock.gettimeout() == 0
        hub.accept(sock)  # announced, but gone
    hub.close()


def test_who_connects_after_the_hub_closed_is_told() -> None:
    with running(Echo()) as hub:
        address = hub.listener.address
    with pytest.raises(LinkError, match="cannot connect to server:0"):
        connect(address, SECRET, peer="server:0")
