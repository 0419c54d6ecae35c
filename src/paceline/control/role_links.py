"""The controller's connections: which roles are connected, where the servers are, and what roles say.

What roles say waits in an inbox, in the order of arrival, until the controller takes it.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, get_args

from paceline.comm import Address, Connection, Frame, Hub, Listener, Secret
from paceline.comm.frames import Body, field
from paceline.comm.hub import refuse
from paceline.comm.messages import (
    TO_CONTROLLER,
    FromController,
    LoggedMetrics,
    RoleError,
    RoleFinished,
    ServerAddresses,
    ToController,
    UserNote,
    WorkerReport,
)
from paceline.comm.stream_schemes import pid_of_peer
from paceline.exceptions import FrameError, LinkError, PacelineError

__all__ = ["Joined", "LinkEvent", "RoleLinks", "Said", "StopSignal", "TurnedAway"]


class Joined(NamedTuple):
    """A role has connected."""

    role: str
    rank: int
    pid: int


class Said(NamedTuple):
    """A role sent a message."""

    role: str
    rank: int
    message: ToController
    link: Connection

    @property
    def name(self) -> str:
        """As in messages to users: `worker:1`."""
        return f"{self.role}:{self.rank}"


class TurnedAway(NamedTuple):
    """A connection was refused."""

    reason: str


class StopSignal(NamedTuple):
    """A signal asks the run to stop."""


LinkEvent = Joined | Said | TurnedAway | StopSignal


_OF_BOTH = (RoleError, UserNote)
_OF_WORKERS = (RoleFinished, WorkerReport, LoggedMetrics)
_MAY_SAY = {
    "worker": _OF_BOTH + _OF_WORKERS,
    "server": tuple(each for each in get_args(ToController) if each not in _OF_WORKERS),
}
"""Classes of messages that a role may send."""


class RoleLinks:
    """Links to the roles of one run.

    Args:
        replaced: says whether a newer incarnation has replaced a process: role, rank, incarnation.
        known: says whether there ever was such a process.
    """

    def __init__(
        self,
        listener: Listener,
        secret: Secret,
        *,
        patience_s: float,
        clock_ns: int,
        replaced: Callable[[str, int, int], bool],
        known: Callable[[str, int, int], bool],
    ) -> None:
        self._hub = Hub(self, listener, secret, patience_s=patience_s, clock_ns=clock_ns)
        self._replaced = replaced
        self._known = known
        self._links: dict[str, Connection] = {}
        self._processes: dict[tuple[str, int], int | None] = {}
        """The process of each role and incarnation that has connected, as the kernel says."""
        self._addresses: dict[int, Body] = {}
        self._heard: dict[int, float] = {}
        """When each server sent its last report."""
        self._announced = False
        """Workers that connect are told at once where the servers are."""
        self._inbox: collections.deque[LinkEvent] = collections.deque()
        self.admits_replaced = False
        """Whether processes that were replaced may connect, to say how far they had come."""

    # --- receiving --------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> None:
        """Fill the inbox. Raises OSError if there is no file descriptor for a new connection."""
        self._hub.poll(timeout_s)

    def events(self) -> Iterator[LinkEvent]:
        """Take what is in the inbox, oldest first."""
        while self._inbox:
            yield self._inbox.popleft()

    def post(self, event: LinkEvent) -> None:
        """Put an event into the inbox and wake `poll`. From any thread, and from a signal handler."""
        self._hub.post(lambda: self._inbox.append(event))

    def on_hello(self, connection: Connection, body: Body) -> None:
        """A role has connected. See HubHandler."""
        name = connection.peer
        role, rank = field(body, "role", str), field(body, "rank", int)
        if role not in ("server", "worker"):
            raise FrameError(f"an unknown role {role!r}")
        incarnation = field(body, "incarnation", int)
        if not self._known(role, rank, incarnation):
            raise FrameError(f"{name}, incarnation {incarnation}, is no process of this run")
        if not self.admits_replaced and self._replaced(role, rank, incarnation):
            raise FrameError(f"{name} was replaced")
        process = pid_of_peer(connection.sock)
        if self._processes.setdefault((name, incarnation), process) != process:
            raise FrameError(f"{name} is another process, which connected before")
        pid = field(body, "pid", int)
        older = self._links.get(name)
        if older is not None:
            self._hub.release(older)
            older.close()
        self._links[name] = connection
        self._inbox.append(Joined(role, rank, pid))

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """A role sent a frame. See HubHandler."""
        role, _, rank = connection.peer.partition(":")
        said = TO_CONTROLLER.read(frame.kind, frame.body)
        if not isinstance(said, _MAY_SAY[role]):
            raise FrameError(f"a {role} does not send {frame.kind.name} to the controller")
        self._inbox.append(Said(role, int(rank), said, connection))

    def on_end(self, connection: Connection, reason: str) -> None:
        """A connection ended; the engine says how its process ended. See HubHandler."""
        if self._links.get(connection.peer) is connection:
            del self._links[connection.peer]

    def on_stranger(self, reason: str) -> None:
        """A connection was refused. See HubHandler."""
        self._inbox.append(TurnedAway(reason))

    # --- sending ----------------------------------------------------------------------------------

    def tell(self, name: str, said: FromController) -> None:
        """Send a message to a role; nothing if it is not connected."""
        with contextlib.suppress(LinkError, KeyError):
            self._links[name].tell(said)

    def answer(self, link: Connection, said: FromController) -> None:
        """Send a message back over the link that something came from, if it is still open."""
        with contextlib.suppress(LinkError):
            link.tell(said)

    def refuse(self, link: Connection, error: PacelineError) -> None:
        """Send an error and close the link."""
        refuse(link, error)
        self._hub.end(link, str(error))

    def get(self, name: str) -> Connection | None:
        """The link to a role; None: it is not connected."""
        return self._links.get(name)

    def connected(self, role: str) -> list[str]:
        """Names of the connected roles of this kind."""
        return [name for name in self._links if name.startswith(f"{role}:")]

    # --- servers ----------------------------------------------------------------------------------

    @property
    def listener(self) -> Listener:
        """The socket that roles dial."""
        return self._hub.listener

    @property
    def address(self) -> Address:
        """Where roles dial."""
        return self._hub.listener.address

    @property
    def located(self) -> set[int]:
        """Servers whose addresses are known."""
        return set(self._addresses)

    def locate(self, rank: int, address: Body) -> None:
        """A server listens there."""
        self._addresses[rank] = address

    def server_gone(self, rank: int) -> None:
        """Forget a server."""
        self._addresses.pop(rank, None)
        self._heard.pop(rank, None)

    def announce(self, lead: int) -> None:
        """Tell all roles where the servers are, from now on also those that connect later."""
        self._announced = True
        for name in list(self._links):
            self.introduce(name, lead)

    def introduce(self, name: str, lead: int) -> None:
        """Tell one role where the servers are, once the address of the lead is known. After a takeover the
        lead has yet to tell it; all roles are told then."""
        if lead in self._addresses:
            servers = {str(rank): address for rank, address in sorted(self._addresses.items())}
            self.tell(name, ServerAddresses(servers, lead))

    def introduce_newcomer(self, name: str, lead: int) -> None:
        """Tell a worker that has just connected where the servers are, if the others were told."""
        if self._announced:
            self.introduce(name, lead)

    def heard(self, rank: int) -> None:
        """A server has sent something: it does not hang."""
        self._heard[rank] = time.monotonic()

    def expect_reports(self, servers: Iterable[int]) -> None:
        """These servers run: they hang if they send nothing from now on."""
        self._heard = dict.fromkeys(servers, time.monotonic())

    def silent(self, now: float, limit_s: float) -> list[tuple[int, float]]:
        """Servers that have sent nothing for longer than the limit, and for how long."""
        return [(rank, now - heard) for rank, heard in self._heard.items() if now - heard > limit_s]

    def stop_watching(self, rank: int) -> None:
        """A server hangs, and this was noticed."""
        self._heard.pop(rank, None)

    # --- ending -----------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """Close all links and forget the servers: the run goes back to a checkpoint."""
        for link in self._links.values():
            self._hub.release(link)
            link.close()
        self._links.clear()
        self._inbox = collections.deque(each for each in self._inbox if not isinstance(each, Joined | Said))
        self._addresses.clear()
        self._heard.clear()
        self._announced = False

    def close(self) -> None:
        """Close all links and stop listening."""
        for link in self._links.values():
            link.close()
        self._hub.close()
