"""Newcomers: connections that are authenticating, and which of them must go when there are too many.

Whoever can reach a port can open connections and say nothing. There is room for a number of them; when it is
full, the address that has the most connections loses its oldest one. A role of the run needs milliseconds to
authenticate, so it is not the oldest for long; if it does lose its connection, it dials again (`meeting.py`).
So strangers can only keep out each other.
"""

import contextlib
import socket
import threading
from collections import Counter

__all__ = ["Newcomers"]


class Newcomers:
    """From any thread.

    Args:
        most: maximum number of connections that may be authenticating.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._from: dict[socket.socket, str] = {}
        """Address of each, the oldest first."""
        self._ended: set[socket.socket] = set()

    def __len__(self) -> int:
        return len(self._from)

    def add(self, sock: socket.socket, address: str) -> None:
        """A connection begins to authenticate. Makes room for it."""
        with self._lock:
            if len(self._from) >= self._most:
                self._end_one()
            self._from[sock] = address

    def make_room(self) -> bool:
        """End one of them, because there are no file descriptors left. Returns whether there was one."""
        with self._lock:
            return self._end_one()

    def done(self, sock: socket.socket) -> bool:
        """It has authenticated, or failed to. Returns whether it was ended to make room."""
        with self._lock:
            self._from.pop(sock, None)
            was_ended = sock in self._ended
            self._ended.discard(sock)
            return was_ended

    def _end_one(self) -> bool:
        if not self._from:
            return False
        counts = Counter(self._from.values())
        most = max(counts.values())
        oldest = next(sock for sock, address in self._from.items() if counts[address] == most)
        del self._from[oldest]
        self._ended.add(oldest)
        with contextlib.suppress(OSError):  # its thread sees this, closes it, and says `done`
            oldest.shutdown(socket.SHUT_RDWR)
        return True
