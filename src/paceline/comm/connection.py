"""Frames over one authenticated socket, and the two ways to get such a socket."""

import array
import contextlib
import itertools
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.comm import frames, handshake
from paceline.comm.frames import Kind
from paceline.exceptions import AuthError, FrameError, LinkError, PacelineError

__all__ = ["Address", "Connection", "Frame", "Listener", "connect"]

HANDSHAKE_S = 5.0
"""A stranger may hold a connection open for this long."""

_MAX_DESCRIPTORS = 2
_UCRED_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a role listens: an abstract unix name for the same host, and a TCP host and port."""

    unix: str | None
    host: str
    port: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"unix": self.unix, "host": self.host, "port": self.port}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Address":
        """The inverse of `to_json`."""
        return cls(unix=data["unix"], host=data["host"], port=data["port"])


@dataclass(slots=True)
class Frame:
    """A received frame. Its payload, if any, is still in the socket: read it with `read_into`."""

    kind: Kind
    body: dict[str, Any]
    payload_bytes: int
    descriptors: list[int]


class Connection:
    """Frames over one authenticated socket. One thread sends at a time, one receives at a time."""

    def __init__(self, sock: socket.socket, keys: handshake.Keys) -> None:
        self.sock = sock
        self.peer = "unknown"
        """Role name of the other side, known after its HELLO."""
        self.local = sock.family == getattr(socket, "AF_UNIX", None)
        """Whether both ends are on one host and can share memory."""
        self._keys = keys
        self._sent = 0
        self._received = 0
        self._unread = 0

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def send(
        self,
        kind: Kind,
        body: dict[str, Any] | None = None,
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send one frame, blocking until the kernel has all of it.

        Raises:
            LinkError: the other side is gone.
        """
        size = sum(view.nbytes for view in payload)
        head = frames.encode(
            kind, body or {}, sequence=self._sent, payload_bytes=size, key=self._keys.send
        )
        self._sent += 1
        try:
            if descriptors:
                rights = array.array("i", descriptors)
                sent = self.sock.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                self.sock.sendall(memoryview(head)[sent:])
            else:
                self.sock.sendall(head)
            for view in payload:
                self.sock.sendall(view)
        except TimeoutError:
            raise LinkError(f"{self.peer} does not read what is sent to it") from None
        except OSError as error:
            raise LinkError(f"the link to {self.peer} broke: {error}") from error

    def send_streamed(
        self, kind: Kind, body: dict[str, Any], size: int, payload: Iterator[memoryview], count: int
    ) -> None:
        """Send a frame whose payload of `size` bytes comes as `count` pieces, as they get ready."""
        head = frames.encode(
            kind, body, sequence=self._sent, payload_bytes=size, key=self._keys.send
        )
        self._sent += 1
        try:
            self.sock.sendall(head)
            for view in itertools.islice(payload, count):
                self.sock.sendall(view)
        except OSError as error:
            raise LinkError(f"the link to {self.peer} broke: {error}") from error

    def receive(self) -> Frame:
        """The next frame, blocking. An unread payload of the last one is a bug and asserts.

        Raises:
            LinkError: the other side is gone.
            FrameError: what arrived is not the protocol.
            TimeoutError: nothing came within the socket's timeout.
        """
        assert self._unread == 0, "payload of the last frame was not read"
        head, descriptors = self._receive_head()
        try:
            header = frames.parse_header(head)
            body = bytearray(header.body_bytes)
            self._fill(memoryview(body))
            frames.verify(header, bytes(body), sequence=self._received, key=self._keys.receive)
            self._received += 1
            self._unread = header.payload_bytes
            return Frame(
                header.kind, frames.decode_body(bytes(body)), header.payload_bytes, descriptors
            )
        except PacelineError:
            for fd in descriptors:
                os.close(fd)
            raise

    def read_into(self, views: Sequence[memoryview]) -> None:
        """Read the payload of the last frame into `views`; their sizes must add up to it."""
        room = sum(view.nbytes for view in views)
        if room != self._unread:
            raise FrameError(f"a payload of {self._unread:,} bytes from {self.peer}, expected {room:,}")
        for view in views:
            self._fill(view)
        self._unread = 0

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _receive_head(self) -> tuple[bytes, list[int]]:
        want = frames.HEADER_BYTES
        if not self.local:
            head = bytearray(want)
            self._fill(memoryview(head), at_boundary=True)
            return bytes(head), []
        descriptors: list[int] = []
        room = socket.CMSG_LEN(_MAX_DESCRIPTORS * 4)
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(want, room, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise
        except OSError as error:
            raise LinkError(f"the link to {self.peer} broke: {error}") from error
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
                descriptors.extend(fds)
        if flags & socket.MSG_CTRUNC:
            for fd in descriptors:
                os.close(fd)
            raise FrameError(f"{self.peer} sent too many descriptors")
        if not data:
            raise LinkError(f"{self.peer} closed the link")
        if len(data) < want:
            rest = bytearray(want - len(data))
            self._fill(memoryview(rest))
            data += bytes(rest)
        return data, descriptors

    def _fill(self, view: memoryview, *, at_boundary: bool = False) -> None:
        view = view.cast("B")
        done = 0
        while done < len(view):
            try:
                count = self.sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except TimeoutError:
                if at_boundary and not done:
                    raise
                raise LinkError(f"{self.peer} stopped in the middle of a frame") from None
            except OSError as error:
                raise LinkError(f"the link to {self.peer} broke: {error}") from error
            if not count:
                middle = "" if at_boundary and not done else " in the middle of a frame"
                raise LinkError(f"{self.peer} closed the link{middle}")
            done += count


class Listener:
    """Listens on an abstract unix name and on a TCP port of one interface at once.

    Abstract names leave no file behind and are bound to the network namespace, so two roles meet on one
    exactly when they can share memory; otherwise they use TCP, and nobody configures which.
    """

    def __init__(self, *, host: str = "127.0.0.1", tcp: bool = True) -> None:
        self.sockets: list[socket.socket] = []
        name = None
        if sys.platform == "linux":
            name = f"paceline-{secrets.token_hex(16)}"
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.bind("\0" + name)
            self.sockets.append(local)
        port = 0
        if tcp or name is None:
            remote = socket.create_server((host, 0), backlog=128)
            port = remote.getsockname()[1]
            self.sockets.append(remote)
        for sock in self.sockets:
            sock.listen(128)
        self.address = Address(unix=name, host=host, port=port)

    def close(self) -> None:
        """Stop listening."""
        for sock in self.sockets:
            sock.close()


def accept(sock: socket.socket, secret: bytes) -> Connection:
    """Authenticate a connection just accepted by a Listener's socket. Blocking, bounded in time.

    Raises:
        AuthError: the other side is a stranger; the socket is closed.
    """
    try:
        sock.settimeout(HANDSHAKE_S)
        if sock.family == getattr(socket, "AF_UNIX", None):
            _check_same_user(sock)
        connection = Connection(sock, handshake.accept(sock, secret))
        _tune(sock)
        return connection
    except AuthError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise AuthError(f"the connection broke while authenticating: {error}") from error


def connect(address: Address, secret: bytes, *, peer: str, link: str = "auto") -> Connection:
    """Connect to a Listener and authenticate both ways.

    Args:
        peer: role name of the other side, for messages.
        link: "auto" meets on the unix name if it can and uses TCP otherwise; "tcp" and "shm" force one.
    """
    sock = None
    if address.unix is not None and link != "tcp":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + address.unix)
        except OSError as error:
            sock.close()
            sock = None
            if link == "shm":
                raise LinkError(
                    f"cannot meet {peer} on this host for shared memory ({error}); use --link auto"
                ) from error
    try:
        if sock is None:
            sock = socket.create_connection((address.host, address.port), timeout=HANDSHAKE_S)
        sock.settimeout(HANDSHAKE_S)
        connection = Connection(sock, handshake.initiate(sock, secret))
    except OSError as error:
        if sock is not None:
            sock.close()
        raise LinkError(f"cannot connect to {peer} at {address.host}:{address.port}: {error}") from error
    except AuthError as error:
        assert sock is not None
        sock.close()
        raise AuthError(f"{peer}: {error}") from None
    _tune(sock)
    connection.peer = peer
    return connection


def _tune(sock: socket.socket) -> None:
    sock.settimeout(None)
    if sock.family != getattr(socket, "AF_UNIX", None):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)


def _check_same_user(sock: socket.socket) -> None:
    """A unix peer must be the same user: the kernel says who it is."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED_BYTES)
    uid = int.from_bytes(raw[4:8], sys.byteorder)
    if uid != os.geteuid():
        raise AuthError(f"user {uid} may not connect to a role of user {os.geteuid()}")
