"""Writing to a socket without waiting for the other side to read.

Two roles that send each other more than their sockets hold, both before they read, would wait for one another
for ever: servers that give each other slices do that.
"""

import contextlib
import queue
import select
import socket
import threading

from paceline.comm.tls import SecureSocket, Stream

__all__ = ["Aside"]

_AT_ONCE_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20
_LAST_S = 0.2
"""How long an end waits for what is still to be written."""


class Aside:
    """Writes in order: what is small and has room goes at once, the rest in a thread. One thread uses it.

    What breaks the socket is raised by the next `write`, and ends the socket, so that its reader sees it.
    """

    def __init__(self, sock: Stream) -> None:
        self._sock = sock
        self._due: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        self._room = select.poll()
        self._room.register(sock, select.POLLOUT)

    def write(self, data: bytes | memoryview) -> None:
        """Have this written behind all before it. It must not change until then. Raises OSError."""
        view = memoryview(data).cast("B")
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._pending:
                view = view[self._write_now(view) :]
            if not len(view):
                return
            self._pending += 1
        self._due.put(view)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="writes aside", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """End the thread, with what it has written by then. The socket is the caller's to close."""
        if self._thread is None:
            return
        self._due.put(None)
        self._thread.join(timeout=_LAST_S)
        if self._thread.is_alive():
            self._end_socket()
            self._thread.join(timeout=5)

    def _write_now(self, view: memoryview) -> int:
        """How much of it the socket takes without waiting, if that is worth a try."""
        if len(view) > _AT_ONCE_BYTES or isinstance(self._sock, SecureSocket) or not self._room.poll(0):
            return 0
        return self._sock.send(view)

    def _work(self) -> None:
        while (view := self._due.get()) is not None:
            try:
                for start in range(0, len(view), _PIECE_BYTES):  # each has the socket's timeout
                    self._sock.sendall(view[start : start + _PIECE_BYTES])
            except OSError as error:
                with self._lock:
                    self._error = error
                self._end_socket()
                return
            with self._lock:
                self._pending -= 1

    def _end_socket(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
