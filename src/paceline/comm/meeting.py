"""How two roles meet: one listens, the other connects, and both prove who they are."""

import random
import secrets
import socket
import sys
import time

from paceline.comm import handshake
from paceline.comm.connection import Connection
from paceline.comm.impairment import LinkConditions
from paceline.comm.stream_schemes import SCHEMES, Address, scheme_of
from paceline.comm.tls import SecureSocket, Stream
from paceline.exceptions import AuthError, LinkError, PeerBusy

__all__ = ["Address", "Listener", "accept", "connect"]

HANDSHAKE_S = 5.0
"""A stranger may hold a connection open for this long."""
_AGAIN_S = (0.02, 1.0)
"""The first pause before dialling again, and the longest. Each is shortened at random, so that roles which
were turned away together do not come back together."""


class Listener:
    """Listens on an abstract unix name and on a TCP port of one interface at once.

    Abstract names leave no file behind and are bound to the network namespace, so two roles meet on
    one exactly when they can share memory; otherwise they use TCP, without any configuration.

    Raises:
        LinkError: there is no such interface.
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
            try:
                remote = socket.create_server((host, 0), backlog=128)
            except OSError as error:
                self.close()
                raise LinkError(f"cannot listen on {host}: {error}") from error
            port = remote.getsockname()[1]
            self.sockets.append(remote)
        for sock in self.sockets:
            sock.listen(128)
            # A peer that left between being announced and being accepted must not block the others.
            sock.setblocking(False)
        self.address = Address(unix=name, host=host, port=port)

    @classmethod
    def inherited(cls, sock: socket.socket) -> "Listener":
        """Listen on with a unix socket that another process listened on, under the same name."""
        listener = cls.__new__(cls)
        sock.setblocking(False)
        listener.sockets = [sock]
        name = sock.getsockname()
        unix = (name.decode() if isinstance(name, bytes) else name).lstrip("\0")
        listener.address = Address(unix=unix, host="127.0.0.1", port=0)
        return listener

    def close(self) -> None:
        """Stop listening."""
        for sock in self.sockets:
            sock.close()


def accept(sock: socket.socket, secret: bytes) -> Connection:
    """Authenticate a connection just accepted by a Listener's socket. Blocking, bounded in time.

    Args:
        secret: a `Secret` with a certificate has peers that come by TCP show one, too.

    Raises:
        AuthError: the other side is a stranger; the socket is closed.
    """
    try:
        stream = scheme_of(sock, secret).secure_accepted(sock, secret, HANDSHAKE_S)
        connection = Connection(stream, handshake.accept(stream, secret, within_s=HANDSHAKE_S))
        _tune(stream)
        return connection
    except AuthError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise AuthError(f"the connection broke while authenticating: {error}") from error


def connect(
    address: Address,
    secret: bytes,
    *,
    peer: str,
    link: str = "auto",
    conditions: LinkConditions | None = None,
    redial_s: float = 0.0,
) -> Connection:
    """Connect to a Listener and authenticate both ways.

    Args:
        secret: a `Secret` with a certificate has both sides of a TCP link show theirs.
        peer: role name of the other side, for messages; with TLS its certificate must be of that role.
        link: "auto" meets on the unix name if it can and uses TCP otherwise; "tcp" and "shm" force
            one.
        conditions: of a worse link to emulate (`paceline.testing.slow_links`), which is a TCP link.
        redial_s: how long to dial again, after longer and longer pauses, while the other side is there and
            closes the connection before it has authenticated: strangers may be crowding it.

    Raises:
        LinkError: no process listens there.
        AuthError: the process that listens there does not know the secret, or is silent.
    """
    until, (pause, longest) = time.monotonic() + redial_s, _AGAIN_S
    jitter, calls = random.Random(), 0  # of its own: the script's random numbers stay as they are
    while True:
        calls += 1
        try:
            return _dial(address, secret, peer, link, conditions)
        except PeerBusy as error:
            if time.monotonic() >= until:
                if calls == 1:
                    raise
                raise PeerBusy(
                    f"{error}. Dialled {calls} times in {redial_s:g} s: it may have too many newcomers, "
                    "strangers among them"
                ) from None
        time.sleep(min(pause * jitter.uniform(0.5, 1.0), max(0.0, until - time.monotonic())))
        pause = min(2 * pause, longest)


def _dial(
    address: Address, secret: bytes, peer: str, link: str, conditions: LinkConditions | None
) -> Connection:
    """Connect and authenticate once. Raises as `connect`; PeerBusy if another try may help."""
    sock = None
    if link != "tcp" and conditions is None:
        try:
            sock = SCHEMES["unix"].dial(address, HANDSHAKE_S)
        except OSError as error:
            if link == "shm":
                raise LinkError(
                    f"cannot meet {peer} on this host for shared memory ({error}); use --link auto"
                ) from error
    try:
        if sock is None:
            sock = SCHEMES["tcp"].dial(address, HANDSHAKE_S)
        stream = scheme_of(sock, secret).secure_dialled(sock, secret, peer, address, HANDSHAKE_S)
        connection = Connection(stream, handshake.initiate(stream, secret, within_s=HANDSHAKE_S))
        _tune(stream)
        if conditions is not None:
            worse = conditions.wrap(sock)
            if isinstance(stream, SecureSocket):
                stream.replace(worse)
            else:
                connection.sock = worse
    except OSError as error:
        where = f"{address.host}:{address.port}"
        text = f"cannot connect to {peer} at {where}: {error}"
        if sock is not None:
            sock.close()
            raise PeerBusy(text) from error  # it was there, and hung up
        if isinstance(error, TimeoutError):
            raise PeerBusy(text) from error  # its queue of newcomers is full
        raise LinkError(text) from error
    except AuthError as error:
        assert sock is not None
        sock.close()
        raise type(error)(f"{peer}: {error}") from None
    connection.peer = peer
    return connection


def _tune(sock: Stream) -> None:
    sock.settimeout(None)
    if sock.family != getattr(socket, "AF_UNIX", None):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
