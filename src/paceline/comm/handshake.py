"""Both sides prove that they know the run's secret before anything else is read; with TLS, inside it.

    connecting side → "PACELINE" version nonce(32)
    listening side  → nonce(32) proof(32)        proof = HMAC(secret, "listen" both nonces)
    connecting side → proof(32)                  proof = HMAC(secret, "connect" both nonces)

All messages have a fixed size. The listening side proves itself first, so a worker never talks to
an impostor; the keys of the two directions come from the secret and both nonces. The whole exchange
has one deadline, so that a stranger who sends a byte now and then gains nothing.
"""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass

from paceline.comm.tls import Stream
from paceline.exceptions import AuthError, PeerBusy

__all__ = ["Keys", "accept", "initiate", "new_secret", "receive_exactly"]

_GREETING = b"PACELINE\x01"
_NONCE_BYTES = 32


@dataclass(frozen=True)
class Keys:
    """Keys of one connection as seen from one side."""

    send: bytes
    receive: bytes


def new_secret() -> bytes:
    """A fresh secret for a run."""
    return secrets.token_bytes(32)


def initiate(sock: Stream, secret: bytes, *, within_s: float) -> Keys:
    """Authenticate as the connecting side. Raises AuthError."""
    deadline = time.monotonic() + within_s
    sock.settimeout(within_s)
    mine = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(_GREETING + mine)
    answer = receive_exactly(sock, _NONCE_BYTES + 32, "while authenticating", deadline)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _derive(secret, b"listen", mine, theirs)):
        raise AuthError(
            "the other side does not know this run's secret: it belongs to another run, or is an impostor"
        )
    sock.sendall(_derive(secret, b"connect", mine, theirs))
    return Keys(
        send=_derive(secret, b"key connect", mine, theirs),
        receive=_derive(secret, b"key listen", mine, theirs),
    )


def accept(sock: Stream, secret: bytes, *, within_s: float) -> Keys:
    """Authenticate as the listening side. Raises AuthError; says nothing to a stranger."""
    deadline = time.monotonic() + within_s
    sock.settimeout(within_s)
    greeting_bytes = len(_GREETING) + _NONCE_BYTES
    hello = receive_exactly(sock, greeting_bytes, "before it authenticated", deadline)
    if not hello.startswith(_GREETING):
        raise AuthError("the other side does not speak Paceline's protocol (a port scan?)")
    theirs, mine = hello[len(_GREETING) :], secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(mine + _derive(secret, b"listen", theirs, mine))
    proof = receive_exactly(sock, 32, "before it proved that it knows the secret", deadline)
    if not hmac.compare_digest(proof, _derive(secret, b"connect", theirs, mine)):
        raise AuthError("the other side does not know this run's secret")
    return Keys(
        send=_derive(secret, b"key listen", theirs, mine),
        receive=_derive(secret, b"key connect", theirs, mine),
    )


def receive_exactly(sock: Stream, count: int, when: str, deadline: float) -> bytes:
    """`count` bytes before the deadline, or AuthError saying when the other side stopped: PeerBusy if it
    closed the connection."""
    data = b""
    while len(data) < count:
        try:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            sock.settimeout(left)
            piece = sock.recv(count - len(data))
        except TimeoutError:
            raise AuthError(f"the other side went silent {when}") from None
        except OSError as error:
            raise PeerBusy(f"the connection broke {when}: {error}") from None
        if not piece:
            raise PeerBusy(
                f"the other side closed the connection {when}; if it belongs to this run, the secrets differ"
            )
        data += piece
    return data


def _derive(secret: bytes, purpose: bytes, connecting: bytes, listening: bytes) -> bytes:
    return hmac.digest(secret, purpose + b"\0" + connecting + listening, hashlib.sha256)
