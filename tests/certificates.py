"""Certificates for tests: good ones, made once, and those that must be refused."""

import functools
from datetime import timedelta

from paceline.comm import Secret
from paceline.comm.certificates import Authority
from paceline.comm.tls import Certificate
from tests.links import SECRET

RUN = "a-run"


@functools.cache
def authority(run: str, number: int) -> Authority:
    """The authority of a run; another `number` is another authority that says it is the same."""
    return Authority.new(run)


@functools.cache
def certificate(
    role: str, run: str = RUN, *, number: int = 0, hours: float = 24.0, hosts: tuple[str, ...] = ()
) -> Certificate:
    """A role's certificate; with `hours` below 0 it has expired."""
    return authority(run, number).issue(role, lasting=timedelta(hours=hours), hosts=hosts)


def secret(role: str, *args: object, value: bytes = SECRET, **settings: object) -> Secret:
    """What a role of a run with TLS knows."""
    return Secret(value, certificate(role, *args, **settings))  # type: ignore[arg-type]
