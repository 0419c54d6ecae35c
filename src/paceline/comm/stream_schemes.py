"""Streams by scheme: how bytes travel between two roles, and how each side of a stream admits the other.

A scheme dials an address, and secures a connected socket from either side. `SCHEMES` is the registry: a new
kind of stream is a class here and an entry there.
"""

import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Protocol

from paceline.comm.frames import Body, field
from paceline.comm.tls import Secret, SecureSocket, Stream, secure
from paceline.exceptions import AuthError

__all__ = ["SCHEMES", "Address", "StreamScheme", "pid_of_peer", "scheme_of"]

_UCRED_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a role listens: an abstract unix name for the same host, and a TCP host and port."""

    unix: str | None
    host: str
    port: int

    def to_json(self) -> Body:
        """As plain JSON."""
        return {"unix": self.unix, "host": self.host, "port": self.port}

    @classmethod
    def from_json(cls, data: Body) -> "Address":
        """The inverse of `to_json`; anything odd is a FrameError."""
        unix = None if data.get("unix") is None else field(data, "unix", str)
        return cls(unix=unix, host=field(data, "host", str), port=field(data, "port", int))


class StreamScheme(Protocol):
    """One kind of stream."""

    def dial(self, address: Address, within_s: float) -> socket.socket:
        """Connect to a listener. Raises OSError."""

    def secure_dialled(
        self, sock: socket.socket, secret: bytes, peer: str, address: Address, within_s: float
    ) -> Stream:
        """The stream over a socket that this side dialled. Raises AuthError, OSError."""

    def secure_accepted(self, sock: socket.socket, secret: bytes, within_s: float) -> Stream:
        """The stream over a socket that this side accepted. Raises AuthError, OSError."""


class UnixStream:
    """An abstract unix name: two roles meet on it exactly when they can share memory."""

    def dial(self, address: Address, within_s: float) -> socket.socket:
        """See StreamScheme."""
        return _connect_on_host(address.unix, within_s)

    def secure_dialled(
        self, sock: socket.socket, secret: bytes, peer: str, address: Address, within_s: float
    ) -> Stream:
        """See StreamScheme."""
        return sock

    def secure_accepted(self, sock: socket.socket, secret: bytes, within_s: float) -> Stream:
        """See StreamScheme. The other side must be the same user."""
        _check_same_user(sock)
        return sock


class TcpStream:
    """Plain TCP: its two sides know each other by the run's secret alone."""

    def dial(self, address: Address, within_s: float) -> socket.socket:
        """See StreamScheme."""
        return socket.create_connection((address.host, address.port), timeout=within_s)

    def secure_dialled(
        self, sock: socket.socket, secret: bytes, peer: str, address: Address, within_s: float
    ) -> Stream:
        """See StreamScheme."""
        return sock

    def secure_accepted(self, sock: socket.socket, secret: bytes, within_s: float) -> Stream:
        """See StreamScheme."""
        return sock


class TlsStream(TcpStream):
    """TLS over TCP: each side shows a certificate of the run."""

    def secure_dialled(
        self, sock: socket.socket, secret: bytes, peer: str, address: Address, within_s: float
    ) -> Stream:
        """See StreamScheme. The listener's certificate must be of the role `peer`, and for this host."""
        certificate = Secret.certificate_of(secret)
        assert certificate is not None
        stream = secure(sock, certificate, listening=False, within_s=within_s)
        _check_listener(stream, peer, address.host)
        return stream

    def secure_accepted(self, sock: socket.socket, secret: bytes, within_s: float) -> Stream:
        """See StreamScheme."""
        certificate = Secret.certificate_of(secret)
        assert certificate is not None
        return secure(sock, certificate, listening=True, within_s=within_s)


SCHEMES: dict[str, StreamScheme] = {"unix": UnixStream(), "tcp": TcpStream(), "tls": TlsStream()}


def scheme_of(sock: socket.socket, secret: bytes) -> StreamScheme:
    """The scheme of a connected socket: between hosts, TLS if the run has certificates."""
    if sock.family == getattr(socket, "AF_UNIX", None):
        return SCHEMES["unix"]
    return SCHEMES["tcp" if Secret.certificate_of(secret) is None else "tls"]


def _connect_on_host(name: str | None, within_s: float) -> socket.socket:
    """A socket connected to an abstract unix name; OSError if no process on this host has it."""
    if name is None:
        raise OSError("it listens on TCP only")
    deadline = time.monotonic() + within_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect("\0" + name)
                return sock
            except BlockingIOError:  # its queue of newcomers is full; a blocking connect may hang
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
    except OSError:
        sock.close()
        raise


def _check_listener(stream: SecureSocket, peer: str, host: str) -> None:
    """The listener must have a certificate of the expected role that is good for that host."""
    named, role = stream.named, peer.partition(":")[0]
    if named.role != role:
        raise AuthError(
            f"who listens there has a {named.role}'s certificate: it is no {role}, or an impostor"
        )
    if named.hosts and host not in named.hosts:
        raise AuthError(f"its certificate is good for {', '.join(named.hosts)}, and it was reached at {host}")


def pid_of_peer(sock: Stream) -> int | None:
    """The process that dialled a unix socket, as the kernel says; None for other sockets."""
    if not isinstance(sock, socket.socket) or sock.family != getattr(socket, "AF_UNIX", None):
        return None
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED_BYTES)
    return int.from_bytes(raw[:4], sys.byteorder)


def _check_same_user(sock: socket.socket) -> None:
    """A unix peer must be the same user: the kernel says who it is."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED_BYTES)
    uid = int.from_bytes(raw[4:8], sys.byteorder)
    if uid != os.geteuid():
        raise AuthError(f"user {uid} may not connect to a role of user {os.geteuid()}")
