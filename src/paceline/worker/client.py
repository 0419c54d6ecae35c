"""A worker's links to all servers.

On one host gradients lie in shared memory and, in bsp, parameters are read from the servers' memory in
place: a push is then a message of a few dozen bytes. Over TCP the slices travel behind the message.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save
from torch import Tensor

from paceline import exceptions
from paceline.comm import Access, Address, Connection, Frame, Kind, Region, connect
from paceline.comm.connection import spin_for
from paceline.comm.frames import field
from paceline.exceptions import DeadlineError, LinkError, PacelineError
from paceline.params import Layout, OptimizerSpec, bytes_of, flat_view, partition

__all__ = ["Adopted", "Client", "Grant"]


@dataclass(frozen=True)
class Adopted:
    """The run's answer to an offer."""

    epoch: int
    """The epoch the run is in: a replaced or resumed worker skips the ones before it."""
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


class Client:
    """Talks to the servers for one worker. One thread at a time.

    Args:
        link: "auto", "shm" or "tcp".
    """

    def __init__(
        self,
        *,
        rank: int,
        incarnation: int,
        worker_threads: int,
        servers: Sequence[Address],
        secret: bytes,
        link: str,
        deadline_s: float,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self._worker_threads = worker_threads
        self._spin_s = 0.0
        self.version = 0
        self.sequence = 0
        self._deadline_s = deadline_s
        self._links: list[Connection] = []
        for i, address in enumerate(servers):
            connection = connect(address, secret, peer=f"server:{i}", link=link)
            # The lead notices first who is missing and names it; it itself is waited for as a last resort.
            # The others answer what the lead has answered.
            connection.sock.settimeout(deadline_s if i else deadline_s + 10)
            connection.send(Kind.HELLO, {"role": "worker", "rank": rank, "incarnation": incarnation})
            self._links.append(connection)
        self._lead = self._links[0]
        self.local = all(c.local for c in self._links)
        self._region: Region | None = None
        self._shared: Region | None = None
        self._out: list[list[memoryview]] = []
        self._in: list[list[memoryview]] = []

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
        if frame.descriptors:
            self._shared = Region.attach(frame.descriptors[0], layout.nbytes, Access.PRIVATE)
        return Adopted(
            epoch=field(frame.body, "epoch", int),
            resumed=field(frame.body, "resumed", bool),
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
        gradients, parameters = memory[: layout.nbytes], memory[layout.nbytes :]
        in_place = in_place and self._shared is not None and self.local
        if in_place:
            assert self._shared is not None
            parameters = torch.frombuffer(self._shared.buffer, dtype=torch.uint8)
        self._spin_s = spin_for(layout.nbytes, self._worker_threads + len(self._links))
        shards = partition(layout, len(self._links))
        self._out = [[bytes_of(flat_view(gradients, s)) for s in shard] for shard in shards]
        self._in = [[bytes_of(flat_view(parameters, s)) for s in shard] for shard in shards]
        body = {
            "fingerprint": layout.fingerprint,
            "incarnation": self.incarnation,
            "in_place": in_place,
        }
        # The lead comes last: it opens the gate when everybody is everywhere.
        for connection in reversed(self._links):
            self._send(
                connection, Kind.ATTACH, body, descriptors=[self._region.fd] if connection.local else ()
            )
            if connection is not self._lead:
                self._take_parameters(connection, Kind.ATTACHED)
        self.version = field(self._take_parameters(self._lead, Kind.ATTACHED), "version", int)
        self.in_place = in_place
        if self.incarnation and len(self._links) > 1:
            self.exchange(Kind.PULL)  # it joined a run that goes on: have one version from all servers
        return gradients, parameters

    # --- training ---------------------------------------------------------------------------------

    def exchange(self, kind: Kind = Kind.PUSH, **body: Any) -> bool:
        """Push what lies in the gradient memory, wait until admitted, have fresh parameters.

        Returns whether the run wants this worker's part of a checkpoint.
        """
        message = {"sequence": self.sequence, "read_version": self.version, **body}
        self.sequence += kind is not Kind.PULL
        void = message.get("void", False)
        # The lead comes last: what it has seen is everywhere (docs/decisions.md).
        for connection, views in zip(reversed(self._links), reversed(self._out), strict=True):
            inline = not (connection.local or void or kind is Kind.PULL)
            self._send(connection, kind, message, views if inline else ())
        save_wanted = False
        if self._spin_s:
            self._lead.spin(self._spin_s)
        for connection in self._links:
            reply = self._take_parameters(connection, Kind.ADMIT)
            if connection is self._lead:
                self.version = field(reply, "version", int)
                save_wanted = "save" in reply
        return save_wanted

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
        self._send(self._lead, Kind.TAKE, body)
        reply = self._receive(self._lead, Kind.GRANT).body
        leases = [(int(i), [(int(a), int(b)) for a, b in ranges]) for i, ranges in reply["leases"]]
        grant = Grant(leases=leases, over=field(reply, "over", bool), save="save" in reply)
        if wait:
            self._catch_up(field(reply, "version", int))
        return grant

    def _catch_up(self, version: int) -> None:
        """After a rest: the others may have gone on meanwhile.

        The lead woke us; other servers may still be at an update that it has ordered already. A pull is
        part of the order, so their answer comes behind it, also to a worker that reads in place.
        """
        if self.in_place and len(self._links) == 1:
            self.version = version
        elif self.version != version:
            self.exchange(Kind.PULL)

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
        parts = []
        for connection in self._links:
            connection.send(Kind.STATE)
            frame = self._receive(connection, Kind.STATE)
            blob = connection.read_blob(frame, frame.payload_bytes)
            parts.append(parse_tensors(blob) if blob else {})
        return parts

    def load_optimizer_state(self, tensors: dict[str, Tensor]) -> None:
        """Give all servers optimizer state; each takes what is in its shard."""
        blob = save(tensors)  # not empty, whatever there is in it: an empty payload asks for the state
        for connection in self._links:
            connection.send(Kind.STATE, {}, [memoryview(blob)])
            self._receive(connection, Kind.STATE)

    def save(self, tensors: dict[str, Tensor]) -> None:
        """Send this worker's part of a checkpoint."""
        self._lead.send(Kind.SAVED, {}, [memoryview(_blob(tensors))])

    def bye(self) -> None:
        """Leave in order."""
        for connection in reversed(self._links):
            with contextlib.suppress(LinkError):
                connection.send(Kind.BYE)
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
            # A server that refused what it read last has closed the link: its reason is in the socket.
            try:
                last = connection.receive()
            except (LinkError, TimeoutError):
                raise broken from None
            raise (_error_of(last.body) if last.kind is Kind.ERROR else broken) from None

    def _take_parameters(self, connection: Connection, kind: Kind) -> dict[str, Any]:
        frame = self._receive(connection, kind)
        if frame.payload_bytes:
            connection.read_into(self._in[self._links.index(connection)])
        return frame.body

    def _receive(self, connection: Connection, *kinds: Kind) -> Frame:
        try:
            frame = connection.receive()
        except TimeoutError:
            raise DeadlineError(
                f"worker:{self.rank} got no answer from {connection.peer} for {self._deadline_s:g} s "
                "(--deadline)"
            ) from None
        if frame.kind is Kind.ERROR:
            raise _error_of(frame.body)
        if frame.kind not in kinds:
            raise LinkError(f"{connection.peer} answered {frame.kind.name}, expected {kinds[0].name}")
        return frame


def _error_of(body: dict[str, Any]) -> PacelineError:
    kind = getattr(exceptions, str(body.get("error")), PacelineError)
    known = isinstance(kind, type) and issubclass(kind, PacelineError)
    return (kind if known else PacelineError)(str(body.get("message")))


def _blob(tensors: dict[str, Tensor]) -> bytes:
    return save({k: v.contiguous() for k, v in tensors.items()}) if tensors else b""
