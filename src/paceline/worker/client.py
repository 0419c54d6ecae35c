"""A worker's links to all servers.

On one host gradients lie in shared memory and, in bsp, parameters are read from the servers' memory in
place: a push is then a message of a few dozen bytes. Otherwise the slices travel behind the message, as
they are or compressed. A PipelinedClient (`pipeline.py`) lets them travel while the worker computes.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save
from torch import Tensor

from paceline import exceptions
from paceline.comm import Access, Address, Connection, Frame, Kind, Region, connect
from paceline.comm.connection import spin_for
from paceline.comm.frames import field
from paceline.comm.impairment import LinkConditions
from paceline.comm.transfer import Transfer
from paceline.exceptions import DeadlineError, FrameError, LinkError, PacelineError, UsageError
from paceline.modes import ModeSpec, parse_mode
from paceline.observe.phases import Phase
from paceline.observe.spans import NO_SPANS, Lane
from paceline.params import Layout, OptimizerSpec, Placement, bytes_of, flat_view
from paceline.worker.encoding import Differences, Encoders

__all__ = ["Adopted", "Client", "Grant", "Written", "error_of"]

Written = list[tuple[dict[str, Any], Sequence[memoryview]]]
"""For each server: a message and the payload behind it."""

_PROBE_S = 0.25
"""How long a worker waits before it asks whether something was lost on the way."""
_MENDING, _MENDING_S = 5, 2.0
"""How often, and how long each time, it tries to let a link go on over another socket."""
RESIDUAL_S = 0.5
"""How often a worker tells how much its encoders hold back: measuring it is a pass over all of it."""


@dataclass(frozen=True)
class Adopted:
    """The run's answer to an offer."""

    epoch: int
    """The epoch the run is in: a replaced or resumed worker skips the ones before it."""
    mode: str
    """The mode that the run is in: it may have been switched since it began."""
    resumed: bool
    tensors: dict[str, Tensor]
    """Frozen parameters and buffers to start from; on a resume also `rng:` and `user:` entries."""


@dataclass(frozen=True)
class Grant:
    """Leases: (id, ranges of positions). `over`: the epoch has no more."""

    leases: list[tuple[int, list[tuple[int, int]]]]
    over: bool
    save: bool
    """The run wants this worker's part of a checkpoint."""

    @classmethod
    def of(cls, body: dict[str, Any]) -> "Grant":
        """From the body of a GRANT."""
        leases = [(int(i), [(int(a), int(b)) for a, b in ranges]) for i, ranges in body["leases"]]
        return cls(leases=leases, over=field(body, "over", bool), save="save" in body)


class Client:
    """Talks to the servers for one worker. One thread at a time.

    Args:
        link: "auto", "shm" or "tcp".
        patience_s: how long the lead server is waited for.
        seed: of the run; encoders that round at random begin from it.
        lane: of the thread that exchanges.
        lead, address: the server that leads, and where it is. It knows the others.
    """

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
        self.version = 0
        self.sequence = 0
        self.wait_s = 0.0
        """Seconds in which this worker had nothing to do but wait for servers."""
        self.encoders: Encoders | None = None
        self._transfer = transfer
        self._seed = seed
        self._told_residual = -RESIDUAL_S
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
        self.cut_next = False
        """In allreduce: a checkpoint follows the next push, which is to bring this worker's parameters."""
        self._region: Region | None = None
        self._shared: Region | None = None
        self._out: list[list[memoryview]] = []
        self._in: list[list[memoryview]] = []
        self._told: dict[Connection, list[int]] = {}
        """The slices that each server on the other side of a socket expects in pushes."""
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

    # --- joining ----------------------------------------------------------------------------------

    def offer(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        data: dict[str, Any] | None,
        state_keys: Sequence[str],
        weights: Callable[[], tuple[Tensor, dict[str, Tensor]]],
    ) -> Adopted:
        """Offer the model; worker 0 is asked for its weights, all get what to start from.

        Args:
            weights: gives the whole parameter space as bytes, and frozen parameters and buffers.
        """
        self._layout = layout
        body = {
            "layout": layout.to_json(),
            "optimizer": spec.to_json(),
            "data": data,
            "state_keys": list(state_keys),
        }
        self._send(self._lead, Kind.OFFER, body)
        frame = self._receive(self._lead, Kind.ADOPT, Kind.ADOPTED)
        if frame.kind is Kind.ADOPT:
            base, extras = weights()
            blob = _blob(extras)
            payload = [bytes_of(base), memoryview(blob)]
            self._send(self._lead, Kind.OFFER, {"extras_bytes": len(blob)}, payload)
            frame = self._receive(self._lead, Kind.ADOPTED)
        blob = self._lead.read_blob(frame, frame.payload_bytes)
        self._reach_all(frame.body)
        if not self.local:
            for fd in frame.descriptors:
                os.close(fd)
        elif frame.descriptors:
            access = Access.SHARED if self.mode.payload == "none" else Access.PRIVATE
            self._shared = Region.attach(frame.descriptors[0], layout.nbytes, access)
        return Adopted(
            epoch=field(frame.body, "epoch", int),
            mode=field(frame.body, "mode", str),
            resumed=field(frame.body, "resumed", bool),
            tensors=parse_tensors(blob) if blob else {},
        )

    def _reach_all(self, body: dict[str, Any]) -> None:
        """Connect to the other servers."""
        self._placement = Placement.from_json(body["placement"])
        self._replicated = field(body, "replicated", bool)
        where = field(body, "servers", dict)
        for server in sorted(self._placement.servers - {*self._ranks}):
            self._link_to(server, Address.from_json(where[str(server)]))
        self.local = all(map(self._shares, self._links))

    def attach(self, *, in_place: bool) -> tuple[Tensor, Tensor]:
        """Join the run. Returns the bytes of gradients and of parameters, in the layout's order.

        Args:
            in_place: read the servers' memory where the mode and the host allow it.
        """
        layout = self._layout
        self._region = Region.create(2 * layout.nbytes)
        memory = torch.frombuffer(self._region.buffer, dtype=torch.uint8)
        self._gradients, self._copy = memory[: layout.nbytes], memory[layout.nbytes :]
        self._may_share = in_place and self._shared is not None and self.local
        self._spin_s = spin_for(layout.nbytes, self._worker_threads + len(self._links))
        self._arrange()
        self._differences: Differences | None = None
        if self._transfer.replies is not None:
            self._differences = Differences(self._transfer.replies, layout, self._shards)
        if self._transfer.compresses:
            seed = (self._seed << 32) + (self.rank << 12) + self.incarnation
            self.encoders = Encoders(self._transfer.compress, layout, seed)
        # The lead comes last: it opens the gate when everybody is everywhere.
        for connection in reversed(self._links):
            self._attach(connection)
            if connection is not self._lead:
                self._take_parameters(connection, Kind.ATTACHED)
        welcome = self.welcome = self._take_parameters(self._lead, Kind.ATTACHED)
        self.cut_next = "cut" in welcome
        self.version = field(welcome, "version", int)
        self.mode = parse_mode(field(welcome, "mode", str))
        if self.incarnation and len(self._links) > 1:
            self.exchange(Kind.PULL)  # it joined a run that goes on: have one version from all servers
        for connection in self._links:
            connection.payload_sent = connection.payload_received = 0
        return self._gradients, self.parameters

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
        return sum(connection.payload_sent for connection in self._links)

    @property
    def bytes_received(self) -> int:
        """Payload bytes from all servers since this worker joined."""
        return sum(connection.payload_received for connection in self._links)

    @property
    def in_place(self) -> bool:
        """Whether this worker reads the servers' memory."""
        return self._may_share and (self.mode.in_place or self.mode.needs_memory)

    @property
    def parameters(self) -> Tensor:
        """The bytes of the parameters in the present mode: the servers' memory, or this worker's copy."""
        if not self.in_place:
            return self._copy
        assert self._shared is not None
        return torch.frombuffer(self._shared.buffer, dtype=torch.uint8)

    # --- training ---------------------------------------------------------------------------------

    def exchange(self, kind: Kind = Kind.PUSH, *, fetch: bool = True, **body: Any) -> None:
        """Push what lies in the gradient memory, wait until admitted, have fresh parameters.

        Args:
            fetch: False leaves the parameters as they are.
        """
        lane = self.lane
        phase = lane.enter(Phase.PUSH)
        self._read_notices()
        if self._next is not None:
            self._get_ready()
        written = self._written(kind, self._message(kind, fetch, body))
        before = time.perf_counter()
        # The lead comes last: what it has seen is everywhere (docs/decisions.md).
        for at in reversed(range(len(self._links))):
            message, views = written[at]
            if views:
                lane.enter(Phase.PUSH, self._ranks[at])
                lane.carried(sum(view.nbytes for view in views))
            if self._replicated:
                with self._losing(self._links[at]):
                    self._send(self._links[at], kind, message, views)
            else:
                self._send(self._links[at], kind, message, views)
        if self.mode.needs_memory and kind is Kind.PUSH:
            self._unread.update(self._links)  # a notice: the parameters are in the shared memory already
        else:
            lane.enter(Phase.WAIT)
            if self._spin_s:
                self._lead.spin(self._spin_s)
            self._take_admits(fetch=fetch)
            if self._lost:
                self._regroup(fetch=fetch)
        self.wait_s += time.perf_counter() - before
        lane.enter(phase)

    def _take_admits(self, *, fetch: bool) -> None:
        if not self._replicated and self._next is None:
            for connection in self._links:
                self._take_admit(connection, fetch=fetch)
            return
        for connection in [*self._links]:
            # The lead's answer, which comes first, may say that others are gone. Those who are new answer
            # from the placement on in which they are.
            if self._answers(connection):
                with self._losing(connection):
                    self._take_admit(connection, fetch=fetch)

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

    def _regroup(self, *, fetch: bool) -> None:
        """Servers are gone: have all others agree on who holds what, and who leads.

        Args:
            fetch: have fresh parameters, too: the answer of who is gone may have come in part.
        """
        while self._lost:
            self._without.update(self._ranks[self._links.index(link)] for link in self._lost)
            self._drop(self._lost)
            self._lost = []
            message = self._message(Kind.PULL, fetch, {"without": sorted(self._without)})
            for connection in reversed(self._links):
                with self._losing(connection):
                    self._send(connection, Kind.PULL, message)
            self._take_admits(fetch=fetch)

    def _drop(self, links: Sequence[Connection]) -> None:
        for link in links:
            at = self._links.index(link)
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

    def _take_admit(self, connection: Connection, *, fetch: bool) -> None:
        reply = self._take_parameters(connection, Kind.ADMIT)
        if connection is not self._lead:
            return
        if fetch or self.mode.payload == "none":  # which reads the newest anyway
            self.version = field(reply, "version", int)
        self.cut_next = "cut" in reply
        self._save_due = self._save_due or "save" in reply
        self._hear_mode(reply)

    def _message(self, kind: Kind, fetch: bool, body: dict[str, Any]) -> dict[str, Any]:
        self._requests += 1
        message = {"n": self._requests, "sequence": self.sequence, "read_version": self.version, **body}
        if self._next is not None and self._ready:
            message["ready"] = self._ready
        if not fetch:
            message["fetch"] = False
        self.sequence += kind is not Kind.PULL
        return message

    def _written(self, kind: Kind, message: dict[str, Any]) -> Written:
        """What each server gets: a message and what travels behind it."""
        carries = message.get("carries", "slot")
        if self.local or kind is Kind.PULL or carries == "nothing":
            return [(message, ())] * len(self._links)
        if carries == "parameters":
            return [(message, views) for views in self._in]
        if message.get("void"):
            return [(message, ())] * len(self._links)
        if self.encoders is not None and kind is Kind.PUSH:
            return self._encoded(self.encoders, message)
        return [
            (message, () if self._shares(connection) else views)
            for connection, views in zip(self._links, self._out, strict=True)
        ]

    def _encoded(self, encoders: Encoders, message: dict[str, Any]) -> Written:
        phase = self.lane.enter(Phase.COMPRESS)
        if missing := encoders.still_missing(message.pop("missing", ())):
            message["missing"] = missing
        written: dict[int, memoryview] = {}  # once, for all who hold it
        for piece in (piece for shard in self._shards for piece in shard):
            if piece.index not in written:
                encoded = encoders.encode(piece.index, flat_view(self._gradients, piece))
                written[piece.index] = memoryview(encoded)
        parts = [[written[s.index] for s in shard] for shard in self._shards]
        if time.monotonic() - self._told_residual > RESIDUAL_S:
            self._told_residual = time.monotonic()
            message["residual"] = encoders.residual_norm()
        self.lane.enter(phase)
        return [({**message, "sizes": [view.nbytes for view in part]}, part) for part in parts]

    mends = True
    """Whether a link that breaks goes on over another socket."""

    arrives_late = False
    """Whether parameters arrive after `exchange` has returned."""

    def settle(self) -> None:
        """Wait until everything that was asked for is here."""
        self._read_notices()

    def _read_notices(self) -> None:
        for connection in self._links if self._unread else ():
            self._unread.discard(connection)
            self._take_admit(connection, fetch=False)

    def damage_next(self, how: str, step: int) -> None:
        """The next frame to one of the servers does not arrive as it should. For tests."""
        self._links[step % len(self._links)].damage = how

    def save_due(self) -> bool:
        """Whether the run wants this worker's part of a checkpoint; it is told once."""
        due, self._save_due = self._save_due, False
        return due

    def _hear_mode(self, reply: dict[str, Any]) -> bool:
        """Whether the run was switched to another mode since the last reply."""
        self.leave_due = self.leave_due or "leave" in reply
        if "mode" not in reply:
            return False
        self.mode = parse_mode(field(reply, "mode", str))
        return True

    def take(
        self,
        epoch: int,
        limit: int,
        *,
        wait: bool,
        give_back: Sequence[int] = (),
        carry: Sequence[int] = (),
    ) -> Grant:
        """Leases of an epoch; with `wait` blocks until there are some or the epoch is over.

        Args:
            give_back: leases that this worker will not use.
            carry: leases it has used, whose gradient goes into a later push.
        """
        body: dict[str, Any] = {"epoch": epoch, "limit": limit, "wait": wait}
        if give_back:
            body["give_back"] = list(give_back)
        if carry:
            body["carry"] = list(carry)
        self._read_notices()
        if self._next is not None:
            self._get_ready()
            body["ready"] = self._ready
        before, waited = time.perf_counter(), self.wait_s
        phase = self.lane.enter(Phase.WAIT if wait else Phase.LEASE)
        reply = self._granted(body)
        self._blame(reply)
        self.lane.enter(phase)
        self.wait_s = waited + time.perf_counter() - before
        if self._hear_mode(reply):
            self.exchange(Kind.PULL)  # into the memory of the new mode
            self.settle()
        elif wait or self.mode.by_epoch:  # there, whoever comes late to an epoch may have missed its start
            self._catch_up(field(reply, "version", int))
        return Grant.of(reply)

    def _granted(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the lead for leases: this one, or the next if it is gone."""
        if self._replicated:
            self._takes += 1
            body["n"] = self._takes
        while True:
            lead = self._lead
            with self._losing(lead):
                self._send(lead, Kind.TAKE, body)
                reply = self._receive(lead, Kind.GRANT).body
                self._hear_placement(lead, reply)
                self._hear_next(reply)
                return reply
            self._regroup(fetch=False)  # between two exchanges all parameters are whole

    def _catch_up(self, version: int) -> None:
        """After a rest: the others may have gone on meanwhile.

        The lead woke us; other servers may still be at an update that it has ordered already. A pull is
        part of the order, so their answer comes behind it, also to a worker that reads in place.
        """
        if self.mode.serverless:
            return  # there are no fresher parameters than the workers' own
        if self.mode.local and self.mode.spare is None:
            return  # its own steps go on from what it fetched last; in rounds they would come too late
        if self.in_place and len(self._links) == 1:
            self.version = version
        elif self.version != version:
            self.exchange(Kind.PULL)
            self.settle()

    def private_pages(self) -> int:
        """How many pages of the servers' memory this worker has written to, in its view of it only."""
        return self._shared.private_pages() if self.in_place and self._shared is not None else 0

    def forget_private_writes(self) -> None:
        """After an assign: see the servers' memory again where this worker wrote to its view of it."""
        if self.in_place and self._shared is not None:
            self._shared.forget_private_writes()

    # --- state ------------------------------------------------------------------------------------

    def optimizer_state(self) -> list[dict[str, Tensor]]:
        """Parameters and optimizer state of all servers, by StateBook's keys."""
        self._read_notices()
        while True:
            parts = []
            for connection in self._links:
                with self._losing(connection):
                    self._send(connection, Kind.STATE, {})
                    frame = self._receive(connection, Kind.STATE)
                    blob = connection.read_blob(frame, frame.payload_bytes)
                    parts.append(parse_tensors(blob) if blob else {})
            if not self._lost:
                return parts
            self._regroup(fetch=False)

    def load_optimizer_state(self, tensors: dict[str, Tensor]) -> None:
        """Give all servers optimizer state; each takes what is in its shard."""
        self._read_notices()
        blob = save(tensors)  # not empty, whatever there is in it: an empty payload asks for the state
        for connection in self._links:
            with self._losing(connection):
                self._send(connection, Kind.STATE, {}, [memoryview(blob)])
                self._receive(connection, Kind.STATE)
        if self._lost:  # the others have it
            self._regroup(fetch=False)

    def save(self, tensors: dict[str, Tensor], cut: int = 0) -> None:
        """Send this worker's part of a checkpoint (of version `cut`, if that is known)."""
        blob = memoryview(_blob(tensors))
        for connection in self._links if self._replicated else [self._lead]:
            with self._losing(connection):
                self._send(connection, Kind.SAVED, {"cut": cut} if cut else {}, [blob])

    def bye(self) -> None:
        """Leave in order: the script has ended, or the run wanted it so."""
        for connection in reversed(self._links):
            with contextlib.suppress(LinkError):
                self._send(connection, Kind.BYE, {"left": True} if self.leave_due else {})
        self.close()

    def close(self) -> None:
        """Close all links."""
        for connection in self._links:
            connection.close()

    # --- frames -----------------------------------------------------------------------------------

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


def error_of(body: dict[str, Any]) -> PacelineError:
    """What an ERROR frame says, as an exception."""
    kind = getattr(exceptions, str(body.get("error")), PacelineError)
    known = isinstance(kind, type) and issubclass(kind, PacelineError)
    return (kind if known else PacelineError)(str(body.get("message")))


def _blob(tensors: dict[str, Tensor]) -> bytes:
    return save({k: v.contiguous() for k, v in tensors.items()}) if tensors else b""
