"""TLS of a job: what cannot be had is refused before anything starts, and certificates are made or read."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.comm.certificates import DAYS as CERTIFICATE_DAYS
from paceline.comm.certificates import Certificates, check_can_make
from paceline.comm.tls import Certificate
from paceline.exceptions import UsageError
from paceline.plan.job import Job

if TYPE_CHECKING:
    from paceline.plan.plan import Plan

__all__ = ["CERTIFICATE_DAYS", "certificates_of", "check_tls"]

_SOON = timedelta(days=1)


def check_tls(job: Job, run_id: str | None) -> list[str]:
    """Warnings about a job's TLS.

    Args:
        run_id: of the run that goes on; None for a new one.

    Raises:
        UsageError: its certificates will not do.
        PlanError: what makes certificates is missing.
    """
    if not job.tls:
        return []
    found = []
    if job.certs is None:
        check_can_make()
    else:
        certificates = Certificates.read(Path(job.certs))
        _check_names_run(certificates, job, run_id)
        ends = certificates.expires
        if ends - datetime.now(UTC) < _SOON:
            found.append(
                f"the certificates in {job.certs} expire at {ends:%Y-%m-%d %H:%M} UTC; a role that is "
                "replaced after that is refused"
            )
    if job.link != "tcp" and job.hosts == 1:
        found.append(
            "tls protects TCP links, and this run will have none: its roles are on one host and meet on unix "
            "sockets, where the kernel checks the user. Only who comes to a server's TCP port has to show a "
            "certificate. --link tcp makes the workers use TCP"
        )
    return found


def certificates_of(plan: "Plan", run_id: str) -> dict[str, Certificate]:
    """A certificate for each role; none without TLS. Raises as `check_tls`."""
    job = plan.job
    if not job.tls:
        return {}
    if job.certs is None:
        return Certificates.for_run(run_id).by_role
    found = Certificates.read(Path(job.certs))
    _check_names_run(found, job, run_id)
    return found.by_role


def _check_names_run(certificates: Certificates, job: Job, run_id: str | None) -> None:
    """Certificates made beforehand name the run's id, its directory, or its script."""
    mine = [job.name, *([Path(job.run_dir).name] if job.run_dir else []), *([run_id] if run_id else [])]
    if certificates.run not in mine:
        listed = " or ".join(repr(name) for name in dict.fromkeys(mine))
        raise UsageError(
            f"the certificates in {job.certs} name run {certificates.run!r}, and this run is {listed}; "
            f"`paceline certs OTHER_DIR --run {job.name}` makes those for it"
        )
