"""A parameter server: one process, one thread that reads small frames and updates slices.

It executes the run's one order of instructions, which the lead server makes (`leader.py`). Shared-memory
links are served by the main thread itself, so a round costs no hand-over between threads; a link that
carries payloads itself has a thread that moves its bytes while the main thread updates.
"""

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from paceline.comm import Address, Connection, Frame, Hub, Kind, Listener, Region, connect
from paceline.comm.compression import parse_compression
from paceline.comm.connection import spin_for
from paceline.comm.faults import Faults
from paceline.comm.frames import field
from paceline.comm.hub import refuse
from paceline.comm.lasting import LastingLink
from paceline.comm.protection import protection
from paceline.comm.tls import Stream
from paceline.comm.transfer import Transfer
from paceline.data.leases import LeaseBook
from paceline.exceptions import (
    AuthError,
    CheckpointError,
    FrameError,
    LayoutMismatch,
    LinkError,
    PacelineError,
    PlanError,
    UsageError,
)
from paceline.modes import PushId, parse_mode, parse_schedule
from paceline.modes.lbfgs import Answer
from paceline.observe.phases import PHASES, Phase
from paceline.observe.spans import recorder_of
from paceline.params import Layout, OptimizerSpec, Placement, Slice, StateBook, bytes_of, flat_view
from paceline.ps.lead import Lead
from paceline.ps.peers import LOST_S, MAX_STATE_BYTES, InlinePeer, ShmPeer, WorkerPeer
from paceline.ps.saving import read_blob, state_book
from paceline.ps.shard import Contribution, Copy, Gradients, Shard
from paceline.ps.standby import Standby, lead_from_json
from paceline.storage.checkpoint import Checkpoint, load, write_part

__all__ = ["Server", "ServerConfig", "book_of", "new_lead", "rank_of", "saved_part"]

log = logging.getLogger("paceline.server")

TELL_S = 0.5
"""How often a server tells the controller how it does."""
TICK_S = 0.25
"""How often a server looks around when nothing happens."""
_LOOK_S = 0.01
"""How often it looks whether a worker without a link has ended."""
BACK_S = 5.0
"""How long a worker whose link broke may take to come back, if it cannot be seen whether it has ended."""
_LOG_STEPS = 4096
"""So many of the last steps of the order are kept, where servers may take each other's place. Every worker
waits for every server's answer, so none is ever further behind than a few steps a worker."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a server must know before anybody connects."""

    rank: int
    incarnation: int = 0
    servers: int
    lead: int = 0
    """The server that leads."""
    workers: int
    mode: str
    run_dir: str
    deadline_s: float
    replicas: int = 0
    """So many other servers hold a copy of every slice."""
    checkpoint_every: int = 0
    keep_checkpoints: int = 3
    resume: str | None = None
    """Path of the checkpoint to go on from."""
    clip_norm: float | None = None
    norm_bound: float | None = None
    schedule: tuple[str, ...] = ()
    """Modes that the run goes through by itself, as `500=ssp:4`."""
    groups: tuple[Sequence[int], ...] = ()
    """Ranks of the workers that all-reduce among themselves, in the modes that have groups."""
    optimizers: tuple[str, ...] = ()
    """Optimizers beyond torch.optim that workers may ask for."""
    import_from: str | None = None
    """The script's directory, where those optimizers may be, as they are for the script."""
    spans_in: str | None = None
    """Directory for its spans; None records none."""
    clock_ns: int = 0
    """From this host's monotonic clock to the run's time."""
    faults: str = ""
    """On purpose, for tests."""
    host: str = "127.0.0.1"
    threads: int = 1
    worker_threads: int = 1
    """Of all workers together."""


@dataclass(slots=True)
class _Pushed:
    """A push whose gradient is here."""

    peer: WorkerPeer
    gradients: Gradients
    void: bool
    missing: frozenset[int]
    held: bool = False
    """Its gradient was copied: the worker has gone on."""


class Server:
    """Holds a shard and executes the run's order on it. `run` returns when the run is over."""

    def __init__(self, config: ServerConfig, secret: bytes, controller: LastingLink) -> None:
        self.config = config
        self.name = f"server:{config.rank}"
        self.mode = parse_mode(config.mode)
        self.layout: Layout | None = None
        self.shard: Shard | None = None
        self.lost = 0
        """Pushes of the order that died with their worker before they arrived here."""
        self.updates = 0
        self.update_s = 0.0
        self.spans = recorder_of(
            config.spans_in, f"server-{config.rank}.{config.incarnation}", clock_ns=config.clock_ns
        )
        self._told_at = 0.0
        self._faults = Faults.parse(config.faults)
        self._snapshots = 0
        self._secret = secret
        self._controller = controller
        self._hub = Hub(self, Listener(host=config.host), secret, patience_s=config.deadline_s)
        self._running = True
        self._failed = False
        self._spec: OptimizerSpec | None = None
        self._region: Region | None = None
        self._base: Tensor | None = None
        self._placement = Placement(0, frozenset(), ())
        self._position = 0
        """How many steps of the order this server has heard of."""
        self._log: collections.deque[list[Any]] = collections.deque(maxlen=_LOG_STEPS)
        """The last of them."""
        self._standby: Standby | None = None
        self._reduced_to: list[Any] = []
        """Number and norms of an update's first half whose second has not come."""
        self._reduces = 0
        self._given = 0
        """The number of the last placement for which slices were sent to others."""
        self._gifts: dict[int, list[dict[str, Tensor]]] = {}
        """Slices that others sent, by the number of the placement in which we hold them."""
        self._answered_before: dict[int, int] = {}
        """Of each worker the last request that was answered before we were in the order."""
        self._fresh = True
        """Whether it is not in the order yet."""
        self._led_by = 0
        self._succeeds = False
        self._early_followers: list[tuple[Connection, dict[str, Any]]] = []
        self._leaderless_since: float | None = None
        self._peers: dict[int, WorkerPeer] = {}
        self._pushed: dict[PushId, _Pushed] = {}
        self._orders: collections.deque[list[Any]] = collections.deque()
        self._reduce_settings: Any = None
        self._lead_link: Connection | None = None
        self._worker_handlers = self._handlers()
        self._watch_controller()
        self._meet_controller()

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
            Kind.SAVED: self._on_saved,
            Kind.SENDS: self._on_sends,
            Kind.PROBE: self._on_probe,
        }

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> bool:
        """Serve until told to stop. True: it is to lead from now on, and nothing is closed."""
        try:
            while self._running and not self._succeeds:
                broken = any(peer.broken_since is not None for peer in self._peers.values())
                self._hub.poll(_LOOK_S if broken else TICK_S)
                if broken:
                    self._check_broken()
                self._tick(time.monotonic())
        finally:
            if not self._succeeds:
                self._close()
                self.spans.close()
        return self._running and self._succeeds

    def _watch_controller(self) -> None:
        """Hear of it when another controller takes over."""
        self._controller.watch(lambda fresh: self._hub.post(lambda: self._controller_back(fresh)))

    def _meet_controller(self) -> None:
        """Listen to the controller, and say where workers find this server. It may be another one later."""
        self._hub.add(self._controller)
        self._controller.send(Kind.READY, {"address": self._hub.listener.address.to_json()})

    def _controller_back(self, fresh: Connection) -> None:
        if self._running:
            self._controller.renew(fresh)
            self._meet_controller()
        else:
            fresh.close()

    def _tick(self, now: float) -> None:
        """Called after every turn of the loop."""
        if now - self._told_at > TELL_S:
            self._told_at = now
            body = {
                "updates": self.updates,
                "update_s": round(self.update_s, 6),
                "phases": {PHASES[phase]: round(s, 6) for phase, s in self.spans.flush().items()},
                **({"spans_broken": str(self.spans.broken)} if self.spans.broken is not None else {}),
            }
            with contextlib.suppress(LinkError):
                self._controller.send(Kind.STATS, {"server": body})
        if self._leaderless_since is not None and now - self._leaderless_since > self.config.deadline_s:
            self._fail(LinkError(f"{self.name} has been without a lead for {self.config.deadline_s:g} s"))

    def _close(self) -> None:
        self._running = False
        for peer in self._peers.values():
            peer.close()
        if self._lead_link is not None:
            self._lead_link.close()
        self._hub.close()
        if self.shard is not None:
            self.shard.close()

    def _fail(self, error: PacelineError) -> None:
        """The run cannot go on: tell the controller, once."""
        if not self._failed:
            self._failed = True
            log.error("%s", error)
            refuse(self._controller, error)

    def on_stranger(self, reason: str) -> None:
        """A port scan, or a role of another run."""
        log.warning("refused a connection: %s", reason)
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, {"stranger": reason})

    def on_hello(self, connection: Connection, body: dict[str, Any]) -> None:
        """Only workers connect to a server, and servers to one that they know to lead sooner than it does."""
        if "resume" in body:
            self._resume(connection, body)
        elif connection.peer.startswith("server:") and self._standby is not None:
            self._hub.release(connection)
            self._early_followers.append((connection, body))
        else:
            rank_of(connection)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Whatever it is, it comes from somebody who knows the secret."""
        if connection is self._controller:
            self._on_controller(frame)
        elif connection is self._lead_link:
            self._on_lead(connection, frame)
        else:
            handler = self._worker_handlers.get(frame.kind)
            if handler is None:
                raise FrameError(f"a worker does not send {frame.kind.name} to {self.name}")
            handler(connection, frame)

    def on_end(self, connection: Connection, reason: str) -> None:
        """A connection is over: a worker's means it left."""
        if connection is self._controller:
            if self._controller.lasting and self._running:
                self._controller.lost()
            else:
                self._running = False
        elif connection is self._lead_link:
            self._lead_link = None
            if self._running and self._standby is not None:
                log.warning("%s: %s; another server will lead", connection.peer, reason)
                self._leaderless_since = time.monotonic()
            elif self._running:
                self._fail(LinkError(f"{self.name} lost {connection.peer}: {reason}"))
        else:
            for peer in list(self._peers.values()):
                if peer.connection is connection:
                    log.info("%s: %s", peer.name, reason)
                    self._link_broke(peer)

    def _link_broke(self, peer: WorkerPeer) -> None:
        """A worker's link ended. Unless its process did, it may come back over another socket."""
        if not peer.connection.keeps:
            self._worker_left(peer, finished=False)
            return
        peer.broken_since = peer.broken_since or time.monotonic()
        self._check_broken()

    def _check_broken(self) -> None:
        for peer in [*self._peers.values()]:
            since = peer.broken_since
            if since is not None and (has_ended(peer.pid) or time.monotonic() - since > BACK_S):
                self._worker_left(peer, finished=False)

    def _resume(self, connection: Connection, body: dict[str, Any]) -> None:
        """A worker's link goes on over another socket."""
        peer = self._peers.get(rank_of(connection))
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
        """A worker waits. If it has been answered, the answer was lost: let the link begin anew."""
        if connection.overdue(LOST_S):
            self._hub.end(connection, "an answer was lost on the way")

    def _on_controller(self, frame: Frame) -> None:
        if frame.kind is Kind.START:
            self._follow(field(frame.body, "lead", int), field(frame.body, "servers", dict))
        elif frame.kind is Kind.STOP:
            self._running = False

    def _follow(self, lead: int, servers: dict[str, Any]) -> None:
        """That server leads: the first one, or one that takes the place of a lead that is gone."""
        if self._lead_link is not None and lead == self._led_by:
            return  # another controller says it again
        if self._lead_link is not None:  # what it sent before it died is still to be read
            link, self._lead_link = self._lead_link, None
            self._hub.release(link)
            with contextlib.suppress(LinkError, TimeoutError):
                while True:
                    self._on_lead(link, link.receive())
            link.close()
        self._leaderless_since = None
        if lead == self.config.rank:
            self._succeeds = True  # with `_led_by` still the one that is gone
            return
        self._led_by = lead
        try:
            link = connect(Address.from_json(servers[str(lead)]), self._secret, peer=f"server:{lead}")
        except (AuthError, LinkError) as error:
            if not self.config.replicas:
                raise
            log.warning("%s; another server will lead", error)  # it died just now
            self._leaderless_since = time.monotonic()
            return
        hello = {"role": "server", "rank": self.config.rank, "position": self._position}
        hello["fresh"] = self._fresh
        link.send(Kind.HELLO, {**hello, "address": self._hub.listener.address.to_json()})
        self._lead_link = link
        self._hub.add(link)
        if self._reduced_to:
            link.send(Kind.DONE, {"number": self._reduced_to[0], "norms": self._reduced_to[1]})

    def _on_lead(self, link: Connection, frame: Frame) -> None:
        if frame.kind is Kind.ADOPT:
            self._on_adopt(link, frame)
        elif frame.kind is Kind.ORDER:
            if "position" in frame.body:  # we came later, and begin here
                self._position = field(frame.body, "position", int)
                self._fresh = False
                self._answered_before = {int(w): int(n) for w, n in frame.body["answered"].items()}
                for peer in self._peers.values():
                    if peer.asked is not None and self._skips(peer, peer.asked[1]):
                        self._pushed = {k: v for k, v in self._pushed.items() if v.peer is not peer}
                if self._standby is not None:
                    self._standby.lead = lead_from_json(frame.body["lead"])
            if self._standby is not None:
                self._standby.hear(frame.body)
                self._log.extend(frame.body["steps"])
            self._position += len(frame.body["steps"])
            self._orders.extend(frame.body["steps"])
            self._advance()
        elif frame.kind is Kind.STATE:
            self._receive_gift(link, frame)

    def _on_adopt(self, link: Connection, frame: Frame) -> None:
        body, fds = frame.body, frame.descriptors
        layout = Layout.from_json(body["layout"])
        extras = bytearray(field(body, "extras_bytes", int, 0))
        region = Region.attach(fds[0], layout.nbytes) if fds else None

        def read_weights(slices: Sequence[Tensor]) -> None:
            weights = [] if region is not None else [bytes_of(each) for each in slices]
            if frame.payload_bytes:
                link.read_into([*weights, memoryview(extras)])

        placement = Placement.from_json(body["placement"])
        self._adopt(layout, OptimizerSpec.from_json(body["optimizer"]), region, placement, read_weights)
        self._fresh = self.config.rank not in placement.servers
        for peer in self._peers.values():  # another lead had told it before
            peer.fit(self._shard)
        checkpoint = load(Path(body["checkpoint"])) if body["checkpoint"] else None
        if checkpoint is not None:
            self._shard.restore(state_book(checkpoint), vectors=self.mode.by_epoch)
        if self.config.replicas:
            lead = new_lead(self.config, body["data"], checkpoint)
            self._standby = Standby(lead, body, read_blob(bytes(extras), "the run's buffers"))
        link.send(Kind.ADOPTED)

    def _adopt(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        region: Region | None,
        placement: Placement,
        read_weights: Callable[[Sequence[Tensor]], None],
    ) -> None:
        """Take this layout and optimizer.

        Args:
            region: the parameters' memory, shared on this host.
            read_weights: fills these slices, if the memory has them not.
        """
        self.layout, self._spec, self._region, self._placement = layout, spec, region, placement
        if region is not None:
            self._base = torch.frombuffer(region.buffer, dtype=torch.uint8)
        else:
            self._base = torch.zeros(layout.nbytes, dtype=torch.uint8)
        mine = [layout.slices[i] for i in placement.held(self.config.rank)]
        read_weights([flat_view(self._base, piece) for piece in mine])
        self._hub.spin_s = spin_for(layout.nbytes, self.config.worker_threads + self.config.servers)
        self.shard = self._make_shard(layout, spec, mine, self._base, placement)
        log.info(
            "adopted %s tensors in %s slices, %.1f MB mine, fingerprint %s",
            len(layout.tensors),
            len(layout.slices),
            self.shard.nbytes / 1e6,
            layout.fingerprint,
        )

    def _make_shard(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        slices: Sequence[Slice],
        base: Tensor,
        placement: Placement,
    ) -> Shard:
        return Shard(
            layout,
            spec,
            slices,
            base,
            self.config.optimizers,
            self.config.threads,
            self.mode.damping,
            placement.owned(self.config.rank),
        )

    # --- workers ----------------------------------------------------------------------------------

    def _on_attach(self, connection: Connection, frame: Frame) -> None:
        self._welcome(self._attach(connection, frame))

    def _attach(self, connection: Connection, frame: Frame) -> WorkerPeer:
        if self.layout is None or self.shard is None or self._base is None:
            raise FrameError("attached before the run has a model")
        rank = rank_of(connection)
        incarnation = field(frame.body, "incarnation", int)
        if frame.body.get("fingerprint") != self.layout.fingerprint:
            raise LayoutMismatch(f"worker:{rank} attached with another layout")
        transfer = self._transfer_of(rank, frame.body)
        older = self._peers.get(rank)
        if older is not None:
            if older.incarnation >= incarnation:
                raise FrameError(f"worker:{rank} is here already as incarnation {older.incarnation}")
            self._worker_left(older, finished=False)
        peer: WorkerPeer
        if connection.local and not field(frame.body, "inline", bool, False):
            if len(frame.descriptors) != 1:
                raise FrameError("a worker on this host attaches with its memory")
            region = Region.attach(frame.descriptors[0], 2 * self.layout.nbytes)
            peer = ShmPeer(connection, rank, incarnation, region, self.layout, self.shard)
            peer.may_share = field(frame.body, "in_place", bool)
            peer.read_in_place(self.mode.in_place or self.mode.needs_memory)
        else:
            self._hub.release(connection)  # from here on its own thread reads it
            peer = InlinePeer(
                connection,
                rank,
                incarnation,
                self.layout,
                self.shard,
                transfer=transfer,
                # Sent straight from the parameters where nobody can write to them meanwhile.
                in_place=self.mode.in_place
                or (self.config.workers == 1 and not self._peers and not self.mode.local),
                sends=frame.body.get("sends"),
                post=self._from_thread,
                lane=self.spans.lane(f"worker:{rank}"),
            )
        peer.told = self._placement.number
        peer.pid = field(frame.body, "pid", int, 0) if connection.same_host else 0
        if field(frame.body, "keeps", bool, False):
            connection.keep()
        self._keep_backup(peer)
        for other in self._peers.values():  # who was alone is not any more
            other.read_in_place(self.mode.in_place or self.mode.needs_memory)
        self._peers[rank] = peer
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

    def _keep_backup(self, peer: WorkerPeer) -> None:
        """Delay compensation and the gap need to know what a worker read."""
        if self.mode.damping not in ("dc", "gap"):
            peer.backup = None
        elif peer.backup is None:
            assert self.layout is not None and self._base is not None
            peer.backup = self._shard.flats(torch.empty(self.layout.nbytes, dtype=torch.uint8))
            present = self._shard.parameters
            for i, mine in enumerate(peer.backup):
                copied = None if peer.copy is None else peer.copy[i]
                mine.copy_(present[i] if copied is None else copied)

    def _change_mode(self, text: str) -> None:
        """Go on in another mode. Who is told of it by its next reply then uses the memory that fits."""
        self.mode = parse_mode(text)
        self._shard.damping = self.mode.damping
        for peer in self._peers.values():
            self._keep_backup(peer)  # first: its copy is what it computes on
            peer.read_in_place(self.mode.in_place)
        log.info("mode %s", text)

    def _welcome(self, peer: WorkerPeer, **facts: Any) -> None:
        """Send an attached worker the parameters."""
        assert self.shard is not None and self._base is not None
        copies = [c for c in (peer.copy, peer.backup) if c is not None]
        if copies:
            self.shard.update((), None, copies)
        with contextlib.suppress(LinkError):  # it died: its link says so by itself
            if isinstance(peer, InlinePeer):
                peer.welcome({**facts, "owned": self._placement.owned(self.config.rank)})
            else:
                peer.connection.send(Kind.ATTACHED, facts)

    def _from_thread(self, peer: InlinePeer, frame: Frame | None, reason: str) -> None:
        if frame is None and peer.connection.keeps:
            ended = peer.connection.sock
            self._hub.post(lambda: self._link_ended(peer, ended, reason))
        elif frame is None:
            self._hub.post(lambda: self._hub.end(peer.connection, reason))
        else:
            received = frame
            self._hub.post(lambda: self._hub.handle(peer.connection, received))

    def _link_ended(self, peer: InlinePeer, ended: Stream, reason: str) -> None:
        """Its thread has given up on this socket; it may have got another one since."""
        if peer.connection.sock is ended and self._peers.get(peer.worker) is peer:
            log.info("%s: %s", peer.name, reason)
            self._link_broke(peer)

    def _peer(self, connection: Connection) -> WorkerPeer:
        peer = self._peers.get(rank_of(connection))
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
        for older in [p for p, pushed in self._pushed.items() if pushed.peer is peer and not pushed.held]:
            del self._pushed[older]
        peer.fetches = field(body, "fetch", bool, True)
        void = field(body, "void", bool, False)
        self._pushed[push] = _Pushed(peer, peer.gradients, void, frozenset(missing))
        return push

    def _checked_settings(self, settings: list[Any]) -> list[dict[str, Any]]:
        assert self._spec is not None
        if len(settings) != len(self._spec.groups) or not all(isinstance(s, dict) for s in settings):
            raise FrameError("settings that do not fit the parameter groups")
        for given, known in zip(settings, self._spec.groups, strict=True):
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

    def _on_saved(self, connection: Connection, frame: Frame) -> None:
        name, tensors = saved_part(connection, frame)
        if self._standby is not None:
            self._standby.states[name] = tensors

    def _on_sends(self, connection: Connection, frame: Frame) -> None:
        """For those who read payloads; in shared memory we see all of it."""

    def _on_state(self, connection: Connection, frame: Frame) -> None:
        """A worker wants the optimizer state, or gives one (after load_state_dict)."""
        assert self.shard is not None
        self._peer(connection)
        if frame.payload_bytes:
            blob = connection.read_blob(frame, MAX_STATE_BYTES)
            book = StateBook([read_blob(blob, "the optimizer state")])
            self.shard.restore(book, parameters=False)
            connection.send(Kind.STATE)
        else:
            connection.send(Kind.STATE, {}, [memoryview(save(self.shard.snapshot()))])

    def _on_bye(self, connection: Connection, frame: Frame) -> None:
        peer = self._peers.get(rank_of(connection))
        if peer is not None and peer.connection is connection:
            self._worker_left(peer, finished=not field(frame.body, "left", bool, False))

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        self._hub.release(peer.connection)
        if self._peers.get(peer.worker) is peer:
            del self._peers[peer.worker]
        if self._standby is not None:
            self._standby.gone[peer.worker] = (peer.incarnation, finished)
        log.info("%s %s", peer.name, "finished" if finished else "is gone")
        if any(pushed.peer is peer and not pushed.held for pushed in self._pushed.values()):
            peer.connection.close()  # its gradient memory is still due
        else:
            peer.close()
        self._advance()

    # --- the run's order --------------------------------------------------------------------------

    def _advance(self) -> None:
        """Execute what is due, as far as the pushes it needs are here."""
        while self._orders:
            step = self._orders[0]
            if step[0] == "place" and not self._has_slices_for(Placement.from_json(step[1:])):
                return
            if step[0] in ("apply", "reduce", "add", "assign", "hold") and not self._all_here(step):
                return
            self._orders.popleft()
            admits = [step] if step[0] == "admit" else []
            if step[0] in ("admit", "apply", "commit", "add", "assign", "hold"):
                while self._orders and self._orders[0][0] == "admit":
                    admits.append(self._orders.popleft())
            self._execute(step, admits)

    def _all_here(self, step: list[Any]) -> bool:
        """Whether every push of a step has arrived, or never will because its worker is gone."""
        ids = [step[1:]] if step[0] in ("assign", "hold") else [p[:3] for p in step[1]]
        for worker, incarnation, sequence in ids:
            if PushId(worker, incarnation, sequence) in self._pushed:
                continue
            peer = self._peers.get(worker)
            if peer is not None and peer.incarnation == incarnation:
                return False
        return True

    def _execute(self, step: list[Any], admits: list[list[Any]]) -> None:
        """One step, and the admits that follow it: those are served while slices are in the cache."""
        assert self.shard is not None
        match step:
            case ["drop", *push]:
                self._pushed.pop(PushId(*push), None)
            case ["left", worker, incarnation]:
                self._forget(worker, incarnation)
            case ["mode", text]:
                self._change_mode(text)
            case ["place", *placement]:
                self._place(Placement.from_json(placement))
            case ["checkpoint", _, directory]:
                self._write_snapshot(Path(directory))
            case ["reduce", pushes]:
                contributions, self._reduce_settings = self._contributions(pushes)
                self._reduces += 1
                norms = self.shard.reduce(contributions)
                self._reduced_to = [self._reduces, norms]
                self._reduced(self._reduces, norms)
            case ["hold", *push]:
                self._hold(PushId(*push))
                self._admit(admits, self._copy_only)
            case ["add", pushes]:
                contributions, _ = self._contributions(pushes)
                self.shard.add(contributions)
                if len(contributions) < len(pushes):
                    self.shard.spoil()
                self._admit(admits, self._copy_only)
            case ["ask", ops]:
                self._answered(self.shard.run(ops))
            case ["vectors", ops, kept]:
                self._update(admits, lambda copies, done: self._shard.move(ops, kept))
            case ["apply", pushes]:
                contributions, settings = self._contributions(pushes)
                self._update(admits, self._work_of(contributions, settings))
            case ["commit", scale]:
                settings, self._reduced_to = self._reduce_settings, []
                self._update(admits, lambda copies, done: self._shard.commit(scale, settings, copies, done))
            case ["assign", *push]:
                pushed = self._pushed.pop(PushId(*push), None)
                if pushed is not None:
                    self.shard.assign(pushed.peer.gradients.flat)
                self._admit(admits, self._copy_only)
            case ["admit", *_]:
                self._admit(admits, self._copy_only)

    @property
    def _shard(self) -> Shard:
        assert self.shard is not None
        return self.shard

    def _place(self, placement: Placement) -> None:
        """From here on in the order, slices are held and owned as this says."""
        rank = self.config.rank
        before, self._placement = self._placement, placement
        mine = placement.owned(rank)
        if more := set(mine) - set(before.owned(rank)):
            log.info("%s answers for %s more slices from here on", self.name, len(more))
        if before.held(rank) == placement.held(rank):
            self._shard.own(mine)
        else:
            self._hold_others(placement)
        for peer in self._peers.values():
            peer.fit(self._shard)
        for pushed in self._pushed.values():
            if not pushed.held:
                pushed.gradients = pushed.peer.gradients
        self._placed(placement)

    def _placed(self, placement: Placement) -> None:
        if self._lead_link is not None:
            with contextlib.suppress(LinkError):
                self._lead_link.send(Kind.DONE, {"placed": placement.number})

    def _hold_others(self, placement: Placement) -> None:
        """The slices that this server has are other ones than before."""
        assert self.layout is not None and self._spec is not None and self._base is not None
        old, rank = self._shard, self.config.rank
        book = StateBook([old.snapshot(indices=placement.held(rank)), *self._gifts.pop(placement.number, [])])
        slices = [self.layout.slices[i] for i in placement.held(rank)]
        self.shard = self._make_shard(self.layout, self._spec, slices, self._base, placement)
        self.shard.restore(book)
        old.close()

    def _has_slices_for(self, placement: Placement) -> bool:
        """Whether all that we hold from this placement on is here. What others lack, they are sent."""
        if self._given < placement.number:
            self._given = placement.number
            for server in placement.servers - {self.config.rank}:
                if due := self._placement.gains(placement, server).get(self.config.rank):
                    self._give(server, placement.number, self._shard.snapshot(indices=due))
        givers = self._placement.gains(placement, self.config.rank)
        return len(self._gifts.get(placement.number, ())) >= len(givers)

    def _give(self, server: int, number: int, tensors: dict[str, Tensor]) -> None:
        """Send slices to another server. The lead has links to all."""
        if self._lead_link is not None:
            with contextlib.suppress(LinkError):  # then everything is different anyway
                body = {"to": server, "number": number}
                self._lead_link.send(Kind.STATE, body, [memoryview(save(tensors))])

    def _receive_gift(self, link: Connection, frame: Frame) -> None:
        blob = link.read_blob(frame, MAX_STATE_BYTES)
        number = field(frame.body, "number", int)
        self._gifts.setdefault(number, []).append(read_blob(blob, f"slices by {link.peer}"))
        self._advance()

    def _copy_only(self, copies: Sequence[Copy], done: Callable[[int], None] | None) -> None:
        self._shard.update((), None, copies, done)

    def _work_of(self, contributions: list[Contribution], settings: Any) -> Callable[..., None]:
        """What an update with these contributions does to the shard."""
        match self.mode.payload:
            case "none":
                return lambda copies, done: None
            case "elastic":
                (worker, values) = (
                    (contributions[0].worker, contributions[0].gradients) if contributions else (-1, None)
                )
                alpha = self.mode.beta / (len(self.config.groups) or self.config.workers)
                return lambda copies, done: self._shard.mix(worker, values, alpha, copies, done)
            case _:
                return lambda copies, done: self._shard.update(contributions, settings, copies, done)

    def _hold(self, push: PushId) -> None:
        """Keep a gradient for an update to come: its worker goes on and uses its memory again."""
        pushed = self._pushed.get(push)
        if pushed is None or pushed.void:  # void ones keep their place in the order, and are not applied
            self._pushed.pop(push, None)
            return
        assert self.layout is not None
        kept = Gradients(torch.empty(self.layout.nbytes, dtype=torch.uint8), self.layout, self._shard.slices)
        for mine, theirs in zip(kept.flat, pushed.gradients.flat, strict=True):
            mine.copy_(theirs)
        pushed.gradients = kept
        pushed.held = True

    def _update(self, admits: list[list[Any]], work: Callable[..., None]) -> None:
        started = time.perf_counter()
        if self._faults.all:
            for damage in self._faults.at(self.updates + 1):
                for _, worker, *_ in admits[self.updates % len(admits) :][:1] if admits else ():
                    if worker in self._peers:
                        self._peers[worker].connection.damage = damage
        self.spans.begin_step(self.updates)
        protection.begin_step(self.updates)
        self.spans.main.enter(Phase.UPDATE)
        self._admit(admits, work)
        self.spans.main.enter(Phase.IDLE)
        self.updates += 1
        self.update_s += time.perf_counter() - started
        for worker, slices in self._shard.take_refusals().items():
            log.warning("worker:%s pushed NaN or Inf: %s slices of it refused", worker, slices)
            self._refused(worker)

    def _refused(self, worker: int) -> None:
        """A push that its worker thought finite was not, in part."""

    def _admit(self, admits: list[list[Any]], work: Callable[..., None]) -> None:
        """Do some work on the shard that ends with fresh parameters for these workers."""
        peers = []
        for _, worker, version, *marks in admits:
            peer = self._peers.get(worker)
            if peer is not None:
                # The order may be here before the request, and the last push may have wanted nothing back.
                peer.fetches = (peer.fetches or "fetch" in marks) and "keep" not in marks
                peer.asked = None
                body = self._admit_body(worker, version)
                if peer.told != self._placement.number:
                    peer.told = self._placement.number
                    body["owned"] = self._placement.owned(self.config.rank)
                peer.start_admit(body)
                peers.append(peer)
        fetching = [p for p in peers if p.fetches]
        copies = [copy for p in fetching for copy in (p.copy, p.backup) if copy is not None]
        streaming = [p for p in fetching if isinstance(p, InlinePeer)]

        def done(position: int) -> None:
            for p in streaming:
                p.slice_ready(position)

        work(copies, done if streaming else None)
        for p in peers:
            with contextlib.suppress(LinkError):  # it died meanwhile; its link says so by itself
                p.end_admit()

    def _admit_body(self, worker: int, version: int) -> dict[str, Any]:
        return {"version": version}

    def _contributions(self, pushes: Sequence[Sequence[Any]]) -> tuple[list[Contribution], Any]:
        contributions, settings = [], None
        for worker, incarnation, sequence, weight, scale in pushes:
            pushed = self._pushed.pop(PushId(worker, incarnation, sequence), None)
            if pushed is None:
                self.lost += 1
                log.warning("a push of worker:%s died with it before it reached %s", worker, self.name)
                continue
            if settings is None:
                settings = pushed.peer.settings
            contributions.append(
                Contribution(
                    worker,
                    pushed.gradients,
                    float(weight),
                    pushed.missing,
                    float(scale),
                    pushed.peer.backup or (),
                )
            )
        return contributions, settings

    def _forget(self, worker: int, incarnation: int) -> None:
        """The lead says a worker is gone: nothing of it will be in the order any more."""
        peer = self._peers.get(worker)
        for push in [p for p in self._pushed if (p.worker, p.incarnation) == (worker, incarnation)]:
            if not self._pushed[push].held:
                self._pushed.pop(push).peer.close()
        if peer is not None and peer.incarnation == incarnation:
            self._worker_left(peer, finished=False)

    def _reduced(self, number: int, norms: list[tuple[int, float]]) -> None:
        """First half of an update with clip_norm; the second comes as a `commit` with the scale."""
        if self._lead_link is not None:
            with contextlib.suppress(LinkError):
                self._lead_link.send(Kind.DONE, {"number": number, "norms": norms})

    def _answered(self, answers: list[Answer]) -> None:
        """To an `ask`: what comes of all servers' answers is a `vectors`."""
        assert self._lead_link is not None
        self._lead_link.send(Kind.DONE, {"answers": answers})

    def _write_snapshot(self, directory: Path) -> None:
        """Copy the shard now, write the copy in a thread, report the file."""
        self.spans.main.enter(Phase.CHECKPOINT)
        tensors = self._shard.snapshot(vectors=True)
        self.spans.main.enter(Phase.IDLE)
        lane = self.spans.lane("checkpoint")
        name = f"server-{self.config.rank}.safetensors"
        self._snapshots += 1
        fault = self._faults.at_checkpoint(self._snapshots)

        def write() -> None:
            lane.enter(Phase.CHECKPOINT)
            try:
                info = write_part(directory, name, tensors, before_write=fault)
                body = {"name": info.name, "sha256": info.sha256, "bytes": info.bytes}
            except CheckpointError as error:
                body = {"failed": str(error)}
            lane.enter(Phase.IDLE)
            self._hub.post(lambda: self._part_written({**body, "directory": str(directory)}))

        threading.Thread(target=write, name="checkpoint part", daemon=True).start()

    def _part_written(self, body: dict[str, Any]) -> None:
        if self._lead_link is not None:
            with contextlib.suppress(LinkError):
                self._lead_link.send(Kind.DONE, body)


def has_ended(pid: int) -> bool:
    """Whether a process of this host has ended; False if it is not known."""
    if not pid:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return Path("/proc/self").exists()
    return state in "ZX"


def new_lead(config: ServerConfig, data: dict[str, Any] | None, checkpoint: Checkpoint | None) -> Lead:
    """The Lead of a run that begins, or goes on from a checkpoint.

    Args:
        data: what the model's offer says about the loader; None if there is none.
    """
    mode = parse_mode(config.mode)
    schedule = parse_schedule(mode, config.schedule)
    lead = Lead(
        mode,
        clip_norm=config.clip_norm,
        norm_bound=config.norm_bound,
        schedule=schedule,
        groups=config.groups,
    )
    lead.book = book_of(config, data)
    if checkpoint is not None:
        lead.restore(checkpoint.meta["lead"])
    return lead


def book_of(config: ServerConfig, data: dict[str, Any] | None) -> LeaseBook | None:
    """The leases of a run; None if it has no loader, or one without an end."""
    if data is None or "samples" not in data:
        return None
    mode, samples = parse_mode(config.mode), field(data, "samples", int)
    if samples < config.workers:
        raise PlanError(
            f"{config.workers} workers but only {samples} samples: every worker needs at least one. "
            "Use fewer --workers or more data."
        )
    return LeaseBook(
        samples=samples,
        batch_size=field(data, "batch_size", int),
        drop_last=field(data, "drop_last", bool),
        by_round=mode.by_round,
        copies=mode.copies,
    )


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
