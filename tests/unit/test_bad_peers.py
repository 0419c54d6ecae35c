"""One bad peer of a hub hurts only itself: whatever it sends or leaves unread, the others are served."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from paceline.collective import GroupLinks
from paceline.comm import Address, Connection, Frame, Hub, Kind, Listener, Region, connect
from paceline.comm.frames import HEADER_BYTES, encode
from paceline.exceptions import FrameError, LinkError, PeerBusy
from tests.links import SECRET, Echo, client, echoes, open_descriptors, running, until

PATIENCE_S = 2.0
"""Of the hubs here: long enough to see that nobody waits for it to pass."""


def frame_of(connection: Connection, kind: Kind, payload_bytes: int = 0) -> bytes:
    """The next frame of a connection, as bytes, without its payload."""
    state = connection.socket_state
    body = {"text": "x" * 1000}
    return encode(kind, body, sequence=state.sent, payload_bytes=payload_bytes, key=state.keys.send)


def quick(other: Connection, times: int = 20) -> float:
    """How long the hub took to answer another peer so many times."""
    began = time.monotonic()
    assert all(echoes(other, f"call {n}") for n in range(times))
    return time.monotonic() - began


@pytest.mark.parametrize("link", ["auto", "tcp"])
def test_nobody_waits_for_peers_that_stop_in_the_middle_of_a_message(link: str) -> None:
    handler = Echo()
    with running(handler, patience_s=PATIENCE_S) as hub, client(hub, rank=0) as good:
        with (
            client(hub, rank=1, link=link) as header,
            client(hub, rank=2, link=link) as body,
            client(hub, rank=3, link=link) as payload,
        ):
            header.sock.sendall(frame_of(header, Kind.STATE)[:7])
            body.sock.sendall(frame_of(body, Kind.STATE)[: HEADER_BYTES + 100])
            payload.sock.sendall(frame_of(payload, Kind.STATE, 16 << 20) + bytes(8 << 20))
            assert quick(good) < PATIENCE_S / 2
            assert not handler.ends, "they have its patience"
            for bad in (header, body, payload):
                with pytest.raises(LinkError):
                    bad.receive()
        assert echoes(good)
    ended = {name: reason for name, reason in handler.ends if name != "worker:0"}
    assert ended == {
        f"worker:{rank}": f"worker:{rank} stopped in the middle of a frame" for rank in (1, 2, 3)
    }


def test_a_message_that_comes_byte_by_byte_is_read_like_any_other() -> None:
    handler = Echo()
    with running(handler, patience_s=PATIENCE_S) as hub, client(hub) as slow, client(hub, rank=1) as good:
        data = frame_of(slow, Kind.STATE, 5) + b"after"
        for at in range(0, len(data), 9):
            slow.sock.sendall(data[at : at + 9])
            if not at % 90:
                assert echoes(good)
        frame = slow.receive()
        assert slow.read_blob(frame, 5) == b"after"


@pytest.mark.parametrize("link", ["auto", "tcp"])
def test_nobody_waits_for_a_peer_that_does_not_read_and_what_waits_for_it_is_bounded(link: str) -> None:
    handler = Echo()
    with running(handler, patience_s=PATIENCE_S) as hub, client(hub, rank=1) as good:
        with client(hub, rank=2, link=link) as bad:
            blob = memoryview(bytes(1 << 20))
            with suppress(LinkError):  # it is hung up on while it sends
                for _ in range(40):
                    bad.send(Kind.STATE, {}, [blob])
            assert quick(good) < PATIENCE_S
            until(hub, lambda: len(handler.ends) == 1)
        assert echoes(good)
    ((name, reason),) = [each for each in handler.ends if each[0] == "worker:2"]
    assert name == "worker:2"
    assert "does not read what is sent to it" in reason or "closed the link" in reason or "broke" in reason


def test_a_peer_that_reads_nothing_for_its_patience_is_dropped() -> None:
    handler = Echo()
    with running(handler, patience_s=0.3) as hub, client(hub, rank=1) as good, client(hub, rank=2) as bad:
        bad.send(Kind.STATE, {}, [memoryview(bytes(1 << 20))])  # its answer is more than a socket holds
        until(hub, lambda: len(handler.ends) == 1)
        assert echoes(good)
        assert [name for name, _ in handler.ends] == ["worker:2"]


def test_a_payload_where_none_belongs_takes_no_memory() -> None:
    handler = Echo()
    with running(handler) as hub, client(hub, rank=1) as good:
        for kind, nbytes, text in (
            (Kind.PUSH, 1 << 40, "a PUSH with a payload"),
            (Kind.SAVED, 1 << 43, "more than this host's memory"),
        ):
            with client(hub, rank=2) as bad:
                bad.sock.sendall(frame_of(bad, kind, nbytes))
                answer = bad.receive()
                assert answer.body["error"] == FrameError.__name__
                assert text in answer.body["message"]
        assert echoes(good)


def test_descriptors_that_nobody_wants_are_closed() -> None:
    class Deaf(Echo):
        def on_frame(self, connection: Connection, frame: Frame) -> None:
            if frame.kind is Kind.ATTACH:
                raise FrameError("not you")
            super().on_frame(connection, frame)

    memory = Region.create(4096)
    with running(Deaf()) as hub, client(hub, rank=1) as good:
        assert echoes(good)
        before = open_descriptors()
        for _ in range(30):
            with client(hub, rank=2) as bad, suppress(LinkError):  # it is hung up on at once
                bad.send(Kind.ATTACH, {}, descriptors=[memory.fd])
                assert bad.receive().kind is Kind.ERROR
        assert echoes(good)
        until(hub, lambda: open_descriptors() <= before + 2)
    memory.close()


@pytest.mark.parametrize(
    "hello",
    [
        {"role": "worker", "rank": -5},
        {"role": "worker", "rank": 10**400},
        {"role": "worker", "rank": 1 << 62},
        {"role": "worker:5", "rank": 0},
        {"role": "", "rank": 0},
        {"role": "controller", "rank": 0},
        {"role": ["worker"], "rank": 0},
        {"role": "worker", "rank": 1.0},
    ],
)
def test_a_hello_of_no_role_is_refused(hello: dict[str, object]) -> None:
    handler = Echo()
    with running(handler) as hub, client(hub, rank=1) as good:
        bad = connect(hub.listener.address, SECRET, peer="server:0")
        bad.sock.settimeout(5)
        bad.send(Kind.HELLO, hello)
        with pytest.raises(LinkError):
            bad.receive()
        bad.close()
        until(hub, lambda: len(handler.strangers) == 1)
        assert echoes(good)
    assert handler.hellos == ["worker:1"]


# --- strangers --------------------------------------------------------------------------------------

IDLE = """
import resource, socket, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held = [socket.create_connection((host, port)) for _ in range(count)]
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def idle_connections(address: Address, count: int, user: int | None = None) -> Iterator[None]:
    """Another process, perhaps of another user, holds so many connections to a listener, and is silent."""
    arguments = ["python3", "-c", IDLE, address.host, str(address.port), str(count)]
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") if user else sys.executable
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "user": user, "cwd": "/"}
    with subprocess.Popen(arguments, executable=python, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            yield
        finally:
            process.kill()


def test_strangers_cost_each_other_their_connections_and_roles_come_in() -> None:
    handler = Echo()
    with running(handler) as hub, idle_connections(hub.listener.address, 200):
        for rank in range(5):
            with client(hub, rank=rank, link="tcp") as good:
                assert echoes(good)
        until(hub, lambda: len(handler.strangers) >= 136)
    assert set(handler.strangers[:136]) == {"too many connections authenticating at once"}


def test_a_stream_of_strangers_does_not_keep_a_role_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More newcomers come while it authenticates than there is room for: it is turned away, and redials."""
    monkeypatch.setattr("paceline.comm.hub._MAX_NEWCOMERS", 4)
    handler, going = Echo(), threading.Event()
    with running(handler) as hub:
        address = (hub.listener.address.host, hub.listener.address.port)

        def flood() -> None:
            held: list[socket.socket] = []
            while not going.is_set():
                with suppress(OSError):
                    held.append(socket.create_connection(address, timeout=5))
                while len(held) > 8:
                    held.pop(0).close()
            for sock in held:
                sock.close()

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            until(hub, lambda: len(handler.strangers) > 20)
            for rank in range(3):
                good = connect(hub.listener.address, SECRET, peer="server:0", link="tcp", redial_s=20)
                good.sock.settimeout(5)
                good.send(Kind.HELLO, {"role": "worker", "rank": rank})
                assert echoes(good)
                good.close()
        finally:
            going.set()
            thread.join()


@contextmanager
def crowded(times: int) -> Iterator[tuple[Address, list[float]]]:
    """A listener that hangs up on the first newcomers, then is a hub: its address, and when they came."""
    listener, came = Listener(), []
    handler = Echo()
    hub = Hub(handler, listener, SECRET, patience_s=5)
    handler.hub = hub
    welcome: Callable[[socket.socket], None] = hub.accept

    def accept(listening: socket.socket) -> None:
        came.append(time.monotonic())
        if len(came) > times:
            welcome(listening)
        else:
            listening.accept()[0].close()

    hub.accept = accept  # type: ignore[method-assign]
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            hub.poll(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.address, came
    finally:
        ended.set()
        thread.join()
        for connection in handler.connections:
            connection.close()
        hub.close()


def test_a_role_that_is_turned_away_dials_again_after_longer_and_longer_pauses() -> None:
    with crowded(5) as (address, came):
        connection = connect(address, SECRET, peer="server:0", link="tcp", redial_s=20)
        connection.close()
        assert len(came) == 6
        assert came[5] - came[4] > came[1] - came[0]
        assert came[5] - came[4] >= 0.02 * 2**4 / 2 * 0.9  # the last pause, shortened by half at most


def test_a_role_that_is_always_turned_away_says_how_often_it_tried() -> None:
    with crowded(1000) as (address, _):
        with pytest.raises(PeerBusy, match=r"server:0: .* Dialled \d+ times in 0.3 s"):
            connect(address, SECRET, peer="server:0", link="tcp", redial_s=0.3)
        with pytest.raises(PeerBusy) as once:
            connect(address, SECRET, peer="server:0", link="tcp")
        assert "Dialled" not in str(once.value)


def test_no_file_descriptors_left_costs_a_stranger_its_connection_and_no_role() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    handler = Echo()
    with running(handler) as hub, client(hub, rank=1) as good:
        assert echoes(good)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 12, hard))
        try:
            with idle_connections(hub.listener.address, 80):
                # Strangers have taken all that were left; the hub closes one of theirs for a newcomer.
                until(hub, lambda: len(handler.strangers) >= 40)
                began = os.times()
                assert quick(good) < 2
                assert os.times().user - began.user < 2
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all("too many connections" in each or "closed" in each for each in handler.strangers[:40])


def test_strangers_do_not_keep_the_members_of_a_group_apart() -> None:
    """Its root listens, too: silent strangers are there before the members come."""
    settings: Any = {"ranks": (0, 1, 2), "secret": SECRET, "link": "tcp", "deadline_s": 4.0}
    root = GroupLinks(rank=0, **settings)
    address = root.address
    assert address is not None
    found: dict[int, dict[int, Connection]] = {}

    def meet(member: GroupLinks) -> None:
        found[member.rank] = member.meet(address)

    with idle_connections(Address.from_json(address), 80):
        threads = [
            threading.Thread(target=meet, args=(each,))
            for each in (root, *(GroupLinks(rank=rank, **settings) for rank in (1, 2)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert found[0].keys() == {1, 2} and found[1].keys() == found[2].keys() == {0}
    for links in found.values():
        for each in links.values():
            each.close()
