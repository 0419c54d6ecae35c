"""Messages to a fork server, sent without waiting for it to read them.

An engine that waited would not read what the fork server says meanwhile, and both could wait for one another
for ever; nor would the controller hear of Ctrl-C.
"""

import collections
import contextlib
import json
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["STALLED_S", "Outbox"]

STALLED_S = 60.0
"""Seconds in which a fork server must read some of what it is sent. Before the first message it imports
torch, which takes a part of that on a busy machine."""


class Outbox:
    """Sends lines of JSON over a stream socket, in order, as far as the other side reads them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._due: collections.deque[tuple[memoryview, Sequence[int]]] = collections.deque()
        self._begun = False
        """Whether a part of the first message has been sent."""
        self._since = 0.0
        """When the other side took something last, or began to have something to take."""

    @property
    def stalled(self) -> bool:
        """Whether the other side has read nothing for `STALLED_S`, although there is something to read."""
        return bool(self._due) and time.monotonic() - self._since > STALLED_S

    def put(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, now or as soon as there is room. Does not block.

        Args:
            descriptors: sent along; they must stay open until then.
        """
        if not self._due:
            self._since = time.monotonic()
        self._due.append((memoryview(json.dumps(message).encode() + b"\n"), descriptors))
        self.flush()

    def flush(self) -> None:
        """Send what there is room for. Does not block. A link that is broken is seen by its reader."""
        try:
            while self._due:
                data, descriptors = self._due[0]
                if descriptors and not self._begun:
                    sent = socket.send_fds(self._sock, [data], descriptors, socket.MSG_DONTWAIT)
                else:
                    sent = self._sock.send(data, socket.MSG_DONTWAIT)
                self._since = time.monotonic()
                if sent == len(data):
                    self._due.popleft()
                    self._begun = False
                else:
                    self._due[0] = (data[sent:], descriptors)
                    self._begun = True
        except BlockingIOError:
            return
        except OSError:
            self._due.clear()

    def drop(self) -> None:
        """Forget all messages of which nothing has been sent yet."""
        while len(self._due) > self._begun:
            self._due.pop()

    def finish(self, within_s: float) -> bool:
        """Send all that is left, blocking at most this long. False: the other side did not read it.

        What the other side says meanwhile is read and thrown away, so that it cannot wait for us.
        """
        until = time.monotonic() + within_s
        while self._due and (left := until - time.monotonic()) > 0:
            readable, _, _ = select.select([self._sock], [self._sock], [], left)
            if readable:
                with contextlib.suppress(OSError):
                    if not self._sock.recv(1 << 16):
                        self._due.clear()
            self.flush()
        return not self._due
