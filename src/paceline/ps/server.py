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
from paceline.comm.transfer import Transfer
from paceline.exceptions import (
    CheckpointError,
    FrameError,
    LayoutMismatch,
    LinkError,
    PacelineError,
    UsageError,
)
from paceline.modes import PushId, parse_mode
from paceline.modes.lbfgs import Answer
from paceline.observe.phases import PHASES, Phase
from paceline.observe.spans import recorder_of
from paceline.params import Layout, OptimizerSpec, StateBook, bytes_of, partition
from paceline.ps.peers import MAX_STATE_BYTES, InlinePeer, ShmPeer, WorkerPeer
from paceline.ps.saving import read_blob, state_book
from paceline.ps.shard import Contribution, Gradients, Shard
from paceline.storage.checkpoint import load, write_part

__all__ = ["Server", "ServerConfig", "rank_of"]

log = logging.getLogger("paceline.server")

TELL_S = 0.5
"""How often a server tells the controller how it does."""
TICK_S = 0.25
"""How often a server looks around when nothing happens."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a server must know before anybody connects."""

    rank: int
    incarnation: int = 0
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
        self._secret = secret
        self._controller = controller
        self._hub = Hub(self, Listener(host=config.host), secret, patience_s=config.deadline_s)
        self._running = True
        self._failed = False
        self._spec: OptimizerSpec | None = None
        self._region: Region | None = None
        self._base: Tensor | None = None
        self._peers: dict[int, WorkerPeer] = {}
        self._pushed: dict[PushId, _Pushed] = {}
        self._orders: collections.deque[list[Any]] = collections.deque()
        self._reduce_settings: Any = None
        self._lead_link: Connection | None = None
        self._worker_handlers: dict[Kind, Callable[[Connection, Frame], None]] = {
            Kind.ATTACH: self._on_attach,
            Kind.PUSH: self._on_push,
            Kind.ASSIGN: self._on_assign,
            Kind.PULL: self._on_pull,
            Kind.STATE: self._on_state,
            Kind.BYE: self._on_bye,
        }

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop."""
        self._controller.watch(lambda fresh: self._hub.post(lambda: self._controller_back(fresh)))
        self._meet_controller()
        try:
            while self._running:
                self._hub.poll(TICK_S)
                self._tick(time.monotonic())
        finally:
            self._close()
            self.spans.close()

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

    def on_hello(self, connection: Connection, body: dict[str, Any]) -> None:
        """Only workers connect to a server."""
        rank_of(connection)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Whatever it is, it comes from somebody who knows the secret."""
        if connection is self._controller:
            self._on_controller(frame)
        elif connection is self._lead_link:
            self._on_lead(frame)
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
            if self._running:
                self._fail(LinkError(f"{self.name} lost {connection.peer}: {reason}"))
        else:
            for peer in list(self._peers.values()):
                if peer.connection is connection:
                    log.info("%s: %s", peer.name, reason)
                    self._worker_left(peer, finished=False)

    def _on_controller(self, frame: Frame) -> None:
        if frame.kind is Kind.START and self._lead_link is None:  # the next controller says it again
            address = Address.from_json(field(frame.body, "lead", dict))
            link = connect(address, self._secret, peer="server:0")
            link.send(Kind.HELLO, {"role": "server", "rank": self.config.rank})
            self._lead_link = link
            self._hub.add(link)
        elif frame.kind is Kind.STOP:
            self._running = False

    def _on_lead(self, frame: Frame) -> None:
        assert self._lead_link is not None
        if frame.kind is Kind.ADOPT:
            layout = Layout.from_json(frame.body["layout"])
            spec = OptimizerSpec.from_json(frame.body["optimizer"])
            fds = frame.descriptors
            self._adopt(layout, spec, Region.attach(fds[0], layout.nbytes) if fds else None)
            assert self.shard is not None and self._base is not None
            if frame.payload_bytes:
                self._lead_link.read_into([bytes_of(t) for t in self.shard.flats(self._base)])
            if frame.body["checkpoint"]:
                book = state_book(load(Path(frame.body["checkpoint"])))
                self.shard.restore(book, vectors=self.mode.by_epoch)
            self._lead_link.send(Kind.ADOPTED)
        elif frame.kind is Kind.ORDER:
            self._orders.extend(frame.body["steps"])
            self._advance()

    def _adopt(self, layout: Layout, spec: OptimizerSpec, region: Region | None) -> None:
        """Take this layout and optimizer; `region` is the parameters' memory, shared on this host."""
        self.layout, self._spec, self._region = layout, spec, region
        if region is not None:
            self._base = torch.frombuffer(region.buffer, dtype=torch.uint8)
        else:
            self._base = torch.zeros(layout.nbytes, dtype=torch.uint8)
        mine = partition(layout, self.config.servers)[self.config.rank]
        self._hub.spin_s = spin_for(layout.nbytes, self.config.worker_threads + self.config.servers)
        lanes = self.config.threads
        self.shard = Shard(layout, spec, mine, self._base, self.config.optimizers, lanes, self.mode.damping)
        log.info(
            "adopted %s tensors in %s slices, %.1f MB mine, fingerprint %s",
            len(layout.tensors),
            len(layout.slices),
            self.shard.nbytes / 1e6,
            layout.fingerprint,
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
                live=self.shard.flats(self._base),
                post=self._from_thread,
                lane=self.spans.lane(f"worker:{rank}"),
            )
        self._keep_backup(peer)
        for other in self._peers.values():  # who was alone is not any more
            other.read_in_place(self.mode.in_place or self.mode.needs_memory)
        self._peers[rank] = peer
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
            read = self._shard.flats(self._base) if peer.copy is None else peer.copy
            for mine, theirs in zip(peer.backup, read, strict=True):
                mine.copy_(theirs)

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
                peer.welcome(facts)
            else:
                peer.connection.send(Kind.ATTACHED, facts)

    def _from_thread(self, peer: InlinePeer, frame: Frame | None, reason: str) -> None:
        if frame is None:
            self._hub.post(lambda: self._hub.end(peer.connection, reason))
        else:
            received = frame
            self._hub.post(lambda: self._hub.handle(peer.connection, received))

    def _peer(self, connection: Connection) -> WorkerPeer:
        peer = self._peers.get(rank_of(connection))
        if peer is None or peer.connection is not connection:
            raise FrameError(f"{connection.peer} has not attached")
        return peer

    def _on_push(self, connection: Connection, frame: Frame) -> None:
        self._receive_push(self._peer(connection), frame.body)
        self._advance()

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
        self._receive_push(self._peer(connection), frame.body)
        self._advance()

    def _on_pull(self, connection: Connection, frame: Frame) -> None:
        self._peer(connection)  # the lead orders the reply

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
            case ["checkpoint", _, directory]:
                self._write_snapshot(Path(directory))
            case ["reduce", pushes]:
                contributions, self._reduce_settings = self._contributions(pushes)
                self._reduced(self.shard.reduce(contributions))
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
                settings = self._reduce_settings
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

    def _copy_only(self, copies: Sequence[Sequence[Tensor]], done: Callable[[int], None] | None) -> None:
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
            self._faults.at(self.updates + 1)
        self.spans.begin_step(self.updates)
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
                peer.fetches = peer.fetches or "fetch" in marks
                peer.start_admit(self._admit_body(worker, version))
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

    def _reduced(self, norms: list[tuple[int, float]]) -> None:
        """First half of an update with clip_norm; the second comes as a `commit` with the scale."""
        assert self._lead_link is not None
        self._lead_link.send(Kind.DONE, {"norms": norms})

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

        def write() -> None:
            lane.enter(Phase.CHECKPOINT)
            try:
                info = write_part(directory, name, tensors)
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


def rank_of(connection: Connection) -> int:
    """The rank of the worker at the other end; FrameError if it is none."""
    role, _, rank = connection.peer.partition(":")
    if role != "worker":
        raise FrameError(f"{connection.peer} is not a worker")
    return int(rank)
