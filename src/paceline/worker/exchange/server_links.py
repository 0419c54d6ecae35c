"""A worker's links to the servers.

A link that breaks is resumed over a new socket. Where servers hold replicas of each other's slices, the loss
of one is no error yet: the others agree on a new placement, and on a new lead if necessary.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from paceline.comm import Address, Connection, Frame, Kind, connect
from paceline.comm.errors import error_of
from paceline.comm.frames import Body
from paceline.comm.impairment import LinkConditions
from paceline.comm.transfer import Transfer
from paceline.comm.worker_messages import LINK_RESUMED, ProbeMessage, ToServer
from paceline.core.modes import ModeSpec
from paceline.exceptions import DeadlineError, LinkError, UsageError
from paceline.observe.record.spans import NO_SPANS, Lane
from paceline.params import Slice
from paceline.worker.exchange.link_carrier import LinkCarrier

__all__ = ["LinkSettings", "ServerLink", "ServerLinks"]

_PROBE_S = 0.25
"""Time without an answer after which a worker asks whether a frame was lost."""
_RESUMPTIONS, _RESUMPTION_S = 5, 2.0
"""Number of attempts to resume a link over a new socket, and the time limit of each."""
_REDIAL_S = 30.0
"""How long a server that has too many newcomers is dialled again."""


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """How a worker reaches its servers."""

    rank: int
    incarnation: int
    secret: bytes
    link: str = "auto"
    """"auto", "shm" or "tcp"."""
    deadline_s: float
    patience_s: float
    """How long the lead server is waited for; it notices before that which other process is missing."""
    transfer: Transfer = field(default_factory=Transfer)
    worker_threads: int = 1
    """Threads that all workers of the run use."""
    seed: int = 0
    """Seed of the run; encoders that round at random begin from it."""


@dataclass(slots=True, eq=False)
class ServerLink:
    """The link to one server, and the slices that travel over it."""

    connection: Connection
    server: int
    address: Address
    slices: list[Slice] = field(default_factory=list)
    """Slices that the server holds, in the present placement and in the announced one."""
    carrier: LinkCarrier = field(init=False)
    """How they travel. Made when the worker joins the run."""


class ServerLinks:
    """All links of one worker. One thread at a time.

    Args:
        mode: the run's mode; emulated link conditions do not go with all of them.
        lead, address: the server that leads, and where it is. It knows the others.
        lane: of the thread that exchanges.
    """

    def __init__(
        self,
        settings: LinkSettings,
        mode: ModeSpec,
        *,
        lead: int,
        address: Address,
        lane: Lane = NO_SPANS.main,
    ) -> None:
        self.settings = settings
        self.lane = lane
        conditions = LinkConditions.from_environment()
        if conditions is not None and (settings.link == "shm" or mode.needs_memory):
            raise UsageError(
                f"PACELINE_LINK_CONDITIONS={conditions} emulates a network, and link=shm and mode hogwild "
                "share memory: unset it, or use link auto or tcp and another mode"
            )
        self._connect = partial(
            connect,
            secret=settings.secret,
            link=settings.link,
            conditions=conditions,
            redial_s=min(settings.deadline_s, _REDIAL_S),
        )
        self.each: list[ServerLink] = []
        """The lead comes first when answers are read, and last when requests are sent."""
        self.replicated = False
        """Whether other servers take over the slices of one that is gone."""
        self.lost: list[ServerLink] = []
        """Links that broke since the servers last agreed on a placement."""
        self.wait_s = 0.0
        """Seconds in which this worker had nothing to do but wait for servers."""
        self._sent_to_gone = self._received_from_gone = 0
        """Payload bytes of links that are closed."""
        self._make_carrier: Callable[[ServerLink], LinkCarrier] | None = None
        self.lead = self.reach(lead, address)
        self.follow(self.lead)

    @property
    def resumes(self) -> bool:
        """Whether a link that breaks is resumed over a new socket. Pipelined ones are not."""
        return not self.settings.transfer.pipelined

    @property
    def local(self) -> bool:
        """Whether all payloads lie in memory that the servers see, too."""
        return all(map(self.shares_memory, self.each))

    def shares_memory(self, link: ServerLink) -> bool:
        """Whether payloads lie in memory that this server sees, too."""
        return link.connection.local and not self.settings.transfer.inline

    # --- making and dropping links ----------------------------------------------------------------

    def reach(self, server: int, address: Address) -> ServerLink:
        """Connect to a server."""
        connection = self._connect(address, peer=f"server:{server}")
        # The lead notices first which process is missing, and has it replaced or names it; the lead itself is
        # waited for as a last resort. The others answer what the lead has answered.
        connection.sock.settimeout(self.settings.deadline_s)
        connection.send(Kind.HELLO, self._hello())
        link = ServerLink(connection, server, address)
        if self._make_carrier is not None:
            link.carrier = self._make_carrier(link)
        self.each.append(link)
        return link

    def carry_with(self, make_carrier: Callable[[ServerLink], LinkCarrier]) -> None:
        """Give every link, and every later one, its carrier."""
        self._make_carrier = make_carrier
        for link in self.each:
            link.carrier = make_carrier(link)

    def follow(self, lead: ServerLink) -> None:
        """This server leads from now on."""
        self.lead = lead
        lead.connection.sock.settimeout(self.settings.patience_s)
        self.each.remove(lead)
        self.each.insert(0, lead)

    def drop(self, links: Sequence[ServerLink]) -> None:
        """Close links to servers that are gone."""
        for link in links:
            self._sent_to_gone += link.connection.payload_sent
            self._received_from_gone += link.connection.payload_received
            self.each.remove(link)
            self._close(link)

    @contextlib.contextmanager
    def tolerate_loss(self, link: ServerLink) -> Iterator[None]:
        """Context manager that notes a broken link in `lost` where other servers can take over."""
        try:
            yield
        except LinkError:
            if not self.replicated or len(self.lost) + 1 >= len(self.each):
                raise
            if link not in self.lost:
                self.lost.append(link)

    def close(self) -> None:
        """Close all links."""
        for link in self.each:
            self._close(link)

    def _close(self, link: ServerLink) -> None:
        link.connection.close()
        if self._make_carrier is not None:
            link.carrier.close()

    # --- frames -----------------------------------------------------------------------------------

    def send(
        self,
        link: ServerLink,
        message: ToServer,
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a message; resumes the link if it broke.

        Raises:
            LinkError: the server is gone. If it refused the last frame, the error is its reason.
        """
        connection = link.connection
        try:
            connection.tell(message, payload, descriptors)
        except LinkError as broken:
            if connection.keeps:
                self.resume(link, broken)
                return
            # A server that refused what it read last has closed the link: its reason is in the socket.
            try:
                last = connection.receive()
            except (LinkError, TimeoutError):
                raise broken from None
            raise (error_of(last.body) if last.kind is Kind.ERROR else broken) from None

    def receive(self, link: ServerLink, *kinds: Kind) -> Frame:
        """The next frame, which must be of one of these kinds.

        Raises:
            DeadlineError: the server did not answer in time.
        """
        connection = link.connection
        began = time.monotonic()
        while True:
            try:
                while connection.keeps and not connection.wait(_PROBE_S):
                    if time.monotonic() > began + self._patience(link):
                        raise TimeoutError
                    self.send(link, ProbeMessage())
                frame = connection.receive()
                if frame.kind is not Kind.PROBE:  # frames sent before the probe have arrived
                    break
            except TimeoutError:
                raise self.late(link) from None
            except LinkError as broken:
                if not connection.keeps:
                    raise
                self.resume(link, broken)
        if frame.kind is Kind.ERROR:
            raise error_of(frame.body)
        if frame.kind not in kinds:
            raise LinkError(f"{connection.peer} answered {frame.kind.name}, expected {kinds[0].name}")
        return frame

    def resume(self, link: ServerLink, broken: LinkError) -> None:
        """Resume a broken link over a new socket, and send lost frames again.

        Raises:
            LinkError: the server is gone, or does not know this worker any more.
        """
        connection = link.connection
        connection.close()
        reason: object = "nobody listens there any more"
        for _ in range(_RESUMPTIONS):
            try:
                other = self._connect(link.address, peer=connection.peer)
            except LinkError:
                raise broken from None
            try:
                other.sock.settimeout(_RESUMPTION_S)
                other.send(
                    Kind.HELLO, {**self._hello(), "resume": connection.received, "token": connection.token}
                )
                frame = other.receive()
                if frame.kind is not Kind.RESUMED:
                    reason = frame.body.get("message", frame.kind.name)
                    break
                connection.go_on(other, LINK_RESUMED.read(frame.kind, frame.body).received)
                return
            except (LinkError, TimeoutError) as error:
                reason = error
                other.close()
        raise LinkError(f"{broken}, and it could not go on over another socket: {reason}")

    def late(self, link: ServerLink) -> DeadlineError:
        """The error of a server that did not answer in time."""
        return DeadlineError(
            f"worker:{self.settings.rank} got no answer from {link.connection.peer} for "
            f"{self._patience(link):g} s (--deadline {self.settings.deadline_s:g})"
        )

    def _patience(self, link: ServerLink) -> float:
        return self.settings.patience_s if link is self.lead else self.settings.deadline_s

    def _hello(self) -> Body:
        return {"role": "worker", "rank": self.settings.rank, "incarnation": self.settings.incarnation}

    # --- figures ----------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Payload bytes to all servers since this worker joined."""
        return self._sent_to_gone + sum(link.connection.payload_sent for link in self.each)

    @property
    def bytes_received(self) -> int:
        """Payload bytes from all servers since this worker joined."""
        return self._received_from_gone + sum(link.connection.payload_received for link in self.each)

    def reset_byte_counts(self) -> None:
        """What joining moved does not count."""
        for link in self.each:
            link.connection.payload_sent = link.connection.payload_received = 0

    def damage_next(self, how: str, step: int) -> None:
        """The next frame to one of the servers does not arrive as it should. For tests."""
        self.each[step % len(self.each)].connection.damage_next(how)
