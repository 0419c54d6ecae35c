"""Certificates of a run: made for it when it starts, or beforehand by `paceline certs`, and read back.

    DIR/
      ca.pem, ca.key               the run's own authority; its key is needed only to make more certificates
      controller.pem, .key         one for each role; keys are their owner's only (0600)
      server.pem, .key
      worker.pem, .key

What a run makes for itself is on no disk, and its authority's key is forgotten once every role has its own.
Making certificates needs the package `cryptography`; reading and using them does not.
"""

import os
import re
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from paceline.comm.tls import ROLES, Certificate, inspect
from paceline.exceptions import AuthError, PlanError, UsageError

__all__ = ["Authority", "Certificates", "check_can_make", "check_name", "make_directory"]

DAYS = 30
"""How long certificates of `paceline certs` last, unless it is told."""

_OWN_DAYS = 365
"""Of a run's own: longer than runs last, and gone with them."""
_AUTHORITY_DAYS = 3650
_BEFORE = timedelta(days=1)
"""Valid from before it was made: other hosts' clocks differ."""
_AUTHORITY = "authority"


class Authority:
    """Signs certificates for one run. Needs `cryptography`."""

    def __init__(self, run: str, certificate: Any, key: Any) -> None:
        self.run = run
        self.certificate = certificate
        self.key = key

    @classmethod
    def new(cls, run: str) -> Self:
        """One with a new key.

        Raises:
            UsageError: `run` cannot stand in a certificate.
            PlanError: the package is missing.
        """
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

        check_name(run)
        key = generate_private_key(SECP256R1())
        ends = datetime.now(UTC) + timedelta(days=_AUTHORITY_DAYS)
        return cls(run, _signed(run, _AUTHORITY, key.public_key(), None, key, ends, ()), key)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The one that `write` left in a directory. Raises UsageError."""
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            private = _private(directory / "ca.key")
            certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
            key = load_pem_private_key(private.encode(), password=None)
        except UsageError:
            raise
        except (OSError, ValueError, x509.ExtensionNotFound) as error:
            raise UsageError(
                f"{directory} has an authority (ca.pem) that cannot be used: {error}. Name another "
                "directory, or delete this one to begin anew"
            ) from None
        if certificate.not_valid_after_utc < datetime.now(UTC):
            raise UsageError(
                f"the authority in {directory} (ca.pem) has expired: name another directory, or delete this "
                "one to begin anew"
            )
        return cls(uri.removeprefix("paceline://").partition("/")[0], certificate, key)

    @property
    def pem(self) -> str:
        """Its certificate."""
        return _pem(self.certificate)

    def issue(self, role: str, *, lasting: timedelta, hosts: Sequence[str] = ()) -> Certificate:
        """A certificate for a role, with a new key.

        Args:
            lasting: from now.
            hosts: names or addresses; the certificate is good for listeners there. Empty: anywhere.
        """
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

        key = generate_private_key(SECP256R1())
        ends = min(datetime.now(UTC) + lasting, self.certificate.not_valid_after_utc)
        made = _signed(self.run, role, key.public_key(), self.certificate, self.key, ends, hosts)
        return Certificate(run=self.run, role=role, authority=self.pem, chain=_pem(made), key=_key_pem(key))

    def write(self, directory: Path) -> None:
        """Keep it, with its key."""
        _write(directory / "ca.key", _key_pem(self.key), 0o600)
        _write(directory / "ca.pem", self.pem, 0o644)


@dataclass(frozen=True)
class Certificates:
    """Those of all roles of a run."""

    by_role: dict[str, Certificate]

    @classmethod
    def for_run(cls, run: str) -> Self:
        """New ones. No other can be made: the authority's key is forgotten."""
        authority = Authority.new(run)
        lasting = timedelta(days=_OWN_DAYS)
        return cls({role: authority.issue(role, lasting=lasting) for role in ROLES})

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Those that `paceline certs` wrote, if every one of them would be accepted today.

        Raises:
            UsageError: what is wrong, with which file, and what to do.
        """
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "does not exist"
            raise UsageError(
                f"certs {str(directory)!r} {what}; name the directory that `paceline certs DIR --run NAME` "
                "made"
            )
        found = {role: _read(directory, role) for role in ROLES}
        if len({certificate.run for certificate in found.values()}) > 1:
            runs = ", ".join(f"{role}.pem {each.run!r}" for role, each in found.items())
            raise UsageError(
                f"the certificates in {directory} are for different runs: {runs}. Make them anew"
            )
        return cls(found)

    @property
    def run(self) -> str:
        """The run that they name."""
        return self.by_role["server"].run

    @property
    def expires(self) -> datetime:
        """When the first of them does."""
        return datetime.fromtimestamp(min(inspect(each).expires_s for each in self.by_role.values()), UTC)


def make_directory(
    directory: Path, run: str, *, roles: Sequence[str] = ROLES, days: int = DAYS, hosts: Sequence[str] = ()
) -> list[Path]:
    """Write certificates for some roles of a run, by the authority in the directory or a new one.

    Certificates that are there are replaced; those of other roles stay. Returns what was written.

    Raises:
        UsageError: a bad name, role, number of days, or a directory of another run's certificates.
        PlanError: it cannot be written, or the package is missing.
    """
    check_can_make()
    check_name(run)
    if days < 1 or days > _AUTHORITY_DAYS:
        raise UsageError(f"--days {days}: give from 1 to {_AUTHORITY_DAYS}")
    for role in roles:
        if role not in ROLES:
            raise UsageError(f"--role {role!r}: there is no such role. Valid: {', '.join(ROLES)}")
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9a-fA-F:]{2,39}", host):
            raise UsageError(f"--host {host!r} is neither a host's name nor an address")
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (directory / "ca.pem").exists():
            authority = Authority.read(directory)
            if authority.run != run:
                raise UsageError(
                    f"{directory} holds the certificates of run {authority.run!r}, not of {run!r}: name "
                    "another directory, so that neither run accepts the other's roles"
                )
        else:
            authority = Authority.new(run)
            authority.write(directory)
            written += [directory / "ca.pem", directory / "ca.key"]
        for role in roles:
            made = authority.issue(role, lasting=timedelta(days=days), hosts=hosts)
            for name, text, mode in ((f"{role}.key", made.key, 0o600), (f"{role}.pem", made.chain, 0o644)):
                _write(directory / name, text, mode)
                written.append(directory / name)
    except OSError as error:
        raise PlanError(
            f"cannot write certificates to {directory}: {error.strerror or error}. Name a directory that you "
            "may write to"
        ) from error
    return written


def check_can_make() -> None:
    """PlanError if the package that makes certificates is missing."""
    if find_spec("cryptography") is None:
        raise PlanError(
            "making certificates needs the package cryptography: pip install 'paceline[tls]'. Certificates "
            "that were made elsewhere (paceline certs) can be used without it: --certs DIR"
        )


def check_name(run: str) -> None:
    """UsageError if a run of that name cannot stand in a certificate."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run):
        raise UsageError(
            f"run {run!r} cannot stand in a certificate: use letters, digits, '.', '_' and '-', at most 100"
        )


def _read(directory: Path, role: str) -> Certificate:
    advice = f"`paceline certs {directory} --run NAME` makes them"
    texts = {}
    for name in ("ca.pem", f"{role}.pem", f"{role}.key"):
        path = directory / name
        try:
            texts[name] = _private(path) if name.endswith(".key") else path.read_text()
        except FileNotFoundError:
            raise UsageError(f"certs {str(directory)!r} lacks {name}; {advice}") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UsageError(f"{path} cannot be read: {reason}; {advice}") from None
    ca, chain, key = texts.values()
    path = directory / f"{role}.pem"
    try:
        named = inspect(Certificate(run="", role=role, authority=ca, chain=chain, key=key))
    except AuthError as error:
        reason = str(error).removeprefix("the other side's certificate ").replace("this run's", "ca.pem")
        raise UsageError(f"the certificate {path} {reason}; {advice}") from None
    except (ssl.SSLError, ValueError) as error:
        mismatch = "MISMATCH" in str(error)
        what = f"{role}.key is not its key" if mismatch else f"it, {role}.key or ca.pem is no PEM file"
        raise UsageError(f"the certificate {path} cannot be used: {what}; {advice}") from None
    if named.role != role:
        raise UsageError(f"the certificate {path} is a {named.role}'s, not a {role}'s; {advice}")
    return Certificate(run=named.run, role=role, authority=ca, chain=chain, key=key)


def _private(path: Path) -> str:
    """A key file's text. Raises UsageError if others may read it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise UsageError(
            f"the key {path} may be read by others (mode {mode:04o}): if it may have been, make new "
            f"certificates; else chmod 600 {path}"
        )
    return path.read_text()


def _write(path: Path, text: str, mode: int) -> None:
    """Replace a file at once; never readable by more than `mode` says, not even for a moment."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    partial.replace(path)


def _signed(
    run: str, role: str, public: Any, issuer: Any, key: Any, ends: datetime, hosts: Sequence[str]
) -> Any:
    """A certificate; `issuer` is None for the authority's own."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])

    names: list[Any] = [x509.UniformResourceIdentifier(f"paceline://{run}/{role}")]
    for host in hosts:
        try:
            names.append(x509.IPAddress(ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    authority = issuer is None
    starts = min(datetime.now(UTC), ends) - _BEFORE
    builder = (
        x509.CertificateBuilder()
        .subject_name(name(f"paceline {role} of {run}"))
        .issuer_name(name(f"paceline {role} of {run}") if authority else issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(starts)
        .not_valid_after(ends)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=not authority,
                key_cert_sign=authority,
                crl_sign=authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    if not authority:
        # Any role may connect and listen: which role it is says the name.
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
    return builder.sign(key, SHA256())


def _pem(certificate: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return str(certificate.public_bytes(Encoding.PEM).decode())


def _key_pem(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return str(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode())
