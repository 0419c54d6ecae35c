"""HostilePeer: a process that holds a run's secret and breaks the protocol, for tests of any run.

    engine = KeptEngine()          # knows the secret of the run that it started last
    with HostilePeer.of(engine) as hostile:
        for attack in ATTACKS:
            hostile.attack(attack)

It is not a process of the run: it dials the run's servers and its controller as one of its workers would. The
run must go on as if it were not there, or name it and end. `ATTACKS` are what it can do; each holds its
connections open until `close`, so that what it blocks stays blocked.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

from paceline.comm import Address, Connection, Kind, connect
from paceline.comm.frames import Body, encode
from paceline.exceptions import LinkError
from paceline.testing.engine import KeptEngine

__all__ = ["ATTACKS", "HostilePeer"]

_BIG_BYTES = 16 << 20
_PATIENCE_S = 10.0


class HostilePeer:
    """Attacks the servers and the controller of one run.

    Args:
        secret: of the run.
        targets: role names, and where they listen.
    """

    def __init__(self, secret: bytes, targets: dict[str, Address]) -> None:
        self.secret = secret
        self.targets = targets
        self.refusals: list[str] = []
        """What it was told."""
        self._held: list[Connection] = []

    @classmethod
    def of(cls, engine: KeptEngine, link: str = "auto") -> "HostilePeer":
        """One against the run that an engine runs now, by unix sockets or by TCP. Its servers must listen."""
        return cls(engine.secret, engine.listening(link))

    def __enter__(self) -> "HostilePeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all connections."""
        while self._held:
            self._held.pop().close()

    def attack(self, name: str) -> None:
        """Do one of `ATTACKS` to every role that listens."""
        for target in self.targets:
            with contextlib.suppress(LinkError, OSError):  # it hangs up on us: as it should
                ATTACKS[name](self, target)

    def dial(self, target: str, hello: dict[str, Any] | None = None) -> Connection:
        """Connect and authenticate, as worker 0 or as `hello` says."""
        address = self.targets[target]
        link = "tcp" if address.unix is None else "auto"
        connection = connect(address, self.secret, peer=target, link=link, redial_s=_PATIENCE_S)
        self._held.append(connection)
        connection.sock.settimeout(_PATIENCE_S)
        connection.send(
            Kind.HELLO, {"role": "worker", "rank": 0, "incarnation": 0, "pid": 1, **(hello or {})}
        )
        return connection

    def hear(self, connection: Connection) -> None:
        """Note what a target says, until it hangs up or says nothing more for a moment."""
        connection.sock.settimeout(0.1)
        with contextlib.suppress(LinkError, TimeoutError):
            while True:
                self.refusals.append(str(connection.receive().body.get("message", "")))


def _wrong_layout(peer: HostilePeer, target: str) -> None:
    link = peer.dial(target)
    link.send(Kind.ATTACH, {"fingerprint": "0" * 64, "incarnation": 0, "carrier": "inline", "pid": 1})
    peer.hear(link)


def _another_identity(peer: HostilePeer, target: str) -> None:
    for hello in (
        {"rank": 0, "incarnation": 10**6},  # in the place of worker 0
        {"rank": 0, "incarnation": 0, "resume": 0, "token": "0" * 32},  # on with worker 0's link
        {"rank": 99},
        {"rank": -5},
        {"role": "worker:5"},
        {"role": "server", "rank": 99, "fresh": True, "address": {}, "position": 0},
    ):
        with contextlib.suppress(LinkError, TimeoutError):
            peer.hear(peer.dial(target, hello))


def _flood(peer: HostilePeer, target: str) -> None:
    """Questions whose answers it does not read."""
    link = peer.dial(target)
    for _ in range(20_000):
        link.send(Kind.PROBE)


def _slow_reader(peer: HostilePeer, target: str) -> None:
    """Asks for large answers, and reads none of them."""
    link = peer.dial(target)
    for _ in range(400):
        link.send(Kind.STATE, {})


def _half_messages(peer: HostilePeer, target: str) -> None:
    """Stops in the middle: of a header, of a body, and of 16 MB."""
    for kind, nbytes, share in ((Kind.TAKE, 0, 0.1), (Kind.TAKE, 0, 0.9), (Kind.SAVED, _BIG_BYTES, 1.0)):
        link = peer.dial(target)
        state = link.socket_state
        data = encode(kind, {"x": "y" * 500}, sequence=state.sent, payload_bytes=nbytes, key=state.keys.send)
        link.sock.sendall(data[: int(len(data) * share)])
        with contextlib.suppress(OSError):
            link.sock.sendall(bytes(nbytes // 2))


def _lies(peer: HostilePeer, target: str) -> None:
    """Says that it has trained a great deal, without a place in the run."""
    link = peer.dial(target)
    claims: Body = {
        "n": 1,
        "sequence": 0,
        "read_version": 0,
        "samples": 10**17,
        "leases": [],
        "logged": -3360,
    }
    link.send(Kind.PUSH, claims)
    peer.hear(link)


def _nonsense(peer: HostilePeer, target: str) -> None:
    """Every kind of message, with a body that is none of it."""
    for kind in Kind:
        with contextlib.suppress(LinkError, TimeoutError):
            link = peer.dial(target)
            link.send(kind, {"rank": [], "leases": [{}], "samples": 10**300, "settings": [{"betas": ["x"]}]})


def _crowd(peer: HostilePeer, target: str) -> None:
    """A stranger's part: 100 connections that never authenticate."""
    address = peer.targets[target]
    with contextlib.ExitStack() as held:
        for _ in range(100):
            held.enter_context(_idle(address))


@contextlib.contextmanager
def _idle(address: Address) -> Iterator[None]:
    with contextlib.closing(socket.socket(socket.AF_INET if address.port else socket.AF_UNIX)) as sock:
        sock.settimeout(_PATIENCE_S)
        with contextlib.suppress(OSError):
            sock.connect((address.host, address.port) if address.port else f"\0{address.unix}")
        yield


ATTACKS: Final[dict[str, Callable[[HostilePeer, str], None]]] = {
    "wrong layout": _wrong_layout,
    "another's identity": _another_identity,
    "flood": _flood,
    "slow reader": _slow_reader,
    "half messages": _half_messages,
    "lies about samples": _lies,
    "nonsense": _nonsense,
    "crowd": _crowd,
}
