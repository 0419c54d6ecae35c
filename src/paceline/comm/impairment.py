"""A link that is worse than it is: latency and a limited rate, in this process, without root.

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
import os
import re
import select
import socket
import threading
import time
from dataclasses import dataclass

from paceline.exceptions import UsageError

__all__ = ["LINK_CONDITIONS", "Line", "LinkConditions", "impaired"]

LINK_CONDITIONS = "PACELINE_LINK_CONDITIONS"
"""The environment variable: conditions of all links from workers to servers, as `LinkConditions.parse`
reads them."""

THREAD_NAME = "impaired-link"

_MAX_LATENCY_S = 60.0
_MIN_BITS_PER_S = 1e3
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

_SECONDS = {"ms": 1e-3, "s": 1.0}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_FORMS = "latency=200ms,rate=100mbit, or one of the two; units are ms, s and kbit, mbit, gbit (per second)"


@dataclass(frozen=True, kw_only=True)
class LinkConditions:
    """How a link is, the same in both directions. `str()` is what `parse` reads."""

    latency_s: float = 0.0
    """One way: a round trip takes twice as long."""
    bits_per_s: float | None = None
    """Of each direction by itself; None is as fast as the host can."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s <= _MAX_LATENCY_S:
            raise UsageError(
                f"a link's latency must be from 0 to {_MAX_LATENCY_S:g} s, got {self.latency_s:g} s"
            )
        rate = self.bits_per_s
        if rate is not None and not _MIN_BITS_PER_S <= rate < math.inf:
            raise UsageError(f"a link's rate must be at least 1 kbit per second, got {rate:g} bit")

    @classmethod
    def parse(cls, text: str) -> "LinkConditions":
        """The conditions that a user's text means.

        Args:
            text: `latency=200ms,rate=100mbit`, or one of the two.

        Raises:
            UsageError: with the text, what is wrong with it, and how it should look.
        """
        values: dict[str, float] = {}
        for part in text.strip().lower().split(","):
            name, _, value = part.strip().partition("=")
            units = {"latency": _SECONDS, "rate": _BITS}.get(name)
            if units is None:
                raise _refusal(text, f"{part.strip()!r} is neither latency=… nor rate=…")
            if name in values:
                raise _refusal(text, f"{name} is given twice")
            found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?([a-z]+)", value)
            if found is None or found[2] not in units:
                raise _refusal(text, f"{name} needs a number and one of {', '.join(units)}, got {value!r}")
            values[name] = float(found[1]) * units[found[2]]
        try:
            return cls(latency_s=values.get("latency", 0.0), bits_per_s=values.get("rate"))
        except UsageError as error:
            raise _refusal(text, str(error)) from None

    @classmethod
    def from_environment(cls) -> "LinkConditions | None":
        """What PACELINE_LINK_CONDITIONS says; None if it is empty or not set."""
        text = os.environ.get(LINK_CONDITIONS, "").strip()
        return cls.parse(text) if text else None

    def __str__(self) -> str:
        latency = f"latency={self.latency_s * 1e3:.12g}ms"
        if self.bits_per_s is None:
            return latency
        unit = max((u for u in _BITS if _BITS[u] <= self.bits_per_s), key=_BITS.__getitem__)
        return f"{latency},rate={self.bits_per_s / _BITS[unit]:.12g}{unit}"


def _refusal(text: str, reason: str) -> UsageError:
    return UsageError(f"{LINK_CONDITIONS} {text!r}: {reason}. Write it as {_FORMS}")


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
        """How many bytes may be put now, at most one piece; 0: whoever sends has to wait."""
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
            # The receiver is told of the end; or the sender, that nobody receives any more.
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
