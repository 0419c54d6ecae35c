"""What a worker says to all servers: its model, pushes, requests for leases, its part of a checkpoint.

On one host gradients lie in shared memory and, in bsp, parameters are read from the servers' memory in
place: a push is then a message of a few dozen bytes. Otherwise the slices travel behind the message, as
they are or compressed. A PipelinedClient (`pipeline.py`) lets them travel while the worker computes.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save
from torch import Tensor

from paceline.comm import Access, Connection, Kind, Region
from paceline.comm.connection import spin_for
from paceline.comm.frames import field
from paceline.core.modes import parse_mode
from paceline.exceptions import LinkError
from paceline.observe.phases import Phase
from paceline.params import Layout, Numerics, OptimizerSpec, apart, bytes_of, flat_view
from paceline.worker.exchange.encoders import DifferenceReader, Encoders
from paceline.worker.exchange.openmp import make_rest
from paceline.worker.exchange.server_links import RESIDUAL_S, Links

__all__ = ["Adopted", "Client", "Grant", "Written"]

Written = list[tuple[dict[str, Any], Sequence[memoryview]]]
"""For each server: a message and the payload behind it."""


@dataclass(frozen=True)
class Adopted:
    """The run's answer to an offer."""

    epoch: int
    """The epoch the run is in: a replaced or resumed worker skips the ones before it."""
    mode: str
    """The mode that the run is in: it may have been switched since it began."""
    resumed: bool
    complete: bool
    """False: the run was prepared by more calls of prepare() than this worker has made yet."""
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


class Client(Links):
    """Talks to the servers for one worker. One thread at a time."""

    encoded_bytes = 0
    """Of the last compressed push, every slice once."""

    # --- joining ----------------------------------------------------------------------------------

    def offer(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        data: dict[str, Any] | None,
        state_keys: Sequence[str],
        weights: Callable[[], tuple[Tensor, dict[str, Tensor]]],
        models: int = 1,
        calls: int = 1,
    ) -> Adopted:
        """Offer the models; worker 0 is asked for its weights, all get what to start from.

        Args:
            models: how many there are.
            calls: how many calls of prepare() brought them.
            weights: gives the whole parameter space as bytes, and frozen parameters and buffers.
        """
        self._layout = layout
        self._slices_of = [
            frozenset(s.index for s in layout.slices if s.group in groups) for groups in spec.groups_of
        ]
        body: dict[str, Any] = {
            "layout": layout.to_json(),
            "optimizer": spec.to_json(),
            "data": data,
            "state_keys": list(state_keys),
            "numerics": Numerics.here().to_json(),
        }
        if models > 1:
            body["models"] = models
        if calls > 1:
            body["calls"] = calls
        self._send(self._lead, Kind.OFFER, body)
        frame = self._receive(self._lead, Kind.ADOPT, Kind.ADOPTED)
        if frame.kind is Kind.ADOPT:
            base, extras = weights()
            blob = _blob(extras)
            payload = [bytes_of(base), memoryview(blob)]
            self._send(self._lead, Kind.OFFER, {"extras_bytes": len(blob)}, payload)
            frame = self._receive(self._lead, Kind.ADOPTED)
        blob = self._lead.read_blob(frame, frame.payload_bytes)
        if "incomplete" in frame.body:
            return Adopted(epoch=0, mode=str(self.mode), resumed=False, complete=False, tensors={})
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
            complete=True,
            tensors=parse_tensors(blob) if blob else {},
        )

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
        if self.local:
            self._rest = make_rest(layout.nbytes, torch.get_num_threads())
        self._arrange()
        if self._transfer.replies is not None:
            self._differences = DifferenceReader(self._transfer.replies, layout, self._shards)
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
        self.stop_due = "stop" in welcome
        self.version = field(welcome, "version", int)
        self.mode = parse_mode(field(welcome, "mode", str))
        if self.incarnation and len(self._links) > 1:
            self.exchange(Kind.PULL)  # it joined a run that goes on: have one version from all servers
        for connection in self._links:
            connection.payload_sent = connection.payload_received = 0
        return self._gradients, self.parameters

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
        waits = kind is not Kind.PUSH or not self.mode.needs_memory
        before = time.perf_counter()
        if waits:
            self._rest()
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
        if waits:
            lane.enter(Phase.WAIT)
            if self._spin_s:
                self._lead.spin(self._spin_s)
            self._take_admits(fetch=fetch)
            if self._lost:
                self._regroup(fetch=fetch)
        else:
            self._unread.update(self._links)  # a notice: the parameters are in the shared memory already
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

    def _take_admit(self, connection: Connection, *, fetch: bool) -> None:
        reply = self._take_parameters(connection, Kind.ADMIT)
        if connection is not self._lead:
            return
        self.last_admit = reply
        self._hear_fates(reply)
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
        if self._loading:
            message["load"] = self._load_number
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
        due = self._slices_of[message.get("optimizer", 0)] if kind is Kind.PUSH else None
        found: Written = []
        for connection, shard, views in zip(self._links, self._shards, self._out, strict=True):
            if self._shares(connection):
                views = []
            elif due is not None and len(self._slices_of) > 1:
                views = [view for piece, view in zip(shard, views, strict=True) if piece.index in due]
            found.append((message, views))
        return found

    def _hear_fates(self, reply: dict[str, Any]) -> None:
        """The lead says which pushes are settled, and which of them were not applied."""
        if self.encoders is not None and "settled" in reply:
            self.encoders.settle(field(reply, "settled", int), field(reply, "unapplied", list, []))

    def _encoded(self, encoders: Encoders, message: dict[str, Any]) -> Written:
        phase = self.lane.enter(Phase.COMPRESS)
        encoders.begin_push(message["sequence"])
        due = self._slices_of[message.get("optimizer", 0)]
        if missing := encoders.still_missing(message.pop("missing", ()), due):
            message["missing"] = missing
        written: dict[int, memoryview] = {}  # once, for all who hold it
        for piece in (piece for shard in self._shards for piece in shard if piece.index in due):
            if piece.index not in written:
                encoded = encoders.encode(piece.index, flat_view(self._gradients, piece))
                written[piece.index] = memoryview(encoded)
        self.encoded_bytes = sum(view.nbytes for view in written.values())
        parts = [[written[s.index] for s in shard if s.index in due] for shard in self._shards]
        if time.monotonic() - self._told_residual > RESIDUAL_S:
            self._told_residual = time.monotonic()
            message["residual"] = encoders.residual_norm()
        self.lane.enter(phase)
        return [({**message, "sizes": [view.nbytes for view in part]}, part) for part in parts]

    arrives_late = False
    """Whether parameters arrive after `exchange` has returned."""

    def settle(self) -> None:
        """Wait until everything that was asked for is here."""
        self._read_notices()

    def _read_notices(self) -> None:
        for connection in self._links if self._unread else ():
            self._unread.discard(connection)
            self._take_admit(connection, fetch=False)

    def save_due(self) -> bool:
        """Whether the run wants this worker's part of a checkpoint; it is told once."""
        due, self._save_due = self._save_due, False
        return due

    def _hear_mode(self, reply: dict[str, Any]) -> bool:
        """Whether the run was switched to another mode since the last reply."""
        self.leave_due = self.leave_due or "leave" in reply
        self.stop_due = self.stop_due or "stop" in reply
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
        more: dict[str, Any] | None = None,
    ) -> Grant:
        """Leases of an epoch; with `wait` blocks until there are some or the epoch is over.

        Args:
            give_back: leases that this worker will not use.
            carry: leases it has used, whose gradient goes into a later push.
            more: fields of the message: batches that were skipped, as in a push; the order of the epoch.
        """
        body: dict[str, Any] = {"epoch": epoch, "limit": limit, "wait": wait}
        if give_back:
            body["give_back"] = list(give_back)
        if carry:
            body["carry"] = list(carry)
        body |= more or {}
        self._read_notices()
        if self._next is not None:
            self._get_ready()
            body["ready"] = self._ready
        before, waited = time.perf_counter(), self.wait_s
        phase = self.lane.enter(Phase.WAIT if wait else Phase.LEASE)
        if self._replicated:
            self._takes += 1
            body["n"] = self._takes
        reply = self._ask_lead(Kind.TAKE, body, Kind.GRANT)
        self._blame(reply)
        self.lane.enter(phase)
        self.wait_s = waited + time.perf_counter() - before
        if self._hear_mode(reply):
            self.exchange(Kind.PULL)  # into the memory of the new mode
            self.settle()
        elif wait or self.mode.by_epoch:  # there, whoever comes late to an epoch may have missed its start
            self._catch_up(field(reply, "version", int))
        return Grant.of(reply)

    def vote(self, who: str, wants: bool) -> bool:
        """Ask the lead whether the run ends early; blocks as long as the mode says.

        Args:
            who: whose condition counts, see `paceline.should_stop`.
            wants: this worker's condition.
        """
        self._ask_together(Kind.VOTE, {"who": who, "wants": wants}, Kind.VERDICT)
        return self.stop_due

    def call(self, place: str, value: str) -> list[str]:
        """The values of all workers that call at this place of the script; blocks until they do.

        Args:
            place: names it, the same on every worker.
        """
        reply = self._ask_together(Kind.CALL, {"place": place, "value": value}, Kind.ANSWER)
        return [str(each) for each in field(reply, "values", list)]

    def _ask_together(self, kind: Kind, body: dict[str, Any], answer: Kind) -> dict[str, Any]:
        """Ask the lead something that it may answer when other workers have asked it, too."""
        self._questions += 1
        body["n"] = self._questions
        self._read_notices()
        if self._next is not None:
            self._get_ready()
            body["ready"] = self._ready
        before, waited = time.perf_counter(), self.wait_s
        phase = self.lane.enter(Phase.WAIT)
        reply = self._ask_lead(kind, body, answer)
        self._blame(reply)
        self.lane.enter(phase)
        self.wait_s = waited + time.perf_counter() - before
        self._save_due = self._save_due or "save" in reply
        if self._hear_mode(reply):
            self.exchange(Kind.PULL)  # into the memory of the new mode
            self.settle()
        return reply

    def _ask_lead(self, kind: Kind, body: dict[str, Any], answer: Kind) -> dict[str, Any]:
        """Ask the lead something that is its alone: this one, or the next if it is gone."""
        while True:
            lead = self._lead
            with self._losing(lead):
                self._send(lead, kind, body)
                reply = self._receive(lead, answer).body
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

    def load_optimizer_state(self, tensors: dict[str, Tensor], optimizer: int = 0) -> None:
        """Give all servers the state of an optimizer; each takes what is in its shard, all at one place in
        the order.

        The state itself goes ahead; the pull behind it is what the lead orders.
        """
        self.settle()
        if self._next is not None:
            self._get_ready()  # servers that are new need it, too
        self._load_number += 1
        body = {"number": self._load_number, **({"optimizer": optimizer} if optimizer else {})}
        blob = save(tensors)  # not empty, whatever there is in it: an empty payload asks for the state
        for connection in self._links:
            with self._losing(connection):
                self._send(connection, Kind.STATE, body, [memoryview(blob)])
        self._loading = True
        self.exchange(Kind.PULL, fetch=False)
        self.settle()
        self._loading = False

    def save(self, tensors: dict[str, Tensor], cut: int = 0, *, buffers: bool = False) -> None:
        """Send this worker's part of a checkpoint (of version `cut`, if that is known).

        Args:
            buffers: these are the present buffers alone, for workers that join; no part of a checkpoint.
        """
        blob = memoryview(_blob(tensors))
        body: dict[str, Any] = {"cut": cut} if cut else {}
        if buffers:
            body["buffers"] = True
        for connection in self._links if self._replicated else [self._lead]:
            with self._losing(connection):
                self._send(connection, Kind.SAVED, body, [blob])

    def bye(self, last: dict[str, Any] | None = None, *, comes_back: bool = False) -> None:
        """Leave in order: the script has ended, or the run wanted it so.

        Args:
            last: fields of the message: what no push has told.
            comes_back: the script has not ended: it prepares more, and joins again.
        """
        for connection in reversed(self._links):
            with contextlib.suppress(LinkError):
                body = {"left": True} if self.leave_due or comes_back else last or {}
                self._send(connection, Kind.BYE, body)
        self.close()

    # --- frames -----------------------------------------------------------------------------------


def _blob(tensors: dict[str, Tensor]) -> bytes:
    """Tensors in safetensors' format. Tensors that share memory (tied weights, say) are sent one by one."""
    return save(apart({k: v.contiguous() for k, v in tensors.items()})) if tensors else b""
