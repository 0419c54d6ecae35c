"""TLS 1.3 under the handshake and the frames of a TCP link, and who may be at its other end.

Both sides show a certificate. A side goes on if the other's is signed by the run's authority, has not
expired, names this run, and is of the role that it is met as:

    paceline://20261115-081502-digits-4f2a/worker        in the certificate, as an alternative name (a URI)

So a worker's certificate cannot act as a server's. Hosts may be named in it as well; then it is good there
only. Certificates are made by `certificates.py`; this file needs Python's own `ssl` only.

Why a socket of our own: one thread sends while another receives (`worker/exchange/pipeline.py`), and
OpenSSL's objects are not made for that. Here they are used under a lock, and the kernel is waited for
outside of it.
"""

import contextlib
import functools
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from socket import IPPROTO_TCP, SHUT_WR, TCP_NODELAY, socket
from typing import Any, Self

from paceline.exceptions import AuthError, PeerBusy

__all__ = [
    "ROLES",
    "Certificate",
    "Named",
    "Secret",
    "SecureSocket",
    "Stream",
    "as_file",
    "inspect",
    "secure",
    "shake_hands",
]

ROLES = ("controller", "server", "worker")

_SCHEME = "paceline://"
_CHUNK_BYTES = 256 << 10
"""What is encrypted before it is sent, and received before it is decrypted: fits a core's cache."""
_FAREWELL_S = 0.5
"""How long a refused peer is given to read the reason."""

_REFUSED_BY_US = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate",
    "UNSUPPORTED_PROTOCOL": "it speaks an older TLS than 1.3",
    "NO_SHARED_CIPHER": "it has no cipher in common with this side",
}
_ALERTS = {
    "CERTIFICATE_EXPIRED": "it has expired",
    "UNKNOWN_CA": "it is signed by another authority than the run's",
    "CERTIFICATE_REQUIRED": "there was none",
}
_VERIFY_EXPIRED, _VERIFY_NOT_YET = 10, 9
_VERIFY_AUTHORITY = (7, 18, 19, 20, 21)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What a role shows on TCP links, with its private key: as secret as the run's secret."""

    run: str
    """The name that every certificate of the run carries."""
    role: str
    authority: str
    """Certificate of the authority that signs for this run."""
    chain: str
    """The role's own certificate."""
    key: str = field(repr=False)
    """All three are PEM."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**data)


class Secret(bytes):
    """A run's secret, and beside it the certificate that this role shows, if the run has TLS.

    It is the secret itself, so that code which passes the secret on passes both on.
    """

    certificate: Certificate | None

    def __new__(cls, value: bytes, certificate: Certificate | None = None) -> Self:
        """Put them together."""
        made = super().__new__(cls, value)
        made.certificate = certificate
        return made

    @staticmethod
    def certificate_of(secret: bytes) -> Certificate | None:
        """What goes with a secret; None without TLS."""
        return secret.certificate if isinstance(secret, Secret) else None


@dataclass(frozen=True)
class Named:
    """What a certificate says."""

    run: str
    role: str
    hosts: tuple[str, ...]
    """Where it is good; empty: anywhere."""
    expires_s: float
    """Unix time."""


class SecureSocket:
    """A connected socket under TLS, with as much of a socket's interface as links use.

    One thread may send while another receives. What was received with something else and is still to be read
    does not make the descriptor readable: ask `waiting` before you sleep on it.
    """

    def __init__(self, sock: socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO):
        self.family = sock.family
        self._sock = sock
        self.tls = tls
        self._incoming = incoming
        self.outgoing = outgoing
        self._lock = threading.Lock()
        self._starved = False
        """What was received is only the beginning of a record."""
        self._room = memoryview(bytearray(_CHUNK_BYTES))

    @functools.cached_property
    def named(self) -> Named:
        """What the other side's certificate says. Raises AuthError if it is none of a run's."""
        return _named(self.tls)

    @property
    def waiting(self) -> bool:
        """Whether received data is still to be read, without more from the socket."""
        with self._lock:
            return bool(self.tls.pending() or (self._incoming.pending and not self._starved))

    def sendall(self, data: bytes | memoryview) -> None:
        """As a socket's."""
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            end = min(len(view), done + _CHUNK_BYTES)
            with self._lock:
                while done < end:
                    done += self.tls.write(view[done:end])
                sealed = self.outgoing.read()
            self._sock.sendall(sealed)

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """As a socket's; as much as is there, at least a byte. No flag has a meaning here."""
        room = buffer[:nbytes] if nbytes else buffer
        received = 0
        while True:
            with self._lock:
                if count := self._decrypt(room):
                    return count
            try:
                received = self._sock.recv_into(self._room)
            except TimeoutError:
                if received:
                    raise ConnectionError("it stopped in the middle of something") from None
                raise
            if not received:
                return 0  # frames say how long they are: an early end is no end of one
            self._take(received)

    def recv_now(self, buffer: memoryview) -> int:
        """As `recv_into`, without waiting. BlockingIOError: nothing that could be read is here."""
        while True:
            with self._lock:
                if count := self._decrypt(buffer):
                    return count
            if not (received := os.readv(self._sock.fileno(), [self._room])):
                return 0
            self._take(received)

    def _take(self, received: int) -> None:
        with self._lock:
            self._incoming.write(self._room[:received])
            self._starved = False

    def _decrypt(self, room: memoryview) -> int:
        """How many bytes could be read; 0: more must be received first."""
        done, count = 0, 1
        try:
            while done < len(room) and count:
                got: Any = self.tls.read(len(room) - done, room[done:])  # a count, with a buffer
                count = int(got)
                done += count
        except ssl.SSLWantReadError:
            self._starved = True
        except ssl.SSLError as error:
            raise ConnectionError(_told(error)) from error
        return done

    def recv(self, nbytes: int) -> bytes:
        """As a socket's."""
        room = memoryview(bytearray(nbytes))
        return bytes(room[: self.recv_into(room)])

    def replace(self, sock: socket) -> None:
        """Go on over another socket that leads to the same place. No thread may be using this one."""
        self._sock = sock

    @property
    def carrier(self) -> socket:
        """The socket underneath."""
        return self._sock

    def fileno(self) -> int:
        """For selectors; see `waiting`."""
        return self._sock.fileno()

    def getsockname(self) -> Any:
        """As a socket's."""
        return self._sock.getsockname()

    def getpeername(self) -> Any:
        """As a socket's."""
        return self._sock.getpeername()

    def gettimeout(self) -> float | None:
        """As a socket's."""
        return self._sock.gettimeout()

    def settimeout(self, seconds: float | None) -> None:
        """As a socket's."""
        self._sock.settimeout(seconds)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """As a socket's."""
        self._sock.setsockopt(level, name, value)

    def shutdown(self, how: int) -> None:
        """As a socket's."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """As a socket's. Says no farewell: frames end by themselves."""
        self._sock.close()


Stream = socket | SecureSocket
"""What a link is carried by."""


def secure(sock: socket, certificate: Certificate, *, listening: bool, within_s: float) -> SecureSocket:
    """Speak TLS on a connected TCP socket, and see whose certificate the other side has.

    Which role it may be is for the caller to say: see `SecureSocket.named`.

    Raises:
        AuthError: it is not of this run; the socket is still open.
        OSError: the connection broke.
    """
    found = shake_hands(sock, context_of(certificate, listening), listening=listening, within_s=within_s)
    if found.named.run != certificate.run:
        raise AuthError(
            f"the other side's certificate is for run {found.named.run!r}, and this is run "
            f"{certificate.run!r}"
        )
    return found


def shake_hands(sock: socket, context: ssl.SSLContext, *, listening: bool, within_s: float) -> SecureSocket:
    """Speak TLS on a connected TCP socket. Raises as `secure`."""
    deadline = time.monotonic() + within_s
    # Small messages follow one another here: without this the second waits for the first to be confirmed.
    sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=listening)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            sock.sendall(outgoing.read())
            data = _receive(sock, deadline)
            if not data:
                raise PeerBusy(
                    "the other side closed the connection instead of speaking TLS; if it belongs to this "
                    "run, it was started without --tls, or its log says why"
                ) from None
            incoming.write(data)
        except ssl.SSLError as error:
            _say_why(sock, outgoing, deadline)
            raise AuthError(_refusal(error)) from None
    sock.sendall(outgoing.read())
    return SecureSocket(sock, tls, incoming, outgoing)


def inspect(certificate: Certificate) -> Named:
    """What a certificate says, if it would be accepted today: it is shown to itself, in memory.

    Raises:
        AuthError: it would be refused.
        ssl.SSLError: it is no certificate, or the key is not its key.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        context_of(certificate, False).wrap_bio(back, there, server_side=False),
        context_of(certificate, True).wrap_bio(there, back, server_side=True),
    )
    try:
        for end in (*ends, ends[0]):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        raise AuthError(_refusal(error)) from None
    return _named(ends[0])


@functools.lru_cache(maxsize=16)
def context_of(certificate: Certificate, listening: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listening else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The URI names the role, and `connect` looks at the host's name if the certificate has any.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.authority)
    with as_file(certificate.chain + certificate.key) as path:
        context.load_cert_chain(path)
    if listening:
        context.num_tickets = 0  # links are not taken up again
    return context


@contextlib.contextmanager
def as_file(text: str) -> Iterator[str]:
    """Context manager: a path for APIs that take nothing else; on Linux of no file on a disk."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("certificate"), "w") as file:
            file.write(text)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile("w") as file:  # mode 0600
            file.write(text)
            file.flush()
            yield file.name


def _receive(sock: socket, deadline: float) -> bytes:
    left = deadline - time.monotonic()
    try:
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        return sock.recv(_CHUNK_BYTES)
    except TimeoutError:
        raise AuthError("the other side went silent before it authenticated (TLS)") from None


def _say_why(sock: socket, outgoing: ssl.MemoryBIO, deadline: float) -> None:
    """Send the alert, and wait for the other side to go: a socket closed with something unread in it would
    take the alert back."""
    until = min(deadline, time.monotonic() + _FAREWELL_S)
    with contextlib.suppress(OSError, AuthError):
        sock.sendall(outgoing.read())
        sock.shutdown(SHUT_WR)
        while _receive(sock, until):
            pass


def _named(tls: ssl.SSLObject) -> Named:
    """What the other side's certificate says. Raises AuthError if it is none of ours."""
    shown: Any = tls.getpeercert() or {}
    names = shown.get("subjectAltName", ())
    uris = [value for kind, value in names if kind == "URI" and value.startswith(_SCHEME)]
    run, _, role = uris[0].removeprefix(_SCHEME).partition("/") if len(uris) == 1 else ("", "", "")
    if not run or role not in ROLES:
        raise AuthError("the other side's certificate names no run and role; make them with `paceline certs`")
    hosts = tuple(value for kind, value in names if kind in ("DNS", "IP Address"))
    return Named(run, role, hosts, ssl.cert_time_to_seconds(shown["notAfter"]))


def _refusal(error: ssl.SSLError) -> str:
    """Why the TLS handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code == _VERIFY_EXPIRED:
            return "the other side's certificate has expired"
        if code == _VERIFY_NOT_YET:
            return "the other side's certificate is not valid yet; is a clock wrong?"
        if code in _VERIFY_AUTHORITY:
            return "the other side's certificate is signed by another authority than this run's"
        return f"the other side's certificate is refused: {error.verify_message}"
    reason = error.reason or str(error)
    if "ALERT" in reason:
        return _told(error)
    known = _REFUSED_BY_US.get(
        reason, f"it does not speak TLS (a port scan, or a role without --tls?): {reason}"
    )
    return f"the other side cannot be authenticated: {known}"


def _told(error: ssl.SSLError) -> str:
    """What an error on a link that had been made means: mostly what the other side said about us."""
    reason = error.reason or str(error)
    if "ALERT" not in reason:
        return f"what arrived was damaged on its way ({reason})"
    for alert, words in _ALERTS.items():
        if reason.endswith(alert):
            return f"the other side refused this role's certificate: {words}"
    return f"the other side refused this role: {reason}"
