"""HostsEngine: this host, and others on which `paceline agent` was started with the run's token.

Threads: one accepts connections, one for each newcomer that becomes the reader of its link if it is admitted,
and one says at intervals that the controller is there. What they find waits until the controller asks for it.
"""

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, assert_never

from paceline.comm import Certificate, Connection, new_secret
from paceline.comm.hub import refuse
from paceline.comm.pinned_tls import fingerprint_of
from paceline.engines.admission import admit, check_newcomer, host_identity, read_newcomer
from paceline.engines.agent_messages import (
    CHUNK_BYTES,
    FROM_AGENT,
    FileChunk,
    HostAdmitted,
    HostHello,
    RoleEnded,
    RoleRuns,
    StillThere,
)
from paceline.engines.base import LOCAL_HOST, Agent, EngineEvent, HostInfo, HostJoined, HostLost, JoinRefused
from paceline.engines.handover import Guardian
from paceline.engines.join_token import JoinToken
from paceline.engines.local_agent import LocalAgent
from paceline.engines.program_files import ProgramFiles
from paceline.engines.remote_agent import RemoteAgent
from paceline.engines.role_files import ReceivedFiles
from paceline.exceptions import DeadlineError, FrameError, LinkError, PacelineError, UsageError

__all__ = ["HostsEngine", "Listening"]

T = TypeVar("T")

_MOST_NEWCOMERS = 64
_MOST_TOLD = 20
"""Refusals that people are told while the run waits for its hosts: a port scan makes many."""
_BEATS = 10
"""Signs of life within the time after which a host counts as lost."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """How hosts join one run."""

    run: str
    host: str
    port: int
    """0: the system chooses."""
    num_hosts: int
    """With the controller's own."""
    silence_s: float
    """A host that says nothing for this long is lost."""
    certificate: Certificate
    """Shown to agents, which know its fingerprint."""


class HostsEngine:
    """Provides this host and those that join.

    Args:
        run_dir: the run directory, where the files of roles on other hosts go.
        program: what other hosts are sent; None: nothing.
        identity: of this host, in the place of `host_identity`, for tests.

    Raises:
        LinkError: it cannot listen there.
    """

    def __init__(
        self, how: Listening, run_dir: Path, program: ProgramFiles | None, *, identity: str | None = None
    ) -> None:
        self._how = how
        self._run_dir = run_dir
        self._program = program
        self._files = ReceivedFiles(run_dir)
        self._own = HostInfo.own()
        self._local = LocalAgent()
        self._lock = threading.Lock()
        self._identities = {LOCAL_HOST: identity or host_identity()}
        """Of the hosts that are here. Under the lock, as are the next two."""
        self._agents: dict[str, RemoteAgent] = {}
        """All that ever came."""
        self._closed = False
        self._told_refusals = 0
        self._news: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self._wakened, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._polled = select.epoll()
        self._polled.register(self._wakened, select.EPOLLIN)
        self._newcomers = threading.BoundedSemaphore(_MOST_NEWCOMERS)
        self._over = threading.Event()
        try:
            family = socket.AF_INET6 if ":" in how.host else socket.AF_INET
            self._listener = socket.create_server((how.host, how.port), family=family, backlog=128)
        except OSError as error:
            self._local.close()
            self._close_own()
            raise LinkError(
                f"cannot listen at {how.host}:{how.port}: {error.strerror or error}. Name an address of this "
                "host and a port that is free (--listen HOST:PORT)"
            ) from None
        self.port = int(self._listener.getsockname()[1])
        self.token = JoinToken(how.run, fingerprint_of(how.certificate), new_secret())
        """What a host must know to join."""
        self._threads = [
            threading.Thread(target=each, name=name, daemon=True)
            for each, name in ((self._accept, "hosts that join"), (self._beat, "signs of life"))
        ]
        for thread in self._threads:
            thread.start()

    # --- Engine ---------------------------------------------------------------------------------------

    @property
    def guardian(self) -> Guardian | None:
        """See Engine: the agents of other hosts know no other controller."""
        return None

    def hosts(self) -> Sequence[HostInfo]:
        """See Engine."""
        with self._lock:
            return [self._own, *(agent.host for agent in self._present())]

    def _present(self) -> list[RemoteAgent]:
        """The agents that are here. Under the lock."""
        return [self._agents[host] for host in self._identities if host in self._agents]

    def agent(self, host: str) -> Agent:
        """See Engine."""
        if host == LOCAL_HOST:
            return self._local
        with self._lock:
            return self._agents[host]

    def events(self) -> Sequence[EngineEvent]:
        """See Engine."""
        with contextlib.suppress(BlockingIOError):
            self._wakened.recv(1 << 16)
        return _taken(self._news)

    def fileno(self) -> int:
        """See Engine."""
        with contextlib.suppress(OSError):  # it is registered; a fork server that was started is not yet
            self._polled.register(self._local.fileno(), select.EPOLLIN)
        return self._polled.fileno()

    def close(self) -> None:
        """See Engine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            agents = [*self._agents.values()]
        self._over.set()
        for agent in agents:
            agent.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=5)
        self._listener.close()
        self._local.close()
        self._close_own()

    def _close_own(self) -> None:
        self._polled.close()
        self._waker.close()
        self._wakened.close()

    # --- for whoever starts the run ---------------------------------------------------------------------

    def gather(self, within_s: float, tell: Callable[[str], None]) -> None:
        """Wait until all hosts are here.

        Args:
            tell: called with what happens, for people.

        Raises:
            DeadlineError: some have not come in time.
        """
        until = time.monotonic() + within_s
        while (missing := self._how.num_hosts - len(self.hosts())) > 0:
            left = until - time.monotonic()
            if left <= 0:
                came = ", ".join(host.name for host in self.hosts())
                raise DeadlineError(
                    f"{missing} of {self._how.num_hosts} hosts did not come within {within_s:g} s "
                    f"(--deadline); here: {came}"
                )
            select.select([self], [], [], min(left, 0.5))
            self._tell_all(tell)
        self._tell_all(tell)

    def _tell_all(self, tell: Callable[[str], None]) -> None:
        for event in self.events():
            match event:
                case HostJoined(host):
                    tell(f"{host.name} ({host.address}) joined: {told_resources(host)}")
                case HostLost(host, reason):
                    tell(f"{host.name} ({host.address}) is gone: {reason}")
                case JoinRefused(reason):
                    self._told_refusals += 1
                    if self._told_refusals <= _MOST_TOLD:
                        tell(f"a connection was refused: {reason}")
                case _:
                    assert_never(event)

    # --- threads --------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a full socket shows already that there is news
            self._waker.send(b".")

    def _refused(self, reason: str) -> None:
        self._news.put(JoinRefused(reason))
        self._wake()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._over.wait(0.1):  # closed; or there are no descriptors
                    return
                continue
            if not self._newcomers.acquire(blocking=False):
                sock.close()
                self._refused("too many connections authenticating at once")
                continue
            threading.Thread(target=self._meet, args=(sock,), name="a host", daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(self._how.silence_s / _BEATS):
            with self._lock:
                present = self._present()
            for agent in present:
                agent.still_there()

    def _meet(self, sock: socket.socket) -> None:
        """Admit a newcomer, and read its link from then on."""
        connection, agent = None, None
        try:
            try:
                connection = admit(sock, self._how.certificate, self.token.secret)
                hello = read_newcomer(connection)
                check_newcomer(hello, str(connection.sock.getpeername()[0]), time.time())
                agent = self._welcome(connection, hello)
            finally:
                self._newcomers.release()
        except (PacelineError, OSError) as error:
            if connection is not None:
                refuse(connection, error if isinstance(error, PacelineError) else LinkError(str(error)))
                connection.close()
            self._refused(str(error))
            return
        self._read(agent, connection)

    def _welcome(self, connection: Connection, hello: HostHello) -> RemoteAgent:
        """Send a newcomer the program, and make it one of the hosts."""
        host = self._seat(connection, hello)
        agent = RemoteAgent(
            host,
            connection,
            run_dir=self._run_dir,
            program=None if self._program is None else self._program.root,
            files=self._files,
            fileno=self.fileno,
            wake=self._wake,
        )
        try:
            connection.peer = f"the agent of {host.name}"
            connection.sock.settimeout(self._how.silence_s)
            connection.tell(HostAdmitted(self._how.run, host.id, self._how.silence_s))
            for path, at, data in () if self._program is None else self._program.chunks(CHUNK_BYTES):
                connection.tell(FileChunk(path, at), [memoryview(data)])
            connection.send_aside()
        except BaseException:
            with self._lock:
                self._identities.pop(host.id, None)
            raise
        with self._lock:
            if self._closed:
                raise LinkError("the run has ended")
            self._agents[host.id] = agent
            if self._own.address is None:  # as the first newcomer reached it
                self._own = self._own._replace(address=str(connection.sock.getsockname()[0]))
        self._news.put(HostJoined(host))
        self._wake()
        return agent

    def _seat(self, connection: Connection, hello: HostHello) -> HostInfo:
        """Take a place for a newcomer. Raises UsageError if there is none for it."""
        with self._lock:
            taken = next((id for id, known in self._identities.items() if known == hello.identity), None)
            if taken is not None:
                whose = "the controller runs" if taken == LOCAL_HOST else "an agent of this run is"
                raise UsageError(
                    f"{whose} on {hello.name} already: one agent a host is enough, and it starts as many "
                    "roles "
                    "as the run has there"
                )
            if len(self._identities) >= self._how.num_hosts:
                raise UsageError(
                    f"all {self._how.num_hosts} hosts of the run are here (--hosts {self._how.num_hosts})"
                )
            ids = {*self._identities, *self._agents}
            id = next(name for k in range(1, len(ids) + 2) if (name := f"host-{k}") not in ids)
            self._identities[id] = hello.identity
        return HostInfo(id, hello.name, hello.address, hello.cores, hello.memory)

    def _read(self, agent: RemoteAgent, connection: Connection) -> None:
        """Hear what an agent says, until it is lost."""
        try:
            while True:
                frame = connection.receive()
                match FROM_AGENT.read(frame.kind, frame.body):
                    case FileChunk(path, at):
                        self._files.write(path, at, connection.read_blob(frame, CHUNK_BYTES))
                    case (RoleRuns() | RoleEnded() | StillThere()) as said:
                        agent.said(said)
                    case other:
                        assert_never(other)
        except TimeoutError:
            reason = f"its agent said nothing for {self._how.silence_s:g} s"
        except FrameError as error:
            reason = f"its agent sent what is no message: {error}"
        except (LinkError, OSError) as error:
            reason = str(error)
        agent.lost(reason)
        with self._lock:
            self._identities.pop(agent.host.id, None)
            closed = self._closed
        if not closed:
            self._news.put(HostLost(agent.host, reason))
            self._wake()


def told_resources(host: HostInfo) -> str:
    """For people: `8 cores, 16 GB`."""
    return f"{host.cores} cores, {host.memory / 1e9:,.0f} GB"


def _taken(waiting: "queue.SimpleQueue[T]") -> list[T]:
    found: list[T] = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(waiting.get_nowait())
    return found
