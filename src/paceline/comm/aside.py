"""Writing to a socket without waiting for the other side to read.

Two roles that send each other more than their sockets hold, both before they read, would wait for one another
for ever: servers that give each other slices do that. And a thread that serves many links must not wait for
one of them.
"""

import array
import collections
import contextlib
import os
import select
import socket
import threading
from collections.abc import Sequence
from typing import NamedTuple

from paceline.comm.tls import SecureSocket, Stream

__all__ = ["Aside"]

_AT_ONCE_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20
_FRAME_BYTES = 1 << 10
"""What a small frame that waits takes of our memory, about."""
_LAST_S = 0.2
"""How long an end waits for what is still to be written."""


class _Due(NamedTuple):
    """The rest of a frame."""

    views: list[memoryview]
    descriptors: list[int]
    """Duplicates, to be closed when they are sent."""


class Aside:
    """Writes frames in order: what is small and has room goes at once, the rest in a thread.

    What breaks the socket is raised by the next `write`, and ends the socket, so that its reader sees it. So
    does a peer that does not read within the socket's timeout, or lets more than the limit wait.

    Args:
        limit: maximum number of bytes that may wait, beside the largest frame; None: any number.
    """

    def __init__(self, sock: Stream, limit: int | None = None) -> None:
        self.limit = limit
        self._sock = sock
        self._due: collections.deque[_Due] = collections.deque()
        self._changed = threading.Condition()
        """Guards `_due`, of which the first is being written, and what follows."""
        self._waiting = (0, 0)
        """Bytes put into it since it was empty, and the largest frame among them."""
        self._ending = False
        self._error: OSError | None = None
        self._busy = False
        """Whether a thread writes. It ends when nothing is left to write."""
        self._thread: threading.Thread | None = None
        self._room = select.poll()
        self._room.register(sock, select.POLLOUT)

    def write(self, frame: Sequence[memoryview], descriptors: Sequence[int] = ()) -> None:
        """Have this written behind all before it. It must not change until then. Raises OSError."""
        views = [each.cast("B") for each in frame if each.nbytes]
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._due:
                views, descriptors = self._write_now(views, descriptors)
                if not views:
                    return
            self._put(views, descriptors)
            if not self._busy:
                self._busy = True
                self._thread = threading.Thread(target=self._work, name="writes aside", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until all is written. Raises OSError."""
        with self._changed:
            self._changed.wait_for(lambda: not self._due or self._error is not None)
            if self._error is not None:
                raise self._error

    def finish(self) -> None:
        """End the thread, with what it has written by then. The socket is the caller's to close."""
        if self._thread is None:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._due or self._error is not None, timeout=_LAST_S)
        self.give_up()

    def give_up(self) -> None:
        """End the thread at once. The socket is of no more use if something was still to be written."""
        if self._thread is None:
            return
        with self._changed:
            self._ending = True
            if self._due:
                self._end_socket()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _put(self, views: list[memoryview], descriptors: Sequence[int]) -> None:
        nbytes = sum(map(len, views))
        waiting, largest = self._waiting if self._due else (0, 0)
        self._waiting = waiting + nbytes + _FRAME_BYTES, max(largest, nbytes)
        if self.limit is not None and self._waiting[0] - self._waiting[1] > self.limit:
            self._error = TimeoutError(f"{self._waiting[0]:,} bytes wait for it to read")
            self._end_socket()
            raise self._error
        self._due.append(_Due(views, [os.dup(fd) for fd in descriptors]))

    def _write_now(
        self, views: list[memoryview], descriptors: Sequence[int]
    ) -> tuple[list[memoryview], Sequence[int]]:
        """Write what the socket takes without waiting, if that is worth a try. Returns what is left."""
        sock = self._sock
        if not descriptors and sum(map(len, views)) > _AT_ONCE_BYTES:
            return views, descriptors
        if isinstance(sock, SecureSocket):
            if not self._room.poll(0):
                return views, descriptors
            for view in views:  # a TCP socket that has room has more room than this
                sock.sendall(view)
            return [], ()
        if descriptors:
            sent = self._send_rights(views[0], descriptors) if self._room.poll(0) else 0
        elif sock.gettimeout() is not None:  # then its descriptor does not block
            try:
                sent = os.writev(sock.fileno(), views)
            except BlockingIOError:
                sent = 0
        else:
            sent = sock.send(views[0]) if self._room.poll(0) else 0
        if not sent:
            return views, descriptors
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]
        return views, ()

    def _send_rights(self, view: memoryview, descriptors: Sequence[int]) -> int:
        assert isinstance(self._sock, socket.socket), "descriptors go by unix sockets only"
        rights = array.array("i", descriptors)
        return self._sock.sendmsg([view], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._ending or not self._due:
                    break
                due = self._due[0]
            try:
                self._write(due)
            except OSError as error:
                with self._changed:
                    self._error = self._error or error
                self._end_socket()
                break
            with self._changed:
                self._due.popleft()
                if not self._due:  # said under the same lock, so that the next write starts another thread
                    self._busy = False
                    self._changed.notify_all()
                    return
        with self._changed:
            self._busy = False
            for left in self._due:
                _close(left.descriptors)
            self._changed.notify_all()

    def _write(self, due: _Due) -> None:
        """Write all of it; each piece has the socket's timeout."""
        views = list(due.views)
        if due.descriptors:
            views[0] = views[0][self._send_rights(views[0], due.descriptors) :]
            _close(due.descriptors)
        for view in views:
            for start in range(0, len(view), _PIECE_BYTES):
                self._sock.sendall(view[start : start + _PIECE_BYTES])

    def _end_socket(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
