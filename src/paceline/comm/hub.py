"""One thread that serves many connections: accepts, authenticates, reads frames, calls back.

Newcomers are authenticated in a thread of their own, so that a stranger holds up no other connection. Other
threads hand work to the hub's thread with `post`. Servers and the controller are built on it.
"""

import collections
import contextlib
import errno
import queue
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from paceline.comm.clocks import answer_clock
from paceline.comm.connection import Connection, Frame
from paceline.comm.errors import error_body
from paceline.comm.frames import Body, Kind, field
from paceline.comm.meeting import Listener, accept
from paceline.comm.tls import Secret, SecureSocket
from paceline.exceptions import AuthError, FrameError, LinkError, PacelineError

__all__ = ["Hub", "HubHandler"]

_MAX_NEWCOMERS = 64
"""Connections of one kind that may be authenticating at once; more are closed at once. Strangers come by
TCP, so they cannot keep out roles of this host."""


_EVERYWHERE = ("", "0.0.0.0", "::")


class HubHandler(Protocol):
    """What a hub calls, always in its own thread."""

    def on_hello(self, connection: Connection, body: Body) -> None:
        """An authenticated newcomer said who it is; `connection.peer` is set."""

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """A frame came. A PacelineError raised here is sent back and ends the connection."""

    def on_end(self, connection: Connection, reason: str) -> None:
        """A connection is over and closed."""

    def on_stranger(self, reason: str) -> None:
        """A newcomer was turned away."""


class Hub:
    """Serves connections for a handler.

    Args:
        patience_s: a peer may pause this long in the middle of a frame, or not read what we send.
        clock_ns: from this host's monotonic clock to the run's time, for newcomers that ask.

    Raises:
        LinkError: the listener is open to every network, and the run has no TLS.
    """

    def __init__(
        self, handler: HubHandler, listener: Listener, secret: bytes, *, patience_s: float, clock_ns: int = 0
    ) -> None:
        if listener.address.host in _EVERYWHERE and Secret.certificate_of(secret) is None:
            listener.close()
            raise LinkError(
                f"listening on {listener.address.host} is listening on every network of this host, which "
                "needs --tls; or name the one interface to listen on"
            )
        self.listener = listener
        self.handler = handler
        """Another one may take its place."""
        self._secret = secret
        self._patience_s = patience_s
        self._clock_ns = clock_ns
        self._newcomers: collections.Counter[int] = collections.Counter()
        self.spin_s = 0.0
        self._busy = False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker, self._wakened = socket.socketpair()
        # One wake-up in the pipe is enough: `post` must not block when it is full.
        self._waker.setblocking(False)
        self._served: set[Connection] = set()
        self._secure: set[Connection] = set()
        """Those of them that read ahead."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakened, selectors.EVENT_READ)
        for sock in listener.sockets:
            self._selector.register(sock, selectors.EVENT_READ)
        self._ready = select.poll()
        """Says whether the selector has something: in a third of the time it takes to ask what."""
        self._ready.register(self._selector)

    def poll(self, timeout_s: float) -> None:
        """Wait for something to happen, at most this long, and serve it.

        Raises:
            OSError: there are no file descriptors left for a connection that waits.
        """
        ready = self._waiting() or self._look() or self._selector.select(timeout_s)
        self._busy = bool(ready)
        for key, _ in ready:
            if isinstance(key.fileobj, Connection):
                # What was served before it in this round may have ended or released it.
                if key.fileobj in self._served:
                    self._receive(key.fileobj)
            elif key.fileobj is self._wakened:
                self._wakened.recv(4096)
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._calls.get_nowait()()
            else:
                assert isinstance(key.fileobj, socket.socket)
                self.accept(key.fileobj)

    def _waiting(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Connections with something to read that the selector does not see, and whatever it sees."""
        if not (found := [each for each in self._secure if each.waiting]):
            return []
        ready = self._selector.select(0)
        seen = {key.fileobj for key, _ in ready}
        keys = (self._selector.get_key(each) for each in found if each not in seen)
        return [*ready, *((key, selectors.EVENT_READ) for key in keys)]

    def _look(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Right after serving something, look for more without sleeping, for `spin_s`."""
        end = time.perf_counter() + self.spin_s if self._busy and self.spin_s else 0.0
        look = self._ready.poll
        while time.perf_counter() < end:
            if look(0) and (ready := self._selector.select(0)):
                return ready
        return []

    def post(self, call: Callable[[], None]) -> None:
        """Have the hub's thread call something soon. From any thread."""
        self._calls.put(call)
        with contextlib.suppress(OSError):  # woken already, or closed: then it is never called
            self._waker.send(b".")

    def add(self, connection: Connection) -> None:
        """Serve a connection that this side opened, or took out with `release`."""
        connection.sock.settimeout(self._patience_s)
        self._selector.register(connection, selectors.EVENT_READ)
        self._served.add(connection)
        if isinstance(connection.sock, SecureSocket):
            self._secure.add(connection)

    def release(self, connection: Connection) -> None:
        """Stop reading a connection; it stays open."""
        self._served.discard(connection)
        self._secure.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def handle(self, connection: Connection, frame: Frame) -> None:
        """Give a frame to the handler; what it refuses is sent back and ends the connection."""
        try:
            self.handler.on_frame(connection, frame)
        except PacelineError as error:
            broke = type(error) is LinkError  # while the handler answered
            if not (broke and connection.keeps):  # it goes on over another socket, where it would be told
                refuse(connection, error)
            self.end(connection, str(error))

    def end(self, connection: Connection, reason: str) -> None:
        """Close a connection and tell the handler."""
        self.release(connection)
        connection.close()
        self.handler.on_end(connection, reason)

    def close(self) -> None:
        """Stop listening. Connections are the handler's to close."""
        self._selector.close()
        self.listener.close()
        self._waker.close()
        self._wakened.close()

    def _receive(self, connection: Connection) -> None:
        try:
            frame = connection.receive()
        except TimeoutError:
            return
        except FrameError as error:
            if not connection.keeps:  # else it comes again over another socket
                refuse(connection, error)
            self.end(connection, f"refused what it sent: {error}")
        except LinkError as error:
            self.end(connection, str(error))
        else:
            self.handle(connection, frame)

    def accept(self, listening: socket.socket) -> None:
        """Accept a connection that is announced, if it is still there, and authenticate it in a thread.

        Raises:
            OSError: there are no file descriptors left.
        """
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # it would wait there for ever, and we would look again and again
            return  # it went away before we looked
        if self._newcomers[sock.family] >= _MAX_NEWCOMERS:
            sock.close()
            self.handler.on_stranger("too many connections authenticating at once")
            return
        self._newcomers[sock.family] += 1
        threading.Thread(target=self._meet, args=(sock,), name="newcomer", daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        connection, family = None, sock.family
        try:
            connection = accept(sock, self._secret)
            connection.sock.settimeout(self._patience_s)
            hello = answer_clock(connection, self._clock_ns)
            if hello.kind is not Kind.HELLO:
                raise FrameError(f"{hello.kind.name} instead of HELLO")
            role, rank = field(hello.body, "role", str), field(hello.body, "rank", int)
            connection.check_role(role)
            connection.peer = f"{role}:{rank}"
        except (LinkError, TimeoutError) as error:
            reason = str(error)
            if connection is not None and isinstance(error, AuthError):
                refuse(connection, error)  # it knows the secret: it may know why
            self.post(lambda: self._turn_away(family, reason))
            if connection is not None:
                connection.close()
        else:
            newcomer = connection
            self.post(lambda: self._welcome(newcomer, hello.body))

    def _turn_away(self, family: int, reason: str) -> None:
        self._newcomers[family] -= 1
        self.handler.on_stranger(reason)

    def _welcome(self, connection: Connection, body: Body) -> None:
        self._newcomers[connection.sock.family] -= 1
        self.add(connection)
        try:
            self.handler.on_hello(connection, body)
        except PacelineError as error:
            refuse(connection, error)
            self.end(connection, str(error))


def refuse(connection: Connection, error: PacelineError) -> None:
    """Tell the other side why, if it still listens."""
    with contextlib.suppress(LinkError):
        connection.send(Kind.ERROR, error_body(error))
