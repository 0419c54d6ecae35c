"""Links as they are between machines far apart, on one machine: latency and a limited rate, without root.

```python
with slow_links(LinkConditions(latency_s=0.2, bits_per_s=100e6)):
    paceline.fit(task, workers=4, mode="asp")
```

From a shell: `PACELINE_LINK_CONDITIONS=latency=200ms,rate=100mbit paceline run …`.

`impaired(sock, conditions)` gives another socket in place of `sock`. What is written to it goes through a
`Line`, one for each direction, which says when each piece has arrived at the other side:

    near ──► Line ──► sock          a piece has left after its bytes at the rate, behind the pieces before
    near ◄── Line ◄── sock          it, and has arrived one latency after it has left

So pieces follow one another as on a wire, many of them on their way at once. A `Line` is pure: time is an
argument. One daemon thread a direction does the reading and writing.
"""

import collections
import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Iterator

from paceline.comm.impairment import LINK_CONDITIONS, LinkConditions
from paceline.testing.environment import environment

__all__ = ["Line", "LinkConditions", "impaired", "slow_links"]

THREAD_NAME = "impaired-link"

_WAITING_BYTES = 4 << 20
"""How much may wait for a limited rate: a socket's buffer, so that a sender soon feels the rate."""
_UNLIMITED_BYTES = 64 << 20
"""How much may be on its way where only the latency is set."""
_PIECE_BYTES = 256 << 10
_PACKET_BYTES = 1500
_PIECE_S = 1e-3
"""A piece takes about this long at the rate: what is delivered at once has waited this long for its end."""
_LATENESS_S = 5.0
"""How much longer than planned a closing socket waits for a receiver that does not read."""
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


@contextlib.contextmanager
def slow_links(conditions: LinkConditions | str) -> Iterator[None]:
    """Runs that start in this block have these conditions on all links from workers to servers.

    Their workers reach the servers over TCP, on one host too. It sets PACELINE_LINK_CONDITIONS, so it is
    not for two threads at once, and an engine whose fork server runs already (KeptEngine) does not see it.
    """
    with environment(LINK_CONDITIONS, str(LinkConditions.parse(str(conditions)))):
        yield


class Line:
    """What is on its way in one direction, and when it arrives. Not thread-safe; times only ever rise."""

    def __init__(self, conditions: LinkConditions) -> None:
        self._latency_s = conditions.latency_s
        self._bits_per_s = conditions.bits_per_s
        self._piece, self._limit = _PIECE_BYTES, _UNLIMITED_BYTES
        if conditions.bits_per_s is not None:
            rate = conditions.bits_per_s / 8
            self._piece = max(_PACKET_BYTES, min(_PIECE_BYTES, int(rate * _PIECE_S)))
            self._limit = int(rate * conditions.latency_s) + _WAITING_BYTES
        self._pieces: collections.deque[tuple[float, memoryview]] = collections.deque()
        self._nbytes = 0
        self._free_at = -math.inf

    @property
    def room(self) -> int:
        """How many bytes may be put now, at most one piece; 0: the sender has to wait."""
        return max(0, min(self._piece, self._limit - self._nbytes))

    @property
    def due(self) -> float | None:
        """When the first piece arrives; None: nothing is on its way."""
        return self._pieces[0][0] if self._pieces else None

    @property
    def first(self) -> memoryview:
        """The piece that arrives first; an empty one is the end of the stream."""
        return self._pieces[0][1]

    @property
    def longest_s(self) -> float:
        """How long the last byte may be on its way when the line is full."""
        rate = self._bits_per_s
        return self._latency_s + (0.0 if rate is None else 8 * _WAITING_BYTES / rate)

    def put(self, data: bytes, now: float) -> None:
        """Send a piece; an empty one ends the stream."""
        self._free_at = max(self._free_at, now)
        if self._bits_per_s is not None:
            self._free_at += 8 * len(data) / self._bits_per_s
        self._pieces.append((self._free_at + self._latency_s, memoryview(data)))
        self._nbytes += len(data)

    def take(self, count: int) -> None:
        """The receiver has got this many bytes of the first piece."""
        due, view = self._pieces.popleft()
        self._nbytes -= count
        if count < len(view):
            self._pieces.appendleft((due, view[count:]))


def impaired(sock: socket.socket, conditions: LinkConditions) -> socket.socket:
    """A socket to use in place of `sock`, as if the way to its peer had these conditions.

    Nothing is lost or reordered. A sender is held up when 4 MB wait for a limited rate (without a limit:
    when 64 MB are on their way), and when the peer does not read. The end of the stream takes its time as
    well, each direction its own. `close()` returns when the peer has got everything, because what is on its
    way would end with this process; a peer that does not read is waited for 5 s. A process that is
    killed loses what was on its way, as a host that goes down does.

    Args:
        sock: connected, TCP or unix. It belongs to the link from now on, which closes it.

    Returns:
        A blocking unix socket. It carries bytes only: descriptors sent over it are lost.
    """
    near, inner = socket.socketpair()
    end = _NearEnd(fileno=near.detach())
    inner.setblocking(False)
    sock.setblocking(False)
    ends = _Ends(inner, sock)
    end.outgoing = _Pump(inner, sock, conditions, ends)
    for pump in (end.outgoing, _Pump(sock, inner, conditions, ends)):
        pump.start()
    return end


class _NearEnd(socket.socket):
    """The socket that is handed out: closing it waits for what is on its way."""

    outgoing: "_Pump"

    def close(self) -> None:
        if self.fileno() < 0:
            return
        super().close()
        if self.fileno() < 0:  # otherwise a file made from it is still open
            self.outgoing.wait()


class _Ends:
    """The sockets behind the near end: closed by the pump that ends last."""

    def __init__(self, *sockets: socket.socket) -> None:
        self._sockets = sockets
        self._users = 2
        self._lock = threading.Lock()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for sock in self._sockets:
                    sock.close()


class _Pump(threading.Thread):
    """Carries one direction until its stream has ended at both sides, or one side is gone."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, conditions: LinkConditions, ends: _Ends
    ) -> None:
        super().__init__(name=THREAD_NAME, daemon=True)
        self._source = source
        self._sink = sink
        self._line = Line(conditions)
        self._ends = ends
        self._delivered = threading.Event()

    def run(self) -> None:
        try:
            arrived = self._carry()
            # The receiver is told of the end; or the sender, that the receiver is gone.
            with contextlib.suppress(OSError):
                if arrived:
                    self._sink.shutdown(socket.SHUT_WR)
                else:
                    self._source.shutdown(socket.SHUT_RD)
        finally:
            self._delivered.set()
            self._ends.release()

    def wait(self) -> None:
        """Until everything that was sent is delivered, or the receiver has had its time."""
        self._delivered.wait(self._line.longest_s + _LATENESS_S)

    def _carry(self) -> bool:
        """Whether the end of the stream has arrived; otherwise the receiver is gone."""
        line, source, sink = self._line, self._source, self._sink
        poll = select.poll()
        reading = True
        while True:
            now, due = time.monotonic(), line.due
            ready = due is not None and due <= now
            if ready and not line.first:
                return True
            # Also with nothing to deliver: poll always tells of a receiver that is gone.
            poll.register(sink, select.POLLOUT if ready else 0)
            if reading and line.room:
                poll.register(source, select.POLLIN)
            else:
                with contextlib.suppress(KeyError):
                    poll.unregister(source)
            # To the millisecond: poll rounds up.
            events = dict(poll.poll(None if due is None or ready else (due - now) * 1e3))
            happened = events.get(sink.fileno(), 0)
            if happened & _GONE:
                return False
            if happened:
                try:
                    line.take(sink.send(line.first))
                except BlockingIOError:
                    pass
                except OSError:
                    return False
            if source.fileno() in events:
                try:
                    data = source.recv(line.room)
                except BlockingIOError:
                    continue
                except OSError:  # reset: what it had sent before still arrives
                    data = b""
                line.put(data, time.monotonic())
                reading = bool(data)
