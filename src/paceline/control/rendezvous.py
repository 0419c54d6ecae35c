"""The port at which a script's own torch.distributed processes meet (MASTER_PORT)."""

import contextlib
import socket

__all__ = ["HOST", "ReservedPort"]

HOST = "127.0.0.1"
"""MASTER_ADDR where all workers are on this host."""


class ReservedPort:
    """A TCP port that the system gives to no other process, and that worker 0 may listen on.

    It is bound here and listened on there: Linux allows that where both sides set SO_REUSEADDR, as torch's
    TCPStore does.

    Args:
        host: address at which the workers reach it: worker 0 is always on this host.
    """

    def __init__(self, host: str = HOST) -> None:
        self.host = host
        self.number = 0
        self._socket: socket.socket | None = None
        self._bind(0)

    def take_over(self, number: int) -> None:
        """Reserve the port that another controller had reserved. A worker may listen on it already."""
        self._bind(number)
        self.number = number

    def _bind(self, number: int) -> None:
        self.close()
        sock = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            sock.bind((self.host, number))
            self.number = sock.getsockname()[1]
        self._socket = sock

    def close(self) -> None:
        """Release it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
