"""Workers: how they attach, what they send, and links that break. A part of every server."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from paceline.comm import Connection, Frame, Hub, Kind, Region
from paceline.comm.compression import parse_compression
from paceline.comm.faults import Faults
from paceline.comm.frames import field
from paceline.comm.transfer import Transfer
from paceline.core.modes import PushId
from paceline.exceptions import (
    FrameError,
    LayoutMismatch,
    LinkError,
    UsageError,
)
from paceline.observe.spans import recorder_of
from paceline.params import StateBook
from paceline.ps.config import ServerConfig
from paceline.ps.executor import Executor, Pushed
from paceline.ps.outcomes import Outcome
from paceline.ps.peers import MAX_STATE_BYTES, InlinePeer, ShmPeer, WorkerPeer
from paceline.ps.saving import for_others, read_blob
from paceline.ps.standby import Standby

__all__ = ["Attending", "rank_of", "saved_part"]

log = logging.getLogger("paceline.server")

BACK_S = 5.0
"""How long a worker whose link broke may take to come back, if we cannot see whether its process is there."""


class Attending:
    """Hears workers."""

    _hub: Hub

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.name = f"server:{config.rank}"
        self.spans = recorder_of(
            config.spans_in, f"server-{config.rank}.{config.incarnation}", clock_ns=config.clock_ns
        )
        self._faults = Faults.parse(config.faults)
        self._executor = Executor(config, self._faults, self.spans)
        self._lead_link: Connection | None = None
        self._standby: Standby | None = None
        self._answered_before: dict[int, int] = {}
        """Of each worker the last request that was answered before we were in the order."""
        self._buffers: dict[str, Tensor] = {}
        """For workers that join later: the newest buffers (BatchNorm statistics, …) that any worker sent, and
        what worker 0's script keeps. Empty before the first."""

    def _advance(self) -> None:
        """Execute what is due, as far as all that it needs is here, and do what follows from it."""
        while (outcomes := self._executor.execute_next(self._admit_body)) is not None:
            for outcome in outcomes:
                self._follow_from(outcome)

    def _follow_from(self, outcome: Outcome) -> None:
        """A step was executed."""
        raise NotImplementedError

    def _admit_body(self, worker: int, version: int) -> dict[str, Any]:
        return {"version": version}

    def _handlers(self) -> dict[Kind, Callable[[Connection, Frame], None]]:
        """What workers send."""
        return {
            Kind.ATTACH: self._on_attach,
            Kind.PUSH: self._on_push,
            Kind.ASSIGN: self._on_assign,
            Kind.PULL: self._on_pull,
            Kind.STATE: self._on_state,
            Kind.BYE: self._on_bye,
            Kind.TAKE: self._on_take,
            Kind.VOTE: self._on_vote,
            Kind.CALL: self._on_call,
            Kind.SAVED: self._on_saved,
            Kind.SENDS: self._on_sends,
            Kind.PROBE: self._on_probe,
        }

    def _link_broke(self, peer: WorkerPeer) -> None:
        """A worker's link ended. Unless its process did, it may come back over another socket."""
        if not peer.connection.keeps:
            self._worker_lost(peer)
            return
        peer.broken_since = peer.broken_since or time.monotonic()
        self._check_broken()

    def _check_broken(self) -> None:
        for peer in [*self._executor.peers.values()]:
            since = peer.broken_since
            if since is None:
                continue
            if has_ended(peer.pid) if peer.pid else time.monotonic() - since > BACK_S:
                self._worker_lost(peer)

    def _worker_lost(self, peer: WorkerPeer) -> None:
        """Its link is gone for good. Most likely its process is, too."""
        self._worker_left(peer, finished=False)

    def _resume(self, connection: Connection, body: dict[str, Any]) -> None:
        """A worker's link goes on over another socket."""
        peer = self._executor.peers.get(rank_of(connection))
        if peer is None or peer.incarnation != field(body, "incarnation", int) or not peer.connection.keeps:
            raise LinkError(f"{connection.peer} has no link here that could go on")
        self._hub.release(connection)
        self._hub.release(peer.connection)
        log.info("%s is back over another socket", peer.name)
        peer.broken_since = None
        try:
            peer.resume(connection, field(body, "resume", int))
        except LinkError as error:
            log.info("%s: %s", peer.name, error)
            self._link_broke(peer)
            return
        if isinstance(peer, ShmPeer):
            self._hub.add(peer.connection)

    def _on_probe(self, connection: Connection, frame: Frame) -> None:
        """A worker waits. Our probe comes behind all that we sent: if some of that was lost, it sees it."""
        connection.send(Kind.PROBE)

    def _on_attach(self, connection: Connection, frame: Frame) -> None:
        self._welcome(self._attach(connection, frame))

    def _attach(self, connection: Connection, frame: Frame) -> WorkerPeer:
        if self._executor.layout is None or self._executor.shard is None or self._executor.base is None:
            raise FrameError("attached before the run has a model")
        rank = rank_of(connection)
        incarnation = field(frame.body, "incarnation", int)
        if frame.body.get("fingerprint") != self._executor.layout.fingerprint:
            raise LayoutMismatch(f"worker:{rank} attached with another layout")
        transfer = self._transfer_of(rank, frame.body)
        older = self._executor.peers.get(rank)
        if older is not None:
            if older.incarnation >= incarnation:
                raise FrameError(f"worker:{rank} is here already as incarnation {older.incarnation}")
            self._worker_left(older, finished=False)
        peer: WorkerPeer
        if connection.local and not field(frame.body, "inline", bool, False):
            if len(frame.descriptors) != 1:
                raise FrameError("a worker on this host attaches with its memory")
            region = Region.attach(frame.descriptors[0], 2 * self._executor.layout.nbytes)
            peer = ShmPeer(connection, rank, incarnation, region, self._executor.layout, self._executor.shard)
            peer.may_share = field(frame.body, "in_place", bool)
            peer.read_in_place(self._executor.mode.in_place or self._executor.mode.needs_memory)
        else:
            self._hub.release(connection)  # from here on its own thread reads it
            peer = InlinePeer(
                connection,
                rank,
                incarnation,
                self._executor.layout,
                self._executor.shard,
                transfer=transfer,
                # Sent straight from the parameters where nobody can write to them meanwhile.
                in_place=self._executor.mode.in_place
                or (self.config.workers == 1 and not self._executor.peers and not self._executor.mode.local),
                sends=frame.body.get("sends"),
                groups_of=self._executor.groups_of,
                post=self._from_thread,
                lane=self.spans.lane(f"worker:{rank}"),
            )
        peer.told = self._executor.placement.number
        peer.pid = field(frame.body, "pid", int, 0) if connection.same_host else 0
        if field(frame.body, "keeps", bool, False):
            connection.keep()
        self._executor.keep_backup(peer)
        for other in self._executor.peers.values():  # who was alone is not any more
            other.read_in_place(self._executor.mode.in_place or self._executor.mode.needs_memory)
        self._executor.peers[rank] = peer
        self._answered_before.pop(rank, None)
        return peer

    def _transfer_of(self, rank: int, body: dict[str, Any]) -> Transfer:
        """How an attaching worker writes gradients, and how it wants replies."""
        try:
            return Transfer(
                compress=parse_compression(field(body, "compress", str, "none")),
                compress_replies=field(body, "compress_replies", bool, False),
            )
        except UsageError as error:
            raise FrameError(
                f"worker:{rank} writes its gradients in a way that {self.name} does not know: {error}"
            ) from None

    def _welcome(self, peer: WorkerPeer, **facts: Any) -> None:
        """Send an attached worker the parameters."""
        assert self._executor.shard is not None and self._executor.base is not None
        copies = [c for c in (peer.copy, peer.backup) if c is not None]
        if copies:
            self._executor.shard.update((), None, copies)
        with contextlib.suppress(LinkError):  # it died: its link says so by itself
            if isinstance(peer, InlinePeer):
                peer.welcome({**facts, "owned": self._executor.placement.owned(self.config.rank)})
            else:
                peer.connection.send(Kind.ATTACHED, facts)

    def _from_thread(self, peer: InlinePeer, frame: Frame | None, reason: str) -> None:
        if frame is None and peer.connection.keeps:
            used = peer.used
            self._hub.post(lambda: self._link_ended(peer, used, reason))
        elif frame is None:
            self._hub.post(lambda: self._hub.end(peer.connection, reason))
        else:
            received = frame
            self._hub.post(lambda: self._hub.handle(peer.connection, received))

    def _link_ended(self, peer: InlinePeer, used: int, reason: str) -> None:
        """Its thread has given up on a socket; it may have been given another one since."""
        if peer.given == used and self._executor.peers.get(peer.worker) is peer:
            log.info("%s: %s", peer.name, reason)
            self._link_broke(peer)

    def _peer(self, connection: Connection) -> WorkerPeer:
        peer = self._executor.peers.get(rank_of(connection))
        if peer is None or peer.connection is not connection:
            raise FrameError(f"{connection.peer} has not attached")
        return peer

    def _on_push(self, connection: Connection, frame: Frame) -> None:
        peer = self._peer(connection)
        if not self._skips(peer, frame.body):
            self._receive_push(peer, frame.body)
            peer.asked = (frame.kind, frame.body)  # whoever leads next may not have heard of it
            self._advance()

    def _skips(self, peer: WorkerPeer, body: dict[str, Any]) -> bool:
        """Whether a request was answered without us, before we were in the order."""
        if field(body, "n", int) > self._answered_before.get(peer.worker, 0):
            return False
        peer.asked = None
        peer.skip()
        return True

    def _receive_push(self, peer: WorkerPeer, body: dict[str, Any]) -> PushId:
        push = PushId(peer.worker, peer.incarnation, field(body, "sequence", int))
        if "settings" in body:
            peer.settings = self._checked_settings(field(body, "settings", list))
        missing = field(body, "missing", list, [])
        if not all(isinstance(i, int) for i in missing):
            raise FrameError("tensors without a gradient that are not numbers")
        # A worker has one push under way: one that was dropped before it came is not kept. (What is left of
        # an earlier incarnation goes when the lead says that it is gone.)
        for older in [
            p for p, pushed in self._executor.pushed.items() if pushed.peer is peer and not pushed.held
        ]:
            del self._executor.pushed[older]
        void = field(body, "void", bool, False)
        self._executor.pushed[push] = Pushed(
            peer, peer.gradients, void, frozenset(missing), self._executor.groups_of(body)
        )
        return push

    def _checked_settings(self, settings: list[Any]) -> list[dict[str, Any]]:
        assert self._executor.spec is not None
        if len(settings) != len(self._executor.spec.groups) or not all(isinstance(s, dict) for s in settings):
            raise FrameError("settings that do not fit the parameter groups")
        for given, known in zip(settings, self._executor.spec.groups, strict=True):
            for name, value in given.items():
                # What was a number stays one: the optimizer must not stumble over it later.
                if isinstance(known.get(name), float | int) and not isinstance(value, float | int):
                    raise FrameError(f"setting {name!r} is {value!r:.40}, expected a number")
        return [{k: tuple(v) if isinstance(v, list) else v for k, v in group.items()} for group in settings]

    def _on_assign(self, connection: Connection, frame: Frame) -> None:
        self._on_push(connection, frame)

    def _on_pull(self, connection: Connection, frame: Frame) -> None:
        peer = self._peer(connection)
        if not self._skips(peer, frame.body):
            peer.asked = (frame.kind, frame.body)  # the lead orders the reply

    def _on_take(self, connection: Connection, frame: Frame) -> None:
        """Leases are the lead's: this worker knows that the lead is gone, and we do not yet."""
        self._peer(connection).asked = (frame.kind, frame.body)

    def _on_vote(self, connection: Connection, frame: Frame) -> None:
        """The lead answers votes: see `_on_take`."""
        self._on_take(connection, frame)

    def _on_call(self, connection: Connection, frame: Frame) -> None:
        """The lead answers calls: see `_on_take`."""
        self._on_take(connection, frame)

    def _on_saved(self, connection: Connection, frame: Frame) -> None:
        name, tensors = saved_part(connection, frame)
        self._hear_buffers(tensors, rank_of(connection))
        if self._standby is not None and "buffers" not in frame.body:
            self._standby.states[name] = tensors

    def _hear_buffers(self, part: Mapping[str, Tensor], worker: int) -> None:
        """Keep what others start from of a worker's part of a checkpoint, which may be nothing else."""
        self._buffers.update(for_others(part, worker))

    def _on_sends(self, connection: Connection, frame: Frame) -> None:
        """For those who read payloads; in shared memory we see all of it."""

    def _on_state(self, connection: Connection, frame: Frame) -> None:
        """A worker wants the optimizer state, or gives one (load_state_dict), to be taken over when the order
        says so."""
        assert self._executor.shard is not None
        peer = self._peer(connection)
        if frame.payload_bytes:
            blob = connection.read_blob(frame, MAX_STATE_BYTES)
            load = PushId(peer.worker, peer.incarnation, field(frame.body, "number", int))
            book = StateBook([read_blob(blob, "the optimizer state")])
            self._executor.loads[load] = (book, self._executor.groups_of(frame.body))
            self._advance()
        else:
            connection.send(Kind.STATE, {}, [memoryview(save(self._executor.shard.snapshot()))])

    def _on_bye(self, connection: Connection, frame: Frame) -> None:
        peer = self._executor.peers.get(rank_of(connection))
        if peer is not None and peer.connection is connection:
            self._worker_left(peer, finished=not field(frame.body, "left", bool, False))

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        self._hub.release(peer.connection)
        if self._executor.peers.get(peer.worker) is peer:
            del self._executor.peers[peer.worker]
        if self._standby is not None:
            self._standby.gone[peer.worker] = (peer.incarnation, finished)
        log.info("%s %s", peer.name, "finished" if finished else "is gone")
        if any(pushed.peer is peer and not pushed.held for pushed in self._executor.pushed.values()):
            peer.connection.close()  # its gradient memory is still due
        else:
            peer.close()
        self._advance()


def has_ended(pid: int) -> bool:
    """Whether a process of this host has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return Path("/proc/self").exists()
    return state in "ZX"


def saved_part(connection: Connection, frame: Frame) -> tuple[str, dict[str, Tensor]]:
    """A worker's part of a checkpoint, and the name of its file."""
    rank = rank_of(connection)
    blob = connection.read_blob(frame, MAX_STATE_BYTES)
    return f"worker-{rank}.safetensors", read_blob(blob, f"what worker:{rank} saved")


def rank_of(connection: Connection) -> int:
    """The rank of the worker at the other end; FrameError if it is none."""
    role, _, rank = connection.peer.partition(":")
    if role != "worker":
        raise FrameError(f"{connection.peer} is not a worker")
    return int(rank)
