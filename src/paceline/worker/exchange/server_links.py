"""Links to all servers, and which of them holds what.

A link that breaks goes on over another socket. Where servers hold copies of each other's slices, one that is
gone is no error: the others, and a lead among them, are agreed on anew.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from paceline.comm import Address, Connection, Frame, Kind, Region, connect
from paceline.comm.errors import error_of
from paceline.comm.frames import field
from paceline.comm.impairment import LinkConditions
from paceline.comm.transfer import Transfer
from paceline.core.modes import ModeSpec
from paceline.exceptions import DeadlineError, FrameError, LinkError, UsageError
from paceline.observe.phases import Phase
from paceline.observe.spans import NO_SPANS, Lane
from paceline.params import Layout, Placement, bytes_of, flat_view
from paceline.worker.exchange.encoders import DifferenceReader, Encoders
from paceline.worker.exchange.openmp import no_rest

__all__ = ["RESIDUAL_S", "Links"]

_PROBE_S = 0.25
"""How long a worker waits before it asks whether something was lost on the way."""
_MENDING, _MENDING_S = 5, 2.0
"""How often, and how long each time, it tries to let a link go on over another socket."""
RESIDUAL_S = 0.5
"""How often a worker tells how much its encoders hold back: measuring it is a pass over all of it."""


class Links:
    """A worker's links. One thread at a time.

    Args:
        link: "auto", "shm" or "tcp".
        patience_s: how long the lead server is waited for.
        seed: of the run; encoders that round at random begin from it.
        lane: of the thread that exchanges.
        lead, address: the server that leads, and where it is. It knows the others.
    """

    mends = True
    """Whether a link that breaks goes on over another socket."""

    def __init__(
        self,
        *,
        rank: int,
        incarnation: int,
        worker_threads: int,
        lead: int,
        address: Address,
        secret: bytes,
        link: str,
        mode: ModeSpec,
        deadline_s: float,
        patience_s: float,
        transfer: Transfer = Transfer(),  # noqa: B008 - it is a value
        seed: int = 0,
        lane: Lane = NO_SPANS.main,
    ) -> None:
        self.rank = rank
        self.lane = lane
        self.mode = mode
        """The run's present mode."""
        self.incarnation = incarnation
        self._worker_threads = worker_threads
        self._spin_s = 0.0
        self._rest: Callable[[], object] = no_rest
        """Called before this worker waits for servers."""
        self.version = 0
        self.last_admit: dict[str, Any] = {}
        """The lead's last answer to a push: how far the run is (`version`, `samples`)."""
        self.sequence = 0
        self.wait_s = 0.0
        """Seconds in which this worker had nothing to do but wait for servers."""
        self.encoders: Encoders | None = None
        self._transfer = transfer
        self._seed = seed
        self._told_residual = -RESIDUAL_S
        self._load_number = 0
        """How many optimizer states this worker gave to the servers."""
        self._loading = False
        """Whether the lead is asked to order the last of them; said again if that lead dies meanwhile."""
        self._save_due = False
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._links: list[Connection] = []
        conditions = LinkConditions.from_environment()
        if conditions is not None and (link == "shm" or mode.needs_memory):
            raise UsageError(
                f"PACELINE_LINK_CONDITIONS={conditions} emulates a network, and link=shm and mode hogwild "
                "share memory: unset it, or use link auto or tcp and another mode"
            )
        self._where: dict[Connection, Address] = {}
        self._ranks: list[int] = []
        """The servers at the other ends of the links."""
        self._connect = partial(connect, secret=secret, link=link, conditions=conditions)
        self._lead = self._link_to(lead, address)
        self._lead.sock.settimeout(patience_s)
        self._layout: Layout
        self._slices_of: list[frozenset[int]]
        """The indices of each optimizer's slices."""
        # Of an attached worker: what it pushes, its copy of the parameters, and whether it may read the
        # servers' own.
        self._gradients: Tensor
        self._copy: Tensor
        self._may_share = False
        self._differences: DifferenceReader | None = None
        self._placement = Placement(0, frozenset(), ())
        self._replicated = False
        """Whether other servers take the place of one that is gone."""
        self._lost: list[Connection] = []
        """Links that broke since the servers were last agreed on."""
        self._without: set[int] = set()
        """Servers that are gone, as we see it, and still in the placement."""
        self._next: tuple[Placement, dict[int, Address]] | None = None
        """A placement to come, and where servers are that are new in it."""
        self._ready = 0
        """Its number, until the lead was told that we are ready for it."""
        self._requests = self._takes = 0
        self.local = False
        """Whether all payloads lie in memory that the servers see, too."""
        self.greeting: dict[str, Any] = {}
        """More to say to the servers when attaching."""
        self.welcome: dict[str, Any] = {}
        """What the lead server answered to that."""
        self.leave_due = False
        """Whether the run wants this worker to leave."""
        self.stop_due = False
        """Whether the run ends early, as the lead says."""
        self._questions = 0
        """Votes and calls so far."""
        self.cut_next = False
        """In allreduce: a checkpoint follows the next push, which is to bring this worker's parameters."""
        self._region: Region | None = None
        self._shared: Region | None = None
        self._out: list[list[memoryview]] = []
        self._in: list[list[memoryview]] = []
        self._told: dict[Connection, list[int]] = {}
        """The slices that each server on the other side of a socket expects in pushes."""
        self._sent_to_gone = self._received_from_gone = 0
        """Payload bytes of links that are closed."""
        self._unread: set[Connection] = set()
        """Links with an answer to a notice that nobody waited for."""

    def _link_to(self, server: int, address: Address) -> Connection:
        connection = self._connect(address, peer=f"server:{server}")
        # The lead notices first who is missing, and has it replaced or names it; it itself is waited for
        # as a last resort. The others answer what the lead has answered.
        connection.sock.settimeout(self._deadline_s)
        connection.send(Kind.HELLO, {"role": "worker", "rank": self.rank, "incarnation": self.incarnation})
        self._where[connection] = address
        self._links.append(connection)
        self._ranks.append(server)
        return connection

    def _reach_all(self, body: dict[str, Any]) -> None:
        """Connect to the other servers."""
        self._placement = Placement.from_json(body["placement"])
        self._replicated = field(body, "replicated", bool)
        where = field(body, "servers", dict)
        for server in sorted(self._placement.servers - {*self._ranks}):
            self._link_to(server, Address.from_json(where[str(server)]))
        self.local = all(map(self._shares, self._links))

    def _attach(self, connection: Connection) -> None:
        body: dict[str, Any] = {
            "fingerprint": self._layout.fingerprint,
            "incarnation": self.incarnation,
            "in_place": self._may_share,
            "pid": os.getpid(),
            "keeps": self.mends,
            **self.greeting,
        }
        if self._transfer.inline:
            body["inline"] = True
        if self._transfer.replies is not None:
            body["compress_replies"] = True
        if self._transfer.compresses:
            body["compress"] = str(self._transfer.compress)
        shared = [self.region.fd] if self._shares(connection) else ()
        if not shared:
            body["sends"] = self._told[connection] = self._sends(self._links.index(connection))
        self._send(connection, Kind.ATTACH, body, descriptors=shared)
        if self.mends:
            connection.keep()

    def _sends(self, at: int) -> list[int]:
        return [piece.index for piece in self._shards[at]]

    def _arrange(self) -> None:
        """Who is sent what, and sends what, by the present placement; and by the next one, if we know it."""
        slices, placement = self._layout.slices, self._placement
        held = [set(placement.held(rank)) for rank in self._ranks]
        if self._next is not None:
            held = [now.union(self._next[0].held(rank)) for now, rank in zip(held, self._ranks, strict=True)]
        self._shards = [[slices[i] for i in sorted(indices)] for indices in held]
        self._out = [[bytes_of(flat_view(self._gradients, s)) for s in shard] for shard in self._shards]
        self._in = [self._copies(placement.owned(rank)) for rank in self._ranks]
        for at, connection in enumerate(self._links):
            if self._told.get(connection, sends := self._sends(at)) != sends:
                self._told[connection] = sends
                with self._losing(connection):
                    self._send(connection, Kind.SENDS, {"slices": sends})

    def _hear_next(self, reply: dict[str, Any]) -> None:
        """Another placement is to come: the lead waits until we are ready for it."""
        if "next" in reply:
            placement, addresses = reply["next"]
            found = {int(rank): Address.from_json(where) for rank, where in addresses.items()}
            self._next = (Placement.from_json(placement), found)

    def _get_ready(self) -> None:
        """Reach the servers that are new in the next placement, and send everybody what it will need."""
        if self._next is None or self._ready == self._next[0].number:
            return
        placement, addresses = self._next
        for rank, address in addresses.items():
            if rank not in self._ranks:
                try:
                    connection = self._link_to(rank, address)
                except LinkError:  # gone again, which the lead sees, too
                    continue
                for each in (self._shards, self._out, self._in):
                    each.append([])
                try:
                    self._attach(connection)
                    self._take_parameters(connection, Kind.ATTACHED)
                except LinkError:
                    self._drop([connection])
        self._arrange()
        self._ready = placement.number

    def _copies(self, indices: Sequence[int]) -> list[memoryview]:
        """Where these slices of the parameters are to come."""
        return [bytes_of(flat_view(self._copy, self._layout.slices[i])) for i in indices]

    def _shares(self, connection: Connection) -> bool:
        """Whether payloads lie in memory that this server sees, too."""
        return connection.local and not self._transfer.inline

    @property
    def region(self) -> Region:
        """This worker's memory: what it pushes, and behind it its copy of the parameters."""
        assert self._region is not None
        return self._region

    @property
    def bytes_sent(self) -> int:
        """Payload bytes to all servers since this worker joined."""
        return self._sent_to_gone + sum(connection.payload_sent for connection in self._links)

    @property
    def bytes_received(self) -> int:
        """Payload bytes from all servers since this worker joined."""
        return self._received_from_gone + sum(connection.payload_received for connection in self._links)

    def _answers(self, connection: Connection) -> bool:
        if connection not in self._links or connection in self._lost:
            return False
        return self._ranks[self._links.index(connection)] in self._placement.servers

    @contextlib.contextmanager
    def _losing(self, connection: Connection) -> Iterator[None]:
        """Where others can take its place, a server's end is no error yet."""
        try:
            yield
        except LinkError:
            if not self._replicated or len(self._lost) + 1 >= len(self._links):
                raise
            if connection not in self._lost:
                self._lost.append(connection)

    def _drop(self, links: Sequence[Connection]) -> None:
        for link in links:
            at = self._links.index(link)
            self._sent_to_gone += link.payload_sent
            self._received_from_gone += link.payload_received
            for each in (self._links, self._ranks, self._shards, self._out, self._in):
                del each[at]
            link.close()

    def _hear_placement(self, connection: Connection, reply: dict[str, Any]) -> None:
        """The lead, and nobody else, says who holds what."""
        if "placement" not in reply:
            return
        self._placement = Placement.from_json(reply["placement"])
        if self._next is not None and self._next[0].number <= self._placement.number:
            self._next = None
        self._lead = connection
        connection.sock.settimeout(self._patience_s)
        servers = self._placement.servers
        gone = [link for link, rank in zip(self._links, self._ranks, strict=True) if rank not in servers]
        self._lost = [link for link in self._lost if link not in gone]
        self._without &= servers
        self._drop(gone)
        # The lead comes first when answers are read, and last when requests are sent.
        lead = self._links.index(connection)
        order = [lead, *(at for at in range(len(self._links)) if at != lead)]
        self._links = [self._links[at] for at in order]
        self._ranks = [self._ranks[at] for at in order]
        self._arrange()

    def damage_next(self, how: str, step: int) -> None:
        """The next frame to one of the servers does not arrive as it should. For tests."""
        self._links[step % len(self._links)].damage_next(how)

    def close(self) -> None:
        """Close all links."""
        for connection in self._links:
            connection.close()

    def _send(
        self,
        connection: Connection,
        kind: Kind,
        body: dict[str, Any],
        payload: Sequence[memoryview] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        try:
            connection.send(kind, body, payload, descriptors)
        except LinkError as broken:
            if connection.keeps:
                self._mend(connection, broken)
                return
            # A server that refused what it read last has closed the link: its reason is in the socket.
            try:
                last = connection.receive()
            except (LinkError, TimeoutError):
                raise broken from None
            raise (error_of(last.body) if last.kind is Kind.ERROR else broken) from None

    def _mend(self, connection: Connection, broken: LinkError) -> None:
        """A link broke: let it go on over another socket, and send again what was lost.

        Raises:
            LinkError: the server is gone, or does not know this worker any more.
        """
        connection.close()
        reason: object = "nobody listens there any more"
        for _ in range(_MENDING):
            try:
                other = self._connect(self._where[connection], peer=connection.peer)
            except LinkError:
                raise broken from None
            try:
                hello = {"role": "worker", "rank": self.rank, "incarnation": self.incarnation}
                other.sock.settimeout(_MENDING_S)
                other.send(Kind.HELLO, {**hello, "resume": connection.received})
                frame = other.receive()
                if frame.kind is not Kind.RESUMED:
                    reason = frame.body.get("message", frame.kind.name)
                    break
                connection.go_on(other, field(frame.body, "received", int))
                return
            except (LinkError, TimeoutError) as error:
                reason = error
                other.close()
        raise LinkError(f"{broken}, and it could not go on over another socket: {reason}")

    def _take_parameters(self, connection: Connection, kind: Kind) -> dict[str, Any]:
        frame = self._receive(connection, kind)
        self._blame(frame.body)
        self._hear_placement(connection, frame.body)
        self._hear_next(frame.body)
        if "owned" in frame.body:
            self._in[self._links.index(connection)] = self._copies(frame.body["owned"])
        if frame.payload_bytes:
            at = self._links.index(connection)
            phase = self.lane.enter(Phase.PULL, self._ranks[at])
            self.lane.carried(frame.payload_bytes)
            try:
                for _ in self._read_parameters(at, frame.body, self._in[at]):
                    pass
            except LinkError as broken:
                if not connection.keeps or isinstance(broken, FrameError):
                    raise
                self._mend(connection, broken)  # it comes again, whole
                return self._take_parameters(connection, kind)
            finally:
                self.lane.enter(phase)
        return frame.body

    def _blame(self, body: dict[str, Any]) -> None:
        """The lead says for whom it had to hold its answer back, and how long."""
        if "on" in body:
            self.lane.blame(field(body, "on", int), field(body, "held", float))

    def _read_parameters(self, at: int, body: dict[str, Any], views: Sequence[memoryview]) -> Iterator[int]:
        """Read a reply's parameters into `views`; gives the position of each slice that is there."""
        if self._differences is not None:
            return self._differences.read(self._links[at], at, body, views)
        return self._links[at].read_each(views)

    def _receive(self, connection: Connection, *kinds: Kind) -> Frame:
        until = time.monotonic() + (self._patience_s if connection is self._lead else self._deadline_s)
        while True:
            try:
                while connection.keeps and not connection.wait(_PROBE_S):
                    if time.monotonic() > until:
                        raise TimeoutError
                    self._send(connection, Kind.PROBE, {})
                frame = connection.receive()
                if frame.kind is not Kind.PROBE:  # what was sent before it has come
                    break
            except TimeoutError:
                raise self._late(connection) from None
            except LinkError as broken:
                if not connection.keeps:
                    raise
                self._mend(connection, broken)
        if frame.kind is Kind.ERROR:
            raise error_of(frame.body)
        if frame.kind not in kinds:
            raise LinkError(f"{connection.peer} answered {frame.kind.name}, expected {kinds[0].name}")
        return frame

    def _late(self, connection: Connection) -> DeadlineError:
        waited = self._patience_s if connection is self._lead else self._deadline_s
        return DeadlineError(
            f"worker:{self.rank} got no answer from {connection.peer} for {waited:g} s (--deadline "
            f"{self._deadline_s:g})"
        )
