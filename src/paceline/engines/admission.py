"""How an agent and the controller meet: TLS with a pinned certificate, proofs of the token's secret, and a
look
at the host that comes.

    agent      → controller   TCP, TLS 1.3; the agent compares the certificate's fingerprint with its token's
    both                      prove that they know the token's secret (comm/handshake.py)
    agent      → controller   HELLO: versions; HOST: the host
    controller → agent        ERROR: why not; or WELCOME, and the program
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from paceline.comm import Certificate, Connection, Frame, Kind, handshake
from paceline.comm.errors import error_of
from paceline.comm.frames import field
from paceline.comm.pinned_tls import secure_pinned, secure_shown
from paceline.engines.agent_messages import FIRST_WORD, PROTOCOL, TO_AGENT, HostAdmitted, HostHello
from paceline.engines.base import HostInfo
from paceline.engines.join_token import JoinToken
from paceline.exceptions import AuthError, LinkError, UsageError

__all__ = ["admit", "check_newcomer", "host_identity", "join", "own_version", "read_newcomer"]

HANDSHAKE_S = 5.0
REACH_S = 3.0
"""How long the controller tries to reach a newcomer."""
_MOST_CLOCK_S = 3600.0
"""Difference of two hosts' clocks that is still accepted: certificates are valid from a day before."""


def own_version() -> str:
    """The version of Paceline that is installed here; empty where it runs from a source tree alone."""
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return ""


def host_identity() -> str:
    """Another one for every host, the same for all processes of one: of the boot and of its network.

    Containers and network namespaces of one machine are hosts of their own."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text().strip()}/{network.stat().st_ino}"
    except OSError:
        return socket.gethostname()


# --- the controller's side ------------------------------------------------------------------------------


def admit(sock: socket.socket, certificate: Certificate, secret: bytes) -> Connection:
    """Authenticate a connection just accepted. Blocking, bounded in time.

    Raises:
        AuthError: it does not know the token; the socket is closed.
    """
    try:
        stream = secure_shown(sock, certificate, within_s=HANDSHAKE_S)
        connection = Connection(stream, handshake.accept(stream, secret, within_s=HANDSHAKE_S))
    except (AuthError, OSError) as error:
        sock.close()
        if isinstance(error, AuthError):
            raise
        raise AuthError(f"the connection broke while authenticating: {error}") from error
    connection.sock.settimeout(HANDSHAKE_S)
    return connection


def read_newcomer(connection: Connection) -> HostHello:
    """What an authenticated newcomer says of its host. Raises LinkError, UsageError for another version."""
    hello = connection.receive()
    if hello.kind is not Kind.HELLO or field(hello.body, "role", str) != "agent":
        raise LinkError(f"{hello.kind.name} instead of the HELLO of an agent")
    version, protocol = field(hello.body, "version", str), field(hello.body, "protocol", int)
    if (version, protocol) != (own_version(), PROTOCOL):
        raise UsageError(
            f"the agent is of Paceline {version:.40} (protocol {protocol}), and the run of {own_version()} "
            f"(protocol {PROTOCOL}): install the same version on both hosts"
        )
    frame = connection.receive()
    return FIRST_WORD.read(frame.kind, frame.body)


def check_newcomer(hello: HostHello, seen_at: str, now: float) -> None:
    """Refuse a host that the run could not work with; tries to reach it.

    Args:
        seen_at: its address, as this host sees it.
        now: Unix time.

    Raises:
        UsageError: why, and what to do.
    """
    behind = now - hello.unix_s
    if abs(behind) > _MOST_CLOCK_S:
        raise UsageError(
            f"the clock of {hello.name} is {abs(behind) / 3600:.1f} hours "
            f"{'behind' if behind > 0 else 'ahead'} "
            "of the controller's, so certificates would be refused: set it (NTP)"
        )
    if hello.address != seen_at:
        raise UsageError(
            f"{hello.name} has the address {hello.address}, and the controller sees it at {seen_at}: "
            "something "
            "between them changes addresses (NAT, a proxy), so its roles could not be reached back. Use a "
            "network in which the hosts reach each other directly"
        )
    try:
        socket.create_connection((hello.address, hello.port), timeout=REACH_S).close()
    except OSError as error:
        raise UsageError(
            f"{hello.name} cannot be reached back at {hello.address}, port {hello.port}: {error}. Its roles "
            "listen on ports that the system chooses: allow connections between the hosts (firewall)"
        ) from None


# --- the agent's side -----------------------------------------------------------------------------------


def join(
    host: str, port: int, token: JoinToken, *, identity: str | None = None
) -> tuple[Connection, HostAdmitted]:
    """Join a run.

    Args:
        identity: in the place of `host_identity`, for tests.

    Raises:
        LinkError: nothing answers there.
        AuthError: what answers there is not the run of the token.
        PacelineError: the controller refused this host, and says why.
    """
    where = f"{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=HANDSHAKE_S)
    except OSError as error:
        raise LinkError(
            f"nothing answers at {where}: {error}. See that the run waits there (`paceline run --listen …`) "
            "and "
            "that no firewall is between"
        ) from None
    connection: Connection | None = None
    try:
        try:
            stream = secure_pinned(sock, token.fingerprint, within_s=HANDSHAKE_S)
            connection = Connection(stream, handshake.initiate(stream, token.secret, within_s=HANDSHAKE_S))
        except AuthError as error:
            raise AuthError(
                f"{where} is not the run of this token ({token.run}): {error}. Copy the token of this start "
                "of "
                "the run"
            ) from None
        connection.peer = "the controller"
        connection.sock.settimeout(HANDSHAKE_S + REACH_S)
        with _reachable(str(sock.getsockname()[0])) as reached_at:
            connection.send(Kind.HELLO, {"role": "agent", "version": own_version(), "protocol": PROTOCOL})
            connection.tell(_hello(*reached_at, identity or host_identity()))
            return connection, _welcome(connection.receive())
    except BaseException as error:
        if connection is not None:
            connection.close()
        sock.close()
        if isinstance(error, OSError):  # a timeout, too
            raise LinkError(f"the connection to {where} broke while joining: {error}") from error
        raise


def _welcome(frame: Frame) -> HostAdmitted:
    if frame.kind is Kind.ERROR:
        raise error_of(frame.body)
    said = TO_AGENT.read(frame.kind, frame.body)
    if not isinstance(said, HostAdmitted):
        raise LinkError(f"{frame.kind.name} instead of a welcome")
    return said


def _hello(address: str, port: int, identity: str) -> HostHello:
    own = HostInfo.own()
    return HostHello(own.name, identity, address, port, own.cores, own.memory, time.time())


@contextlib.contextmanager
def _reachable(address: str) -> Iterator[tuple[str, int]]:
    """Context manager: address and port at which this host can be reached meanwhile."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=4) as listener:
        yield address, listener.getsockname()[1]
