"""LinkWatch: lets the device's work go on when the server that it waits for is gone."""

import select
import threading
from collections.abc import Callable

from paceline.comm import Connection

__all__ = ["LinkWatch"]

_LOOK_S = 0.2


class LinkWatch:
    """Watches one link in a thread, which ends with `close` or with the server.

    A script that waits for the device could not hear of the server's end otherwise.

    Args:
        release: lets all work go that waits for this server's flags.
    """

    def __init__(self, connection: Connection, release: Callable[[], None]) -> None:
        self._connection = connection
        self._release = release
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the work go, and end the thread."""
        self._closing.set()
        self._release()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_S):
            if self._connection.sock.fileno() < 0 or _hung_up(self._connection):
                self._release()
                return


def _hung_up(connection: Connection) -> bool:
    """Whether the other side has closed its socket, without reading from it."""
    poll = select.poll()
    try:
        poll.register(connection.sock, select.POLLRDHUP)
    except (OSError, ValueError):  # closed meanwhile
        return True
    return bool(poll.poll(0))
