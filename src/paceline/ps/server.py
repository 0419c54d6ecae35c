"""A parameter server: one process, one thread that reads small frames and updates slices.

Server 0 is the lead: it also runs the Lead (mode, leases) and forwards the run's order to the others.
Shared-memory links are served by the main thread itself, so a round costs no hand-over between threads;
a TCP link has a thread that moves its bytes while the main thread updates.
"""

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from paceline.comm import Address, Connection, Frame, Hub, Kind, Listener, Region, connect
from paceline.comm.frames import field
from paceline.comm.hub import refuse
from paceline.data.leases import LeaseBook
from paceline.exceptions import (
    CheckpointError,
    DeadlineError,
    FrameError,
    LayoutMismatch,
    LinkError,
    PacelineError,
    PlanError,
)
from paceline.modes import PushId, parse_mode
from paceline.params import Layout, OptimizerSpec, StateBook, partition
from paceline.ps.lead import EarlyExit, Lead, Push, Steps
from paceline.ps.peers import ShmPeer, TcpPeer, WorkerPeer
from paceline.ps.saving import Saver, read_blob, state_book, worker_state
from paceline.ps.shard import Contribution, Shard
from paceline.storage.checkpoint import Checkpoint, FileInfo, load, write_part

__all__ = ["ServerConfig", "serve"]

log = logging.getLogger("paceline.server")

STATS_S = 0.25
"""How often the lead tells the controller how far the run is."""

_MAX_STATE_BYTES = 1 << 30
_LEASES_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a server must know before anybody connects."""

    rank: int
    servers: int
    workers: int
    mode: str
    run_dir: str
    deadline_s: float
    checkpoint_every: int = 0
    keep_checkpoints: int = 3
    resume: str | None = None
    """Path of the checkpoint to go on from."""
    clip_norm: float | None = None
    optimizers: tuple[str, ...] = ()
    """Optimizers beyond torch.optim that workers may ask for."""
    host: str = "127.0.0.1"
    threads: int = 1


@dataclass(slots=True)
class _Pushed:
    """A push whose gradient is here."""

    peer: WorkerPeer
    void: bool
    missing: frozenset[int]


class Server:
    """See the module. `run` returns when the controller says stop or is gone."""

    def __init__(self, config: ServerConfig, secret: bytes, controller: Connection) -> None:
        self.config = config
        self.name = f"server:{config.rank}"
        self.is_lead = config.rank == 0
        self.mode = parse_mode(config.mode)
        self._secret = secret
        self._controller = controller
        self._hub = Hub(self, Listener(host=config.host), secret, patience_s=config.deadline_s)
        self._running = True
        self._failed = False
        # the model
        self.layout: Layout | None = None
        self.shard: Shard | None = None
        self._spec: OptimizerSpec | None = None
        self._region: Region | None = None
        self._base: Tensor | None = None
        # workers and the order
        self._peers: dict[int, WorkerPeer] = {}
        self._pushed: dict[PushId, _Pushed] = {}
        self._orders: collections.deque[list[Any]] = collections.deque()
        self._lost = 0
        self._update_s = 0.0
        # other servers
        self._lead_link: Connection | None = None
        self._followers: dict[int, Connection] = {}
        # lead only
        self._lead = Lead(self.mode, clip_norm=config.clip_norm)
        self._checkpoint: Checkpoint | None = None
        self._offers: dict[int, tuple[Connection, dict[str, Any]]] = {}
        self._asked_weights = False
        self._adopting: set[int] = set()
        self._gate: dict[int, tuple[Connection, Callable[[], None]]] = {}
        self._gate_open = False
        self._gate_since = 0.0
        self._extras: dict[str, Tensor] = {}
        self._extras_blob = b""
        self._state_keys: list[str] = []
        self._data: dict[str, Any] | None = None
        self._held_since: dict[int, float] = {}
        self._norms: dict[int, float] = {}
        self._norms_due = 0
        self._after_norms: Steps = []
        self._saver: Saver | None = None
        self._save_flags: set[int] = set()
        self._states: dict[str, dict[str, Tensor]] = {}
        self._save_again = False
        self._last_saved = -1
        self._last_stats = 0.0
        self._pushes_file: Any = None
        self._worker_handlers = {
            Kind.OFFER: self._on_offer,
            Kind.ATTACH: self._on_attach,
            Kind.PUSH: self._on_push,
            Kind.ASSIGN: self._on_assign,
            Kind.PULL: self._on_pull,
            Kind.TAKE: self._on_take,
            Kind.STATE: self._on_state,
            Kind.SAVED: self._on_saved,
            Kind.BYE: self._on_bye,
        }

    # --- the loop -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop."""
        if self.is_lead:
            if self.config.resume:
                self._checkpoint = load(Path(self.config.resume))
            self._open_pushes_file()
        self._hub.add(self._controller)
        self._controller.send(Kind.READY, {"address": self._hub.listener.address.to_json()})
        try:
            while self._running:
                self._hub.poll(STATS_S)
                self._tick()
        finally:
            self._close()

    def on_stranger(self, reason: str) -> None:
        """A port scan, or a role of another run."""
        log.warning("refused a connection: %s", reason)

    def on_hello(self, connection: Connection, body: dict[str, Any]) -> None:
        """A worker, or (to the lead) another server."""
        role, _, rank = connection.peer.partition(":")
        if role == "server" and self.is_lead:
            self._followers[int(rank)] = connection
            self._try_adopt()
        elif role != "worker":
            raise FrameError(f"{connection.peer} has no business here")

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Whatever it is, it comes from somebody who knows the secret."""
        if connection is self._controller:
            self._on_controller(frame)
        elif connection is self._lead_link:
            self._on_lead(frame)
        elif connection in self._followers.values():
            self._on_follower(connection, frame)
        else:
            handler = self._worker_handlers.get(frame.kind)
            if handler is None:
                raise FrameError(f"a worker does not send {frame.kind.name}")
            try:
                handler(connection, frame)
            except EarlyExit as error:
                self._fail(error)

    def on_end(self, connection: Connection, reason: str) -> None:
        """A connection is over: a worker's means it left."""
        if connection is self._controller:
            self._running = False
            return
        if connection is self._lead_link or connection in self._followers.values():
            if self._running:
                self._fail(LinkError(f"{self.name} lost {connection.peer}: {reason}"))
            return
        for rank, (offered, _) in list(self._offers.items()):
            if offered is connection:
                del self._offers[rank]
                self._asked_weights = self._asked_weights and rank != 0
        for rank, (waiting, _) in list(self._gate.items()):
            if waiting is connection:
                del self._gate[rank]
        for peer in list(self._peers.values()):
            if peer.connection is connection:
                log.info("%s: %s", peer.name, reason)
                self._worker_left(peer, finished=False)

    def _fail(self, error: PacelineError) -> None:
        """The run cannot go on: tell the controller, once."""
        if not self._failed:
            self._failed = True
            log.error("%s", error)
            refuse(self._controller, error)

    def _close(self) -> None:
        self._running = False
        if self._saver is not None:
            self._saver.join()
        for peer in self._peers.values():
            peer.close()
        for link in [*self._followers.values(), self._lead_link, self._controller]:
            if link is not None:
                link.close()
        self._hub.close()
        if self._pushes_file is not None:
            self._write_pushes()
            self._pushes_file.close()

    # --- controller and other servers ---------------------------------------------------------------

    def _on_controller(self, frame: Frame) -> None:
        if frame.kind is Kind.START and not self.is_lead:
            address = Address.from_json(field(frame.body, "lead", dict))
            link = connect(address, self._secret, peer="server:0")
            link.send(Kind.HELLO, {"role": "server", "rank": self.config.rank})
            self._lead_link = link
            self._hub.add(link)
        elif frame.kind is Kind.CHECKPOINT:
            self._save_now()
        elif frame.kind is Kind.STOP:
            self._running = False

    def _on_lead(self, frame: Frame) -> None:
        if frame.kind is Kind.ADOPT:
            layout = Layout.from_json(frame.body["layout"])
            spec = OptimizerSpec.from_json(frame.body["optimizer"])
            assert self._lead_link is not None
            region = None
            if frame.descriptors:
                region = Region.attach(frame.descriptors[0], layout.nbytes)
            self._adopt(layout, spec, region)
            assert self.shard is not None and self._base is not None
            if frame.payload_bytes:
                self._lead_link.read_into([_bytes_of(t) for t in self.shard.flats(self._base)])
            if frame.body["checkpoint"]:
                self.shard.restore(state_book(load(Path(frame.body["checkpoint"]))))
            self._lead_link.send(Kind.ADOPTED)
        elif frame.kind is Kind.ORDER:
            self._orders.extend(frame.body["steps"])
            self._advance()

    def _on_follower(self, connection: Connection, frame: Frame) -> None:
        if frame.kind is Kind.ADOPTED:
            self._adopting.discard(int(connection.peer.partition(":")[2]))
            if not self._adopting:
                self._adopted()
        elif frame.kind is Kind.DONE and "norms" in frame.body:
            self._add_norms(frame.body["norms"])
        elif frame.kind is Kind.DONE:
            self._part_written(frame.body)

    # --- the model ----------------------------------------------------------------------------------

    def _on_offer(self, connection: Connection, frame: Frame) -> None:
        if not self.is_lead:
            raise FrameError("offers go to server:0")
        rank = _rank(connection)
        if frame.payload_bytes:
            self._take_weights(connection, frame)
            return
        layout = Layout.from_json(frame.body.get("layout"))
        offered = OptimizerSpec.from_json(frame.body.get("optimizer"))
        if self.layout is not None:
            difference = self.layout.first_difference(layout)
            assert self._spec is not None
            if difference is None and offered.target != self._spec.target:
                difference = f"the optimizer is {offered.target}, expected {self._spec.target}"
            if difference is None and frame.body.get("data") != self._data:
                difference = f"the loader has {frame.body.get('data')}, expected {self._data}"
            if difference is not None:
                raise LayoutMismatch(
                    f"worker:{rank} prepared another model than the run's: {difference}. Every worker "
                    "must build the same model, optimizer and loader; check what depends on the rank."
                )
        self._offers[rank] = (connection, frame.body)
        if self.layout is not None and not self._adopting:
            self._answer_offers()
        else:
            self._try_adopt()

    def _try_adopt(self) -> None:
        """Start adopting worker 0's model once it is offered and all servers are connected."""
        ready = len(self._followers) == self.config.servers - 1
        if self.layout is not None or self._asked_weights or 0 not in self._offers or not ready:
            return
        connection, body = self._offers[0]
        self._asked_weights = True
        if self._checkpoint is None:
            connection.send(Kind.ADOPT)
        else:
            self._begin_adoption(body, None)

    def _take_weights(self, connection: Connection, frame: Frame) -> None:
        if 0 not in self._offers or self._offers[0][0] is not connection or self.layout is not None:
            raise FrameError("weights that nobody asked for")
        body = self._offers[0][1]
        layout = Layout.from_json(body["layout"])
        extras_bytes = field(frame.body, "extras_bytes", int)
        if not 0 <= extras_bytes <= _MAX_STATE_BYTES:
            raise FrameError(f"{extras_bytes:,} bytes of buffers are over the limit")
        self._region = Region.create(layout.nbytes)
        blob = bytearray(extras_bytes)
        connection.read_into([memoryview(self._region.buffer), memoryview(blob)])
        self._extras = read_blob(bytes(blob), f"what {connection.peer} sent as buffers")
        self._begin_adoption(body, self._region)

    def _begin_adoption(self, body: dict[str, Any], region: Region | None) -> None:
        layout = Layout.from_json(body["layout"])
        spec = OptimizerSpec.from_json(body["optimizer"])
        self._data = body.get("data")
        self._state_keys = [str(k) for k in body.get("state_keys", [])]
        if self._checkpoint is not None:
            self._check_checkpoint(layout, spec)
        if self._data is not None and "samples" in self._data:
            samples = field(self._data, "samples", int)
            if samples < self.config.workers:
                raise PlanError(
                    f"{self.config.workers} workers but only {samples} samples: every worker needs at least "
                    "one. Use fewer --workers or more data."
                )
            self._lead.book = LeaseBook(
                samples=samples,
                batch_size=field(self._data, "batch_size", int),
                drop_last=field(self._data, "drop_last", bool),
                by_round=self.mode.by_round,
            )
        if self._checkpoint is not None:
            self._lead.restore(self._checkpoint.meta["lead"])
            self._last_saved = self._lead.version
            if "extras.safetensors" in self._checkpoint.files:
                self._extras = self._checkpoint.tensors("extras.safetensors")
        self._adopt(layout, spec, region or Region.create(layout.nbytes))
        assert self.shard is not None and self._region is not None and self._base is not None
        if self._checkpoint is not None:
            self.shard.restore(state_book(self._checkpoint))
        self._adopting = set(self._followers)
        path = None if self._checkpoint is None else str(self._checkpoint.path)
        shards = partition(layout, self.config.servers)
        for rank, link in self._followers.items():
            message = {"layout": layout.to_json(), "optimizer": spec.to_json(), "checkpoint": path}
            if link.local:
                link.send(Kind.ADOPT, message, descriptors=[self._region.fd])
            else:
                shard = [_bytes_of(self._base[s.start : s.stop]) for s in shards[rank]]
                link.send(Kind.ADOPT, message, shard)
        if not self._adopting:
            self._adopted()

    def _check_checkpoint(self, layout: Layout, spec: OptimizerSpec) -> None:
        assert self._checkpoint is not None
        saved = Layout.from_json(self._checkpoint.meta["layout"])
        mine = {t.name: t for t in layout.tensors}
        for t in saved.tensors:
            twin = mine.pop(t.name, None)
            if twin is None or (twin.shape, twin.dtype) != (t.shape, t.dtype):
                got = "missing" if twin is None else f"{list(twin.shape)} {twin.dtype}"
                raise CheckpointError(
                    f"{self._checkpoint.path.name} is of another model: parameter {t.name!r} is "
                    f"{list(t.shape)} {t.dtype} there and {got} in the script."
                )
        if mine:
            raise CheckpointError(
                f"{self._checkpoint.path.name} is of another model: it has no parameter {min(mine)!r}."
            )
        target = self._checkpoint.meta["optimizer"]["target"]
        if target != spec.target:
            raise CheckpointError(
                f"{self._checkpoint.path.name} was trained with {target}, the script has {spec.target}."
            )

    def _adopt(self, layout: Layout, spec: OptimizerSpec, region: Region | None) -> None:
        self.layout, self._spec, self._region = layout, spec, region
        if region is not None:
            self._base = torch.frombuffer(region.buffer, dtype=torch.uint8)
        else:
            self._base = torch.zeros(layout.nbytes, dtype=torch.uint8)
        mine = partition(layout, self.config.servers)[self.config.rank]
        self.shard = Shard(layout, spec, mine, self._base, self.config.optimizers)
        log.info(
            "adopted %s tensors in %s slices, %.1f MB mine, fingerprint %s",
            len(layout.tensors),
            len(layout.slices),
            self.shard.nbytes / 1e6,
            layout.fingerprint,
        )

    def _adopted(self) -> None:
        """All servers have the model: nobody else may write to it from here on."""
        assert self._region is not None
        self._region.seal_writes()
        self._answer_offers()

    def _answer_offers(self) -> None:
        assert self.layout is not None and self._region is not None
        for rank, (connection, body) in sorted(self._offers.items()):
            theirs = Layout.from_json(body["layout"])
            difference = self.layout.first_difference(theirs)
            if difference is None and body.get("data") != self._data:
                difference = f"the loader has {body.get('data')}, expected {self._data}"
            if difference is not None:
                error = LayoutMismatch(
                    f"worker:{rank} prepared another model than worker:0: {difference}. Every worker must "
                    "build the same model, optimizer and loader; check what depends on the rank."
                )
                refuse(connection, error)
                continue
            mine = dict(self._extras)
            if self._checkpoint is not None:
                saved = worker_state(self._checkpoint, rank) or worker_state(self._checkpoint, 0)
                mine.update({k[7:]: v for k, v in saved.items() if k.startswith("buffer:")})
                if worker_state(self._checkpoint, rank):
                    mine.update({k: v for k, v in saved.items() if k.startswith(("rng:", "user:"))})
            blob = _blob(mine)
            answer = {
                "fingerprint": self.layout.fingerprint,
                "epoch": self._lead.epoch,
                "resumed": self._checkpoint is not None,
            }
            share = connection.local and self.mode.in_place
            connection.send(
                Kind.ADOPTED, answer, [memoryview(blob)], [self._region.fd] if share else ()
            )
        self._offers.clear()

    # --- workers ------------------------------------------------------------------------------------

    def _on_attach(self, connection: Connection, frame: Frame) -> None:
        if self.layout is None or self.shard is None or self._base is None:
            raise FrameError("attached before the run has a model")
        rank = _rank(connection)
        incarnation = field(frame.body, "incarnation", int)
        if frame.body.get("fingerprint") != self.layout.fingerprint:
            raise LayoutMismatch(f"worker:{rank} attached with another layout")
        older = self._peers.get(rank)
        if older is not None:
            if older.incarnation >= incarnation:
                raise FrameError(f"worker:{rank} is here already as incarnation {older.incarnation}")
            self._worker_left(older, finished=False)
        in_place = field(frame.body, "in_place", bool)
        if in_place and not self.mode.in_place:
            raise FrameError(f"parameters are not read in place in mode {self.mode}")
        if connection.local:
            if len(frame.descriptors) != 1:
                raise FrameError("a worker on this host attaches with its memory")
            region = Region.attach(frame.descriptors[0], 2 * self.layout.nbytes)
            peer: WorkerPeer = ShmPeer(
                connection, rank, incarnation, region, self.layout, self.shard, in_place=in_place
            )
        else:
            self._hub.release(connection)
            peer = TcpPeer(
                connection,
                rank,
                incarnation,
                self.layout,
                self.shard,
                in_place=self.mode.in_place,
                live=self.shard.flats(self._base),
                post=self._from_thread,
            )
        self._peers[rank] = peer

        def welcome() -> None:
            assert self.shard is not None and self._base is not None
            if peer.copy is not None:
                self.shard.update((), None, [peer.copy])
            live = self.shard.flats(self._base)
            payload = [] if connection.local else [_bytes_of(t) for t in live]
            body = {"version": self._lead.version, "epoch": self._lead.epoch}
            with contextlib.suppress(LinkError):
                connection.send(Kind.ATTACHED, body, payload)

        if not self.is_lead:
            welcome()
        elif self._gate_open:
            self._run(self._lead.join(rank, incarnation))
            welcome()
        else:
            self._gate_since = self._gate_since or time.monotonic()
            self._gate[rank] = (connection, welcome)
            self._open_gate()

    def _open_gate(self) -> None:
        """The first step waits until all planned workers are here, so that a run is repeatable."""
        if len(self._gate) < self.config.workers:
            return
        self._gate_open = True
        waiting, self._gate = self._gate, {}
        for rank in sorted(waiting):
            self._run(self._lead.join(rank, self._peers[rank].incarnation))
        for rank in sorted(waiting):
            waiting[rank][1]()

    def _from_thread(self, peer: TcpPeer, frame: Frame | None, reason: str) -> None:
        if frame is None:
            self._hub.post(lambda: self._hub.end(peer.connection, reason))
        else:
            received = frame
            self._hub.post(lambda: self._hub.handle(peer.connection, received))

    def _peer(self, connection: Connection) -> WorkerPeer:
        peer = self._peers.get(_rank(connection))
        if peer is None or peer.connection is not connection:
            raise FrameError(f"{connection.peer} has not attached")
        return peer

    def _on_push(self, connection: Connection, frame: Frame) -> None:
        peer = self._peer(connection)
        body = frame.body
        push = PushId(peer.worker, peer.incarnation, field(body, "sequence", int))
        if "settings" in body:
            peer.settings = self._checked_settings(field(body, "settings", list))
        missing = frozenset(field(body, "missing", list, []))
        void = field(body, "void", bool, False)
        self._pushed[push] = _Pushed(peer, void, missing)
        if not self.is_lead:
            self._advance()
            return
        self._held_since[peer.worker] = time.monotonic()
        if void:
            log.warning("worker:%s pushed NaN or Inf at sequence %s: refused", *push_of(push))
        self._act(
            self._lead.push(
                Push(
                    id=push,
                    read_version=field(body, "read_version", int),
                    samples=field(body, "samples", int, 0),
                    leases=tuple(field(body, "leases", list, [])),
                    void=void,
                )
            )
        )

    def _checked_settings(self, settings: list[Any]) -> list[dict[str, Any]]:
        assert self._spec is not None
        if len(settings) != len(self._spec.groups) or not all(isinstance(s, dict) for s in settings):
            raise FrameError("settings that do not fit the parameter groups")
        return [
            {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()} for group in settings
        ]

    def _on_assign(self, connection: Connection, frame: Frame) -> None:
        peer = self._peer(connection)
        push = PushId(peer.worker, peer.incarnation, field(frame.body, "sequence", int))
        self._pushed[push] = _Pushed(peer, False, frozenset())
        if not self.is_lead:
            self._advance()
            return
        admit = ["admit", peer.worker, self._lead.version]
        self._act([["assign", *push_of(push)], admit])

    def _on_pull(self, connection: Connection, frame: Frame) -> None:
        peer = self._peer(connection)
        if self.is_lead:
            self._act([["admit", peer.worker, self._lead.version]])

    def _on_take(self, connection: Connection, frame: Frame) -> None:
        peer = self._peer(connection)
        if self._data is None:
            raise FrameError("leases of a run without a prepared loader")
        given_back = field(frame.body, "give_back", list, [])
        if given_back:
            self._lead.give_back(peer.worker, given_back)
        leases, steps = self._lead.take(
            peer.worker,
            field(frame.body, "epoch", int),
            min(_LEASES_AT_ONCE, max(0, field(frame.body, "limit", int))),
            wait=field(frame.body, "wait", bool),
        )
        if leases is None:
            self._held_since[peer.worker] = time.monotonic()
        else:
            self._grant(peer, leases, over=self._lead.over(frame.body["epoch"]))
        self._act(steps)

    def _grant(self, peer: WorkerPeer, leases: Any, *, over: bool) -> None:
        self._held_since.pop(peer.worker, None)
        body: dict[str, Any] = {
            "leases": [[lease.id, list(lease.ranges)] for lease in leases],
            "over": over,
            "version": self._lead.version,
        }
        self._flag(peer.worker, body)
        with contextlib.suppress(LinkError):
            peer.connection.send(Kind.GRANT, body)

    def _on_state(self, connection: Connection, frame: Frame) -> None:
        """A worker wants the optimizer state (or gives it: after load_state_dict)."""
        assert self.shard is not None
        if frame.payload_bytes:
            if frame.payload_bytes > 8 * self.layout_bytes + _MAX_STATE_BYTES:
                raise FrameError(f"{frame.payload_bytes:,} bytes of optimizer state are over the limit")
            blob = bytearray(frame.payload_bytes)
            connection.read_into([memoryview(blob)])
            self.shard.restore(
                StateBook([read_blob(bytes(blob), "the optimizer state")]), parameters=False
            )
            connection.send(Kind.STATE)
        else:
            connection.send(Kind.STATE, {}, [memoryview(_blob(self.shard.snapshot()))])

    @property
    def layout_bytes(self) -> int:
        return self.layout.nbytes if self.layout else 0

    def _on_saved(self, connection: Connection, frame: Frame) -> None:
        if frame.payload_bytes > _MAX_STATE_BYTES:
            raise FrameError(f"{frame.payload_bytes:,} bytes of worker state are over the limit")
        blob = bytearray(frame.payload_bytes)
        connection.read_into([memoryview(blob)])
        rank = _rank(connection)
        tensors = read_blob(bytes(blob), f"what worker:{rank} saved")
        self._states[f"worker-{rank}.safetensors"] = tensors
        if self._saver is not None:
            self._saver.worker_saved(rank)

    def _on_bye(self, connection: Connection, frame: Frame) -> None:
        peer = self._peers.get(_rank(connection))
        if peer is not None and peer.connection is connection:
            self._worker_left(peer, finished=True)

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        self._hub.release(peer.connection)
        if self._peers.get(peer.worker) is peer:
            del self._peers[peer.worker]
        self._held_since.pop(peer.worker, None)
        self._save_flags.discard(peer.worker)
        log.info("%s %s", peer.name, "finished" if finished else "is gone")
        if self.is_lead and self._gate_open:
            self._act(self._lead.leave(peer.worker, peer.incarnation, finished=finished))
        if self._saver is not None:
            self._saver.worker_saved(peer.worker)
        # Its gradient memory stays until no push of it is due.
        if not any(p.worker == peer.worker for p in self._pushed):
            peer.close()
        else:
            peer.connection.close()
        if not self.is_lead:
            self._advance()

    # --- the run's order ----------------------------------------------------------------------------

    def _act(self, steps: Steps) -> None:
        """Lead: make steps part of the order, then answer whoever waits for leases."""
        self._run(steps)
        while True:
            answers, more = self._lead.granted(_LEASES_AT_ONCE)
            if not answers and not more:
                return
            self._run(more)
            for worker, leases, over in answers:
                if worker in self._peers:
                    self._grant(self._peers[worker], leases, over=over)

    def _run(self, steps: Steps) -> None:
        """Lead: forward steps to the followers, then execute them."""
        if not steps:
            return
        every = self.config.checkpoint_every
        if every and any(s[0] == "apply" for s in steps) and self._lead.version % every == 0:
            at = 1 + max(i for i, s in enumerate(steps) if s[0] == "apply")
            steps = [*steps[:at], *self._begin_save(), *steps[at:]]
        if self._followers:
            for link in self._followers.values():
                with contextlib.suppress(LinkError):
                    link.send(Kind.ORDER, {"steps": steps})
        self._orders.extend(steps)
        self._advance()

    def _advance(self) -> None:
        """Execute what is due, as far as the pushes it needs are here."""
        while self._orders:
            step = self._orders[0]
            if step[0] in ("apply", "reduce", "assign") and not self._all_here(step):
                return
            self._orders.popleft()
            admits = []
            if step[0] == "admit":
                admits.append(step)
            if step[0] in ("admit", "apply", "commit", "assign"):
                while self._orders and self._orders[0][0] == "admit":
                    admits.append(self._orders.popleft())
            self._execute(step, admits)

    def _all_here(self, step: list[Any]) -> bool:
        """Whether every push of a step has arrived, or never will because its worker is gone."""
        ids = [step[1:]] if step[0] == "assign" else [p[:3] for p in step[1]]
        for worker, incarnation, sequence in ids:
            if PushId(worker, incarnation, sequence) in self._pushed:
                continue
            peer = self._peers.get(worker)
            if peer is not None and peer.incarnation == incarnation:
                return False
        return True

    def _execute(self, step: list[Any], admits: list[list[Any]]) -> None:
        assert self.shard is not None
        kind = step[0]
        if kind == "drop":
            self._pushed.pop(PushId(*step[1:]), None)
            return
        if kind == "left":
            gone = self._peers.get(step[1])
            if not self.is_lead and gone is not None and gone.incarnation == step[2]:
                self._worker_left(gone, finished=False)
            for push in [p for p in self._pushed if p.worker == step[1] and p.incarnation == step[2]]:
                del self._pushed[push]
            return
        if kind == "checkpoint":
            self._write_snapshot(step[1], Path(step[2]))
            return
        started = time.perf_counter()
        contributions, settings = self._contributions(step) if kind in ("apply", "reduce") else ([], None)
        if kind == "reduce":
            self._reduce(contributions, settings)
            return
        if kind == "assign":
            pushed = self._pushed.pop(PushId(*step[1:]), None)
            if pushed is not None:
                self.shard.assign(pushed.peer.gradients)
        peers = self._start_admits(admits)
        copies = [p.copy for p in peers if p.copy is not None]
        streaming = [p for p in peers if isinstance(p, TcpPeer)]

        def on_slice(i: int) -> None:
            for p in streaming:
                p.slice_ready(i)

        report = on_slice if streaming else None
        if kind == "commit":
            self.shard.commit(step[1], self._reduce_settings, copies, report)
        else:
            self.shard.update(contributions, settings, copies, report)
        for p in peers:
            with contextlib.suppress(LinkError):  # it died meanwhile; its link says so by itself
                p.end_admit()
        if kind in ("apply", "commit"):
            self._update_s += time.perf_counter() - started
            self._count_refusals()

    def _contributions(self, step: list[Any]) -> tuple[list[Contribution], Any]:
        contributions, settings = [], None
        for worker, incarnation, sequence, weight in step[1]:
            pushed = self._pushed.pop(PushId(worker, incarnation, sequence), None)
            if pushed is None:
                self._lost += 1
                log.warning("the push of worker:%s was lost with it on %s", worker, self.name)
                continue
            if settings is None:
                settings = pushed.peer.settings
            contributions.append(
                Contribution(worker, pushed.peer.gradients, float(weight), pushed.missing)
            )
        return contributions, settings

    def _start_admits(self, admits: list[list[Any]]) -> list[WorkerPeer]:
        peers = []
        for _, worker, version in admits:
            peer = self._peers.get(worker)
            if peer is None:
                continue
            self._held_since.pop(worker, None)
            body = {"version": version}
            if self.is_lead:
                self._flag(worker, body)
            peer.start_admit(body)
            peers.append(peer)
        return peers

    def _flag(self, worker: int, body: dict[str, Any]) -> None:
        """Ask a worker for its part of the checkpoint in the making, with the reply it gets anyway."""
        if worker in self._save_flags and self._saver is not None:
            self._save_flags.discard(worker)
            body["save"] = self._saver.version

    def _reduce(self, contributions: list[Contribution], settings: Any) -> None:
        """First half of an update with clip_norm; the second comes as a `commit` with the scale."""
        assert self.shard is not None
        self._reduce_settings = settings
        norms = self.shard.reduce(contributions) if contributions else []
        if not self.is_lead:
            assert self._lead_link is not None
            self._lead_link.send(Kind.DONE, {"norms": norms})
            return
        # What follows in the order (the admits) waits for the commit.
        self._after_norms = list(self._orders)
        self._orders.clear()
        self._norms_due = self.config.servers
        self._add_norms(norms)

    def _add_norms(self, norms: list[Any]) -> None:
        self._norms.update({int(i): float(x) for i, x in norms})
        self._norms_due -= 1
        if self._norms_due:
            return
        assert self.config.clip_norm is not None
        norm = sum(self._norms[i] for i in sorted(self._norms)) ** 0.5
        self._norms.clear()
        scale = min(1.0, self.config.clip_norm / (norm + 1e-6))
        after, self._after_norms = self._after_norms, []
        commit = [["commit", scale]]
        every = self.config.checkpoint_every
        if every and self._lead.version % every == 0:
            commit += self._begin_save()
        for link in self._followers.values():
            with contextlib.suppress(LinkError):
                link.send(Kind.ORDER, {"steps": commit})
        self._orders.extend([*commit, *after])
        self._advance()

    def _count_refusals(self) -> None:
        assert self.shard is not None
        for worker, slices in self.shard.refusals.by_worker.items():
            self._lead.totals.refused += 1
            log.warning("worker:%s pushed NaN or Inf: %s slices of it refused", worker, slices)
        self.shard.refusals.by_worker.clear()

    # --- checkpoints --------------------------------------------------------------------------------

    def _save_now(self) -> None:
        """The controller wants a checkpoint of this moment."""
        if self.shard is None:
            self._controller.send(Kind.STATS, {"checkpoint": None, "reason": "no model yet"})
        elif self._saver is not None:
            self._save_again = self._saver.version < self._lead.version
            self._saver.stop_waiting()
        elif self._last_saved == self._lead.version:
            self._controller.send(Kind.STATS, {"checkpoint": "kept", "version": self._last_saved})
        else:
            steps = self._begin_save()
            self._run(steps)
            if self._saver is not None and not self._peers:
                self._saver.stop_waiting()

    def _begin_save(self) -> Steps:
        if self._saver is not None:
            log.warning("checkpoint %s skipped: the one before is not finished", self._lead.version)
            return []
        assert self.layout is not None and self._spec is not None
        root = Path(self.config.run_dir) / "checkpoints"
        workers = set(self._lead.machine.members) & set(self._peers)
        try:
            self._saver = Saver(
                root,
                self._lead.version,
                parts=self.config.servers,
                workers=workers,
                keep=self.config.keep_checkpoints,
                post=lambda result: self._hub.post(lambda: self._saved(result)),
            )
        except CheckpointError as error:
            self._saved(error)
            return []
        self._save_flags = set(workers)
        self._saver.attach_states(self._small_parts)
        self._saver.describe(
            {
                "layout": self.layout.to_json(),
                "optimizer": self._spec.to_json(),
                "state_keys": self._state_keys,
                "lead": self._lead.snapshot(),
                "servers": self.config.servers,
                "workers": self.config.workers,
                "data": self._data,
            }
        )
        return [["checkpoint", self._lead.version, str(self._saver.directory)]]

    def _small_parts(self) -> dict[str, dict[str, Tensor]]:
        return {**self._states, **({"extras.safetensors": self._extras} if self._extras else {})}

    def _write_snapshot(self, version: int, directory: Path) -> None:
        assert self.shard is not None
        tensors = self.shard.snapshot()
        name = f"server-{self.config.rank}.safetensors"

        def write() -> None:
            try:
                info = write_part(directory, name, tensors)
                body = {"name": info.name, "sha256": info.sha256, "bytes": info.bytes}
            except CheckpointError as error:
                body = {"failed": str(error)}
            self._hub.post(lambda: self._report_part(body))

        threading.Thread(target=write, name="checkpoint part", daemon=True).start()

    def _report_part(self, body: dict[str, Any]) -> None:
        if self.is_lead:
            self._part_written(body)
        elif self._lead_link is not None:
            with contextlib.suppress(LinkError):
                self._lead_link.send(Kind.DONE, body)

    def _part_written(self, body: dict[str, Any]) -> None:
        if self._saver is None:
            return
        if "failed" in body:
            self._saver.part_written(CheckpointError(body["failed"]))
        else:
            info = FileInfo(name=body["name"], sha256=body["sha256"], bytes=body["bytes"])
            self._saver.part_written(info)

    def _saved(self, result: Path | CheckpointError) -> None:
        if isinstance(result, CheckpointError):
            log.error("checkpoint failed: %s", result)
            body: dict[str, Any] = {"checkpoint": None, "reason": str(result)}
        else:
            assert self._saver is not None
            self._last_saved = self._saver.version
            body = {"checkpoint": str(result), "version": self._saver.version}
            log.info("checkpoint %s", result.name)
        self._saver = None
        self._save_flags.clear()
        again, self._save_again = self._save_again, False
        if again:
            self._save_now()
        else:
            with contextlib.suppress(LinkError):
                self._controller.send(Kind.STATS, self._stats())
                self._controller.send(Kind.STATS, body)

    # --- watching -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self.is_lead:
            return
        now = time.monotonic()
        if now - self._last_stats < STATS_S:
            return
        self._last_stats = now
        self._write_pushes()
        self._check_deadline(now)
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, self._stats())

    def _stats(self) -> dict[str, Any]:
        totals = self._lead.totals
        staleness = totals.staleness
        return {
            "version": self._lead.version,
            "epoch": self._lead.epoch,
            "samples": totals.samples,
            "pushes": totals.pushes,
            "dropped": totals.dropped,
            "refused": totals.refused,
            "lost": self._lost,
            "update_s": round(self._update_s, 6),
            "staleness": {str(k): staleness[k] for k in sorted(staleness)[:64]},
            "clocks": {str(k): v for k, v in self._lead.machine.clocks.items()},
            "data": self._data,
            "leases": self._lead.book.accounts()[-100:] if self._lead.book else [],
            "parameters": self.layout.numel if self.layout else 0,
        }

    def _open_pushes_file(self) -> None:
        path = Path(self.config.run_dir) / "pushes.csv"
        fresh = not path.exists()
        self._pushes_file = path.open("a", buffering=1 << 16)
        if fresh:
            columns = "version,worker,incarnation,sequence,read_version,staleness,samples"
            self._pushes_file.write(columns + "\n")

    def _write_pushes(self) -> None:
        for record in self._lead.applied:
            p = record.push
            self._pushes_file.write(
                f"{record.version + 1},{p.id.worker},{p.id.incarnation},{p.id.sequence},"
                f"{p.read_version},{record.staleness},{p.samples}\n"
            )
        self._lead.applied.clear()
        self._pushes_file.flush()

    def _check_deadline(self, now: float) -> None:
        limit = self.config.deadline_s
        advice = f"the deadline is {limit:g} s (--deadline)"
        if self._gate and now - self._gate_since > limit:
            missing = sorted(set(range(self.config.workers)) - set(self._gate))
            who = ", ".join(f"worker:{r}" for r in missing)
            self._fail(
                DeadlineError(f"{who} did not reach paceline.prepare() while the others wait; {advice}.")
            )
        for worker, since in self._held_since.items():
            if now - since <= limit:
                continue
            blockers = self._lead.machine.waiting.get(worker, set())
            if not blockers and self._lead.book:
                blockers = {w for w, leases in self._lead.book.outstanding.items() if leases}
            who = ", ".join(f"worker:{b}" for b in sorted(blockers - {worker})) or "a server"
            self._fail(
                DeadlineError(
                    f"worker:{worker} has waited {now - since:.0f} s at version {self._lead.version} for {who}; "
                    f"{advice}. Look at its log, or raise the deadline if a step may take this long."
                )
            )
            return


def push_of(push: PushId) -> tuple[int, int, int]:
    """A PushId as plain numbers."""
    return push.worker, push.incarnation, push.sequence


def _rank(connection: Connection) -> int:
    role, _, rank = connection.peer.partition(":")
    if role != "worker":
        raise FrameError(f"{connection.peer} is not a worker")
    return int(rank)


def _blob(tensors: dict[str, Tensor]) -> bytes:
    return save({k: v.contiguous() for k, v in tensors.items()}) if tensors else b""


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def serve(config: ServerConfig, secret: bytes, controller: Connection) -> None:
    """Run a server in this process until the controller stops it."""
    torch.set_num_threads(config.threads)
    Server(config, secret, controller).run()
