"""One thread that serves many connections: accepts, authenticates, reads frames, calls back.

No peer can hold it up. Newcomers are authenticated in a thread of their own. A frame is read as it comes, and
handled when it is whole; what a peer does not read waits aside. Each has its own deadline, after which that
connection ends, and no other. Other threads hand work to the hub's thread with `post`. Servers and the
controller are built on it.
"""

import contextlib
import errno
import os
import queue
import resource
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
from paceline.comm.meeting import HANDSHAKE_S, Listener, accept
from paceline.comm.newcomers import Newcomers
from paceline.comm.tls import Secret, SecureSocket
from paceline.exceptions import AuthError, FrameError, LinkError, PacelineError

__all__ = ["Hub", "HubHandler"]

_MAX_NEWCOMERS = 64
"""Connections of one kind that may be authenticating at once. Strangers come by TCP, so they cannot keep out
roles of this host."""
_MOST_WAITING_BYTES = 8 << 20
"""Maximum number of bytes that wait for a peer to read them, beside one frame of any size. Servers may lag
behind each other for a while, as long as the deadline lets them."""
_EVERYWHERE = ("", "0.0.0.0", "::")
_ROLES = ("server", "worker")
_MOST_ROLES = 1 << 20
"""Ranks are below this."""
_ROOM_S = 0.002
"""How long the thread of a connection that was ended to make room has to close it."""


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
        most = min(_MAX_NEWCOMERS, max(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
        self._newcomers = {sock.family: Newcomers(most) for sock in listener.sockets}
        self.spin_s = 0.0
        self._busy = False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker, self._wakened = socket.socketpair()
        # One wake-up in the pipe is enough: `post` must not block when it is full.
        self._waker.setblocking(False)
        self._served: set[Connection] = set()
        self._secure: set[Connection] = set()
        """Those of them that read ahead."""
        self._begun: dict[Connection, float] = {}
        """Connections in the middle of a frame, and until when more of it must come."""
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
        if self._begun:
            timeout_s = min(timeout_s, self._end_late())
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
        connection.send_aside(None if connection.peer.startswith("server:") else _MOST_WAITING_BYTES)
        self._selector.register(connection, selectors.EVENT_READ)
        self._served.add(connection)
        if isinstance(connection.sock, SecureSocket):
            self._secure.add(connection)

    def release(self, connection: Connection) -> None:
        """Stop reading a connection; it stays open."""
        self._served.discard(connection)
        self._secure.discard(connection)
        self._begun.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def handle(self, connection: Connection, frame: Frame) -> None:
        """Give a frame to the handler; what it refuses is sent back and ends the connection. Descriptors that
        the handler does not take out of the frame are closed."""
        try:
            self.handler.on_frame(connection, frame)
        except PacelineError as error:
            broke = type(error) is LinkError  # while the handler answered
            if not (broke and connection.keeps):  # it goes on over another socket, where it would be told
                refuse(connection, error)
            self.end(connection, str(error))
        finally:
            while frame.descriptors:
                os.close(frame.descriptors.pop())

    def end(self, connection: Connection, reason: str) -> None:
        """Close a connection and tell the handler."""
        self.release(connection)
        connection.close(linger=False)
        self.handler.on_end(connection, reason)

    def close(self) -> None:
        """Stop listening. Connections are the handler's to close."""
        self._selector.close()
        self.listener.close()
        self._waker.close()
        self._wakened.close()

    def _receive(self, connection: Connection) -> None:
        try:
            frame = connection.receive_now()
        except FrameError as error:
            if not connection.keeps:  # else it comes again over another socket
                refuse(connection, error)
            self.end(connection, f"refused what it sent: {error}")
        except LinkError as error:
            self.end(connection, str(error))
        else:
            if frame is not None:
                if self._begun:
                    self._begun.pop(connection, None)
                self.handle(connection, frame)
                if connection.unread and connection in self._served:
                    left = f"a payload of {connection.unread:,} bytes from {connection.peer} nobody expected"
                    refuse(connection, FrameError(left))
                    self.end(connection, f"refused what it sent: {left}")
            elif connection.begun:
                self._begun[connection] = time.monotonic() + self._patience_s

    def _end_late(self) -> float:
        """End connections that have stopped in the middle of a frame. Returns the seconds until the next."""
        now = time.monotonic()
        for connection, until in list(self._begun.items()):
            if until <= now:
                self.end(connection, f"{connection.peer} stopped in the middle of a frame")
        return max(0.0, min(self._begun.values(), default=now + self._patience_s) - now)

    def accept(self, listening: socket.socket) -> None:
        """Accept a connection that is announced, if it is still there, and authenticate it in a thread.

        Raises:
            OSError: there are no file descriptors left, and no stranger who could give one back.
        """
        newcomers = self._newcomers[listening.family]
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return  # it went away before we looked
            if not any(each.make_room() for each in self._newcomers.values()):
                raise  # it would wait there for ever, and we would look again and again
            time.sleep(_ROOM_S)  # the thread of the one that was ended closes it
            return
        newcomers.add(sock, _address_of(sock))
        try:
            threading.Thread(target=self._meet, args=(sock,), name="newcomer", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            newcomers.done(sock)
            sock.close()
            self.handler.on_stranger(f"no thread to authenticate it in: {error}")

    def _meet(self, sock: socket.socket) -> None:
        connection, newcomers = None, self._newcomers[sock.family]
        try:
            connection = accept(sock, self._secret)
            newcomers.done(sock)
            connection.sock.settimeout(HANDSHAKE_S)
            hello = answer_clock(connection, self._clock_ns)
            if hello.kind is not Kind.HELLO:
                raise FrameError(f"{hello.kind.name} instead of HELLO")
            connection.peer = _name_of(connection, hello)
        except (LinkError, TimeoutError) as error:
            ended = newcomers.done(sock)
            reason = "too many connections authenticating at once" if ended else str(error)
            if connection is not None and isinstance(error, AuthError):
                refuse(connection, error)  # it knows the secret: it may know why
            self.post(lambda: self.handler.on_stranger(reason))
            if connection is not None:
                connection.close()
        else:
            newcomer = connection
            self.post(lambda: self._welcome(newcomer, hello.body))

    def _welcome(self, connection: Connection, body: Body) -> None:
        self.add(connection)
        try:
            self.handler.on_hello(connection, body)
        except PacelineError as error:
            refuse(connection, error)
            self.end(connection, str(error))


def _address_of(sock: socket.socket) -> str:
    """The host at the other end; one for all of them on a unix socket."""
    try:
        peer = sock.getpeername()
    except OSError:
        return ""
    return str(peer[0]) if isinstance(peer, tuple) else ""


def _name_of(connection: Connection, hello: Frame) -> str:
    """The name of the role that says hello. Raises AuthError or FrameError if it cannot be that."""
    role, rank = field(hello.body, "role", str), field(hello.body, "rank", int)
    if role not in _ROLES or not 0 <= rank < _MOST_ROLES:
        raise FrameError(f"{role[:40]}:{rank} is no role of a run")
    connection.check_role(role)
    return f"{role}:{rank}"


def refuse(connection: Connection, error: PacelineError) -> None:
    """Tell the other side why, if it still listens."""
    with contextlib.suppress(LinkError):
        connection.send(Kind.ERROR, error_body(error))
