"""TLS 1.3 between two sides of which one knows nothing but the fingerprint of the other's certificate.

So an agent joins a run: its token names the fingerprint (SHA-256 of the certificate as DER), which is
compared before anything is sent through the link. No authority is asked and no date is read: the certificate
is made for this one use, and the clocks of two hosts may differ. The side that connects shows no certificate;
it proves what it is inside the link (`comm/handshake.py`, with the token's secret).
"""

import hashlib
import hmac
import ssl
from socket import socket

from paceline.comm.tls import Certificate, SecureSocket, as_file, shake_hands
from paceline.exceptions import AuthError

__all__ = ["fingerprint_of", "secure_pinned", "secure_shown"]


def fingerprint_of(certificate: Certificate) -> str:
    """SHA-256 of the certificate itself, as hex."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.chain)).hexdigest()


def secure_shown(sock: socket, certificate: Certificate, *, within_s: float) -> SecureSocket:
    """The listening side: show this certificate, and ask for none. Raises AuthError, OSError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    with as_file(certificate.chain + certificate.key) as path:
        context.load_cert_chain(path)
    return shake_hands(sock, context, listening=True, within_s=within_s)


def secure_pinned(sock: socket, fingerprint: str, *, within_s: float) -> SecureSocket:
    """The connecting side: the other one must have the certificate with this fingerprint.

    Raises:
        AuthError: it has another one, or speaks no TLS. Nothing was sent through the link.
        OSError: the connection broke.
    """
    stream = shake_hands(sock, _context(ssl.PROTOCOL_TLS_CLIENT), listening=False, within_s=within_s)
    shown = stream.tls.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(shown).hexdigest(), fingerprint):
        raise AuthError(
            "the certificate shown there is not the one that the token names: the token is of another run "
            "or start of a run, or an impostor listens there"
        )
    return stream


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint is compared instead
    return context
