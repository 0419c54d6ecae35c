"""Two ends of a link, and a hub that runs: for tests of what travels over them."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.comm import Connection, Frame, Hub, Kind, Listener, connect
from paceline.comm.handshake import Keys

KEYS = Keys(send=b"s" * 32, receive=b"r" * 32)
SECRET = b"the secret of a test run, 32 byt"
PATIENCE_S = 5.0
"""Long enough for a busy machine; only a failing test waits for it."""


def sockets(carrier: str) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets: "unix" or "tcp"."""
    if carrier == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mine = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    return mine, theirs


@contextmanager
def linked(carrier: str = "unix") -> Iterator[tuple[Connection, Connection]]:
    """Two ends of one authenticated link. The first calls its peer "server:0"."""
    near, far = sockets(carrier)
    a, b = Connection(near, KEYS), Connection(far, Keys(send=KEYS.receive, receive=KEYS.send))
    a.peer, b.peer = "server:0", "worker:1"
    for connection in (a, b):
        connection.sock.settimeout(PATIENCE_S)
    try:
        yield a, b
    finally:
        a.close()
        b.close()


class Echo:
    """A handler that sends every frame back and remembers what happened."""

    def __init__(self) -> None:
        self.hub: Hub
        self.hellos: list[str] = []
        self.ends: list[tuple[str, str]] = []
        self.strangers: list[str] = []
        self.connections: list[Connection] = []

    def on_hello(self, connection: Connection, body: dict[str, Any]) -> None:
        self.hellos.append(connection.peer)
        self.connections.append(connection)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        for fd in frame.descriptors:
            os.close(fd)
        blob = connection.read_blob(frame, 1 << 20) if frame.payload_bytes else b""
        connection.send(frame.kind, frame.body, [memoryview(blob)] if blob else ())

    def on_end(self, connection: Connection, reason: str) -> None:
        self.ends.append((connection.peer, reason))
        self.connections.remove(connection)

    def on_stranger(self, reason: str) -> None:
        self.strangers.append(reason)


@contextmanager
def running(
    handler: Echo, *, tcp: bool = True, patience_s: float = PATIENCE_S, secret: bytes = SECRET
) -> Iterator[Hub]:
    """A hub that serves `handler` in a thread of its own until the end of the block."""
    hub = Hub(handler, Listener(tcp=tcp), secret, patience_s=patience_s)
    handler.hub = hub
    going = True
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            while going:
                hub.poll(PATIENCE_S)
        except BaseException as error:
            failures.append(error)

    def stop() -> None:
        nonlocal going
        going = False

    thread = threading.Thread(target=serve, name="hub")
    thread.start()
    try:
        yield hub
    finally:
        hub.post(stop)
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive(), "the hub hangs"
        for connection in handler.connections:
            connection.close()
        hub.close()
        assert not failures, f"the hub crashed: {failures[0]!r}"


@contextmanager
def client(hub: Hub, *, rank: int = 0, link: str = "auto", secret: bytes = SECRET) -> Iterator[Connection]:
    """A worker that has said hello to a hub."""
    connection = connect(hub.listener.address, secret, peer="server:0", link=link)
    connection.sock.settimeout(PATIENCE_S)
    try:
        connection.send(Kind.HELLO, {"role": "worker", "rank": rank})
        yield connection
    finally:
        connection.close()


def echoes(connection: Connection, text: str = "hello") -> bool:
    """Whether the hub at the other end still answers."""
    connection.send(Kind.STATE, {"text": text}, [memoryview(text.encode())])
    frame = connection.receive()
    return frame.body == {"text": text} and connection.read_blob(frame, 1 << 20) == text.encode()


def open_descriptors() -> int:
    """How many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def until(hub: Hub, condition: Callable[[], bool]) -> None:
    """Wait until something is true in the hub's thread, looking after everything it did."""
    deadline = time.monotonic() + 10
    while True:
        seen: list[bool] = []
        looked = threading.Event()

        def look(seen: list[bool] = seen, looked: threading.Event = looked) -> None:
            seen.append(condition())
            looked.set()

        hub.post(look)
        assert looked.wait(10), "the hub hangs"
        if seen[0]:
            return
        assert time.monotonic() < deadline, "it never came true"
        looked.clear()
        looked.wait(0.005)
