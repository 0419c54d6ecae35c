"""Runs on several hosts: the engine of one, and what an agent does to join."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.comm.certificates import Certificates
from paceline.control import RunDirectory
from paceline.engines.admission import join
from paceline.engines.agent_process import HostAgent, working_directory
from paceline.engines.hosts_engine import HostsEngine, Listening
from paceline.engines.join_token import JoinToken
from paceline.engines.program_files import ProgramFiles
from paceline.exceptions import PacelineError, PlanError
from paceline.observe.record.status import HostStatus, ServerStatus, WorkerStatus
from paceline.plan import Plan
from paceline.plan.checks import split_address
from paceline.plan.host_settings import host_silence_s
from paceline.plan.program_check import search_path

__all__ = ["TOKEN_FILE", "HostView", "hosts_engine", "look_at_hosts", "run_agent"]

TOKEN_FILE = "join-token"
"""In the run directory."""
_ANYWHERE = ("0.0.0.0", "::")


@contextlib.contextmanager
def hosts_engine(plan: Plan, run: RunDirectory, tell: Callable[[str], None]) -> Iterator[HostsEngine]:
    """Context manager: an engine with all hosts of a run. Says how they join, and waits for them.

    Args:
        tell: called with what happens, for people.

    Raises:
        PlanError: the token cannot be written, or the program is too large.
        LinkError: it cannot listen there.
        DeadlineError: not all hosts came in time.
    """
    job = plan.job
    assert job.listen is not None and job.script is not None
    host, port = split_address("listen", job.listen)
    root = Path(search_path(job) or ".")
    program = ProgramFiles.below(root, None if job.module else Path(job.script).resolve())
    how = Listening(
        run=run.id,
        host=host,
        port=port,
        num_hosts=job.hosts,
        silence_s=host_silence_s(job.deadline_s),
        certificate=Certificates.for_run(run.id).by_role["controller"],
    )
    engine = HostsEngine(how, run.path, program)
    token = run.path / TOKEN_FILE
    try:
        try:
            engine.token.write(token)
        except OSError as error:
            raise PlanError(f"the token {token} cannot be written: {error.strerror or error}") from error
        named = socket.gethostname() if host in _ANYWHERE else host
        where = f"[{named}]:{engine.port}" if ":" in named else f"{named}:{engine.port}"
        number = job.hosts - 1
        tell(f"waiting for {number} more {'host' if number == 1 else 'hosts'}: copy {token} there, and type")
        tell(f"    paceline agent --join {where} --token-file {TOKEN_FILE}")
        try:
            engine.gather(job.deadline_s, tell)
        except (PacelineError, KeyboardInterrupt) as error:
            _never_started(run, error)
            raise
        yield engine
    finally:
        token.unlink(missing_ok=True)
        engine.close()


def _never_started(run: RunDirectory, error: BaseException) -> None:
    """The record of a new run whose hosts did not come."""
    status = run.known_status()
    if status.state == "pending":
        stopped = isinstance(error, KeyboardInterrupt)
        status.state, status.error = ("stopped", None) if stopped else ("failed", str(error))
        with contextlib.suppress(OSError):
            run.write_status(status.to_json())


def run_agent(
    where: str,
    token_file: Path,
    *,
    work_dir: Path | None = None,
    tell: Callable[[str], None],
    identity: str | None = None,
) -> str:
    """Join a run with this host, and run its roles until the run ends. Returns how it ended, in words.

    Args:
        where: HOST:PORT of the run.
        work_dir: what roles read and write here is kept below it; None: in the directory for temporary files.
        identity: of this host, for tests.

    Raises:
        UsageError, PlanError: the token or an argument is wrong, or the controller refused this host.
        LinkError: nothing answers there, or the controller is gone.
    """
    host, port = split_address("join", where)
    token = JoinToken.read(token_file)
    try:
        with working_directory(work_dir) as directory:
            connection, welcome = join(host, port, token, identity=identity)
            tell(f"joined run {welcome.run} as {welcome.host}; process {os.getpid()}")
            return HostAgent(connection, welcome, directory, tell).run()
    except OSError as error:
        raise PlanError(
            f"this host cannot keep what roles read and write: {error.strerror or error}. Name a directory "
            "with --work-dir"
        ) from error


@dataclass(frozen=True)
class HostView:
    """A host of a run, and its roles."""

    host: HostStatus
    roles: tuple[str, ...]


def look_at_hosts(run: RunDirectory) -> list[HostView]:
    """The hosts of a run; empty for a run on one host."""
    status = run.look().status
    roles: list[ServerStatus | WorkerStatus] = [*status.servers.values(), *status.workers.values()]
    return [
        HostView(host, tuple(role.name for role in roles if role.host == host.id)) for host in status.hosts
    ]
