"""Entrance: members of a group come in, while strangers at the same port hold up nobody."""

import contextlib
import queue
import select
import socket
import threading
import time

from paceline.comm import Connection, Listener
from paceline.comm.frames import field
from paceline.comm.meeting import HANDSHAKE_S, accept
from paceline.comm.newcomers import Newcomers
from paceline.exceptions import FrameError, LinkError

__all__ = ["Entrance"]

_MOST_NEWCOMERS = 64


class Entrance:
    """Authenticates newcomers of a listener, each in a thread of its own. One thread uses it."""

    def __init__(self, listener: Listener, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._newcomers = Newcomers(_MOST_NEWCOMERS)
        self._met: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        self._waker, self._wakened = socket.socketpair()

    def next(self, until: float) -> tuple[int, Connection] | None:
        """The next worker that has come, and its rank; None: none has until then, by the monotonic clock."""
        sockets = [*self._listener.sockets, self._wakened]
        while True:
            ready, _, _ = select.select(sockets, [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            for sock in ready:
                if sock is not self._wakened:
                    self._let_in(sock)
            if self._wakened in ready:
                self._wakened.recv(1)
                return self._met.get()

    def close(self) -> None:
        """Let in nobody any more."""
        while self._newcomers.make_room():
            pass
        self._waker.close()
        self._wakened.close()
        while not self._met.empty():
            self._met.get()[1].close()

    def _let_in(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it went away before we looked
            sock, _ = listening.accept()
            self._newcomers.add(sock, "")
            threading.Thread(target=self._meet, args=(sock,), name="group newcomer", daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        connection = None
        try:
            connection = accept(sock, self._secret)
            connection.sock.settimeout(HANDSHAKE_S)
            rank = field(connection.receive().body, "rank", int)
            connection.check_role("worker")
            if self._newcomers.done(sock):
                raise FrameError("it was closed for another newcomer")
            self._met.put((rank, connection))
            self._waker.send(b".")
        except (LinkError, OSError):  # a stranger, or nobody waits any more
            self._newcomers.done(sock)
            if connection is not None:
                connection.close()
