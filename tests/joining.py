"""Hosts that join a run, all on the loopback of this machine; for several tests."""

import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paceline.comm.certificates import Certificates
from paceline.comm.tls import Certificate
from paceline.engines import Agent
from paceline.engines.admission import join
from paceline.engines.agent_process import HostAgent, working_directory
from paceline.engines.hosts_engine import HostsEngine, Listening
from paceline.engines.program_files import ProgramFiles
from paceline.exceptions import LinkError

HOST = "127.0.0.1"


@cache
def certificate(run: str = "run") -> Certificate:
    return Certificates.for_run(run).by_role["controller"]


@contextlib.contextmanager
def listening(
    run_dir: Path,
    *,
    num_hosts: int = 2,
    silence_s: float = 30.0,
    program: ProgramFiles | None = None,
    identity: str = "own",
) -> Iterator[HostsEngine]:
    """Context manager: an engine that hosts can join."""
    how = Listening(
        run="run",
        host=HOST,
        port=0,
        num_hosts=num_hosts,
        silence_s=silence_s,
        certificate=certificate(),
    )
    engine = HostsEngine(how, run_dir, program, identity=identity)
    try:
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def joined(
    engine: HostsEngine, parent: Path, agent: Agent | None = None, identity: str | None = None
) -> Iterator[HostAgent]:
    """Context manager: another host's agent, in a thread of this process."""
    with working_directory(parent) as directory:
        connection, welcome = join(HOST, engine.port, engine.token, identity=identity or uuid.uuid4().hex)
        host = HostAgent(connection, welcome, directory, lambda text: None, agent=agent)

        def work() -> None:
            with contextlib.suppress(LinkError):
                host.run()

        thread = threading.Thread(target=work, name="another host")
        thread.start()
        try:
            yield host
        finally:
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.sock.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=30)
            assert not thread.is_alive()
