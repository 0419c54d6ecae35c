"""The lead: a server that also makes the run's order. Server 0, or who takes its place.

It runs the decider (mode, leases), forwards what that decides to the other servers, sees that nobody waits
longer than the deadline, and gathers checkpoints.

With replicas it sends what it hears along with what it decides, and before it acts on it: then each follower
could lead (`standby.py`). Whoever does begins by placing the slices of the lead that is gone.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

import torch

from paceline.comm import Connection, Frame, Kind, Region
from paceline.comm.frames import field
from paceline.comm.lasting import LastingLink
from paceline.comm.messages import (
    FROM_CONTROLLER,
    EndEarly,
    LastWordsKept,
    LetServerGo,
    LetWorkerGo,
    ModeEntered,
    ReplaceWorker,
    SaveBegun,
    SaveEnded,
    SaveNow,
    SaveSoon,
    ServerAddresses,
    StopServing,
    SwitchMode,
)
from paceline.core.ballot import WHO
from paceline.core.decider import Decider
from paceline.core.events import (
    Assign,
    Call,
    Carry,
    Count,
    Dismiss,
    DrawOrder,
    FatesTold,
    GiveBack,
    Heard,
    Join,
    Leave,
    Load,
    Push,
    Rate,
    Refuse,
    Skip,
    Spoiled,
    StopEarly,
    Take,
    Vote,
)
from paceline.core.health import QUARANTINE
from paceline.core.leases import Lease
from paceline.core.modes import Rounds, parse_schedule
from paceline.core.out_of_step import OutOfStep
from paceline.core.steps import AdmitStep, PlaceStep, ReduceStep
from paceline.exceptions import (
    CheckpointError,
    DeadlineError,
    FrameError,
    LinkError,
    PacelineError,
    PlanError,
    UsageError,
)
from paceline.observe.record.thinning import pushes_thinning
from paceline.params import Placement
from paceline.ps.adoption import Adoption, Offer
from paceline.ps.attachments import rank_of, saved_part
from paceline.ps.checkpoints import CheckpointCoordinator
from paceline.ps.config import ServerConfig, begin, new_decider, undealt
from paceline.ps.ordering import LEASES_AT_ONCE
from paceline.ps.outcomes import (
    Forgotten,
    ModeChanged,
    Outcome,
    Placed,
    PushSpoiled,
    Reduced,
    SlicesDue,
    SnapshotTaken,
    VectorAnswers,
)
from paceline.ps.parts import ServerParts, make_parts
from paceline.ps.peers import ShmPeer, WorkerPeer
from paceline.ps.placing import Placing
from paceline.ps.push_record import PushRecord
from paceline.ps.saving import state_book, worker_state
from paceline.ps.server import TICK_S, Server
from paceline.ps.standby import Standby
from paceline.storage.checkpoint import load

__all__ = ["LeadServer", "serve"]

log = logging.getLogger("paceline.server")

_MOST_NORMS = 64
"""That the controller is told of at a time."""
_PROMISED = 1000
"""More placements than a lead announces without making them."""


class _Failing:
    """Around what may find the run impossible: that, and not what is wrong with one link, ends the run and is
    said as it is."""

    def __init__(self, fail: Callable[[PacelineError], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, OutOfStep | PlanError | CheckpointError):
            self._fail(error)
        return isinstance(error, OutOfStep)


class LeadServer(Placing):
    """See the module."""

    def __init__(
        self,
        parts: ServerParts,
        decider: Decider,
        adoption: Adoption,
        record: PushRecord,
        gate: set[int] | None = None,
    ) -> None:
        super().__init__(parts)
        self._record = record
        self._start_over(decider, adoption, gate)

    @classmethod
    def first(cls, parts: ServerParts) -> "LeadServer":
        """The leader of a run that begins, or goes on from a checkpoint."""
        config = parts.config
        resumed = load(Path(config.resume)) if config.resume else None
        applied = 0 if resumed is None else int(resumed.meta["lead"]["pushes"])
        thinning = pushes_thinning(config.records_mb)
        record = PushRecord.begin(Path(config.run_dir) / "pushes.csv", applied, thinning)
        return cls(parts, new_decider(config), Adoption(resumed, parts.executor.mode), record, gate=set())

    @classmethod
    def succeeding(cls, follower: Server) -> "LeadServer":
        """A follower leads from now on, with its parts: the leader is gone."""
        parts, standby = follower.parts, follower.standby
        adoption = Adoption(None, parts.executor.mode)  # training goes on: no worker starts from a checkpoint
        adoption.model, adoption.extras = Offer(None, standby.model), standby.extras
        record = PushRecord.take_over(
            Path(parts.config.run_dir) / "pushes.csv",
            standby.decider.totals.pushes,
            standby.records,
            pushes_thinning(parts.config.records_mb),
        )
        leader = cls(parts, standby.decider, adoption, record)
        leader._take_over(standby, follower.led_by)
        for connection, body in follower.early_followers:
            parts.hub.add(connection)
            leader.on_hello(connection, body)
        return leader

    def _start_over(self, decider: Decider, adoption: Adoption, gate: set[int] | None) -> None:
        """Lead a run from its beginning, or from where a follower knows it."""
        self._begin_ordering(decider, adoption, gate)
        self._checkpoints = CheckpointCoordinator(
            self.config,
            self._executor,
            decider,
            self._sequencer,
            describe=self._describe,
            extras=lambda: self._adoption.extras,
            tell=self._tell_controller,
            report=self._report,
            post_saved=lambda result: self._hub.post(lambda: self._order(self._checkpoints.saved(result))),
        )
        self._begin_placing()
        self._listens: dict[int, Any] = {}
        """Where the roots of groups listen for their members."""
        self._stop_asked: str | None = None
        """Why the controller wants the run to end early, until the workers are there."""
        self._leaving: set[int] = set()
        """Workers that are to be told to leave."""
        self._heard_at: dict[int, float] = {}
        """When each worker asked for something last."""
        self._linkless: dict[int, tuple[int, float]] = {}
        """Workers whose links are gone for good: their incarnations, and since when."""
        self._adopting: set[int] | None = None
        self._gate_since: float | None = None
        self._last_stats = 0.0
        self._failing = _Failing(self._fail)

    def _handlers(self) -> dict[Kind, Callable[[Connection, Frame], None]]:
        return {**super()._handlers(), Kind.OFFER: self._on_offer}

    def _close(self) -> None:
        self._checkpoints.close()
        for link in self._followers.values():
            link.close()
        super()._close()
        self._write_pushes()
        self._record.close()

    # --- connections ------------------------------------------------------------------------------

    def on_hello(self, connection: Connection, body: dict[str, Any]) -> None:
        """Workers and the other servers connect to the lead."""
        role, _, rank = connection.peer.partition(":")
        if role == "server":
            self._where[int(rank)] = field(body, "address", dict)
        if role == "server" and self._executor.shard is not None and field(body, "fresh", bool):
            self._newcomer_links[int(rank)] = connection
            self._changes.newcomers[int(rank)] = field(body, "address", dict)
            self._hand_over(int(rank), connection, None)
        elif role == "server":
            self._forward([])  # events that are in what `_catch_up` tells it already
            self._follows(int(rank), connection)
            if self._executor.shard is None:
                with self._failing:
                    self._try_adopt()
            else:
                self._catch_up(connection, field(body, "position", int))
        else:
            super().on_hello(connection, body)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """As any server, and what followers report."""
        with self._failing:
            if connection.peer.startswith("server:"):
                self._on_follower(connection, frame)
            else:
                super().on_frame(connection, frame)

    def on_end(self, connection: Connection, reason: str) -> None:
        """As any server; without a follower the run cannot go on."""
        if connection in self._followers.values():
            rank = _rank(connection)
            del self._followers[rank]
            if self._running:
                self._follower_gone(rank, reason)
            return
        if connection.peer.startswith("server:"):
            rank = _rank(connection)
            if self._left_behind.pop(rank, None) is None and self._running:
                log.warning("server:%s is gone before it held anything: %s", rank, reason)
                self._newcomer_links.pop(rank, None)
                self._changes.gone(rank)
                self._plan_change()
            return
        self._adoption.gone(connection)
        super().on_end(connection, reason)

    def _on_controller(self, frame: Frame) -> None:
        match FROM_CONTROLLER.read(frame.kind, frame.body):
            case SaveSoon():
                self._checkpoints.want_soon()
            case SaveNow(all_ended):
                self._tell_controller(SaveBegun())  # copying a large model takes seconds, without a word
                self._order(self._checkpoints.want_now(all_ended=all_ended))
            case SwitchMode(mode, request):
                self._switch(mode, request)
            case LetServerGo(server):
                self._changes.departing.add(server)
                self._plan_change()
            case EndEarly(reason):
                self._stop_asked = reason
                self._stop_if_asked()
            case LetWorkerGo(worker):
                self._leaving.add(worker)
                self._do(Dismiss(worker))
            case StopServing():
                self._tell()
                self._tell_controller(self._stats()._replace(last=True))
                self._running = False
            case ServerAddresses() | LastWordsKept():
                pass  # it leads, and has said nothing that must be heard before it may end
            case other:
                assert_never(other)

    def _stop_if_asked(self) -> None:
        """End the run early. Before the first step, followers could not be told: it waits until then."""
        if self._stop_asked is not None and self._gate is None:
            reason, self._stop_asked = self._stop_asked, None
            self._do(StopEarly(reason))
            self._forward([])
            self._act([])

    def _controller_back(self, fresh: Connection) -> None:
        super()._controller_back(fresh)
        self._controller.tell(ModeEntered(str(self._decider.mode), self._decider.version))
        self._told_ending = False
        self._tell_news()

    # --- in another server's place ----------------------------------------------------------------

    def _take_over(self, standby: Standby, gone: int) -> None:
        """Lead in the place of server `gone`: from what it has told, and what workers have asked."""
        self._adopting = set()
        self._checkpoints.states = standby.states
        self._untold = set(self._executor.peers)
        asked = {
            worker: peer.asked[0] for worker, peer in self._executor.peers.items() if peer.asked is not None
        }
        self._owed = {worker for worker, kind in asked.items() if kind not in _OF_THE_LEAD}
        self._checkpoints.current = self._decider.version
        self._checkpoints.unsaved = True
        reduces = [step.number for step in self._executor.queue if isinstance(step, ReduceStep)]
        reduced = self._executor.reduced
        half_done = reduced.number if reduced is not None else next(iter(reduces), None)
        self._sequencer.take_over(half_done, standby.held)
        # Workers may know of some that never came.
        self._changes.highest = self._executor.placement.number + _PROMISED
        log.warning("%s leads from here on, in the place of server:%s", self.name, gone)
        placement = self._latest_placement().without(gone)
        if placement is None:
            self._fail(LinkError(f"{self.name} lost server:{gone}, and nobody has its slices"))
            return
        self._act([PlaceStep(placement)])
        if self._executor.reduced is not None:  # the leader before died between the halves of an update
            self._add_norms(*self._executor.reduced)
        for worker in sorted(self._decider.machine.members - self._executor.peers.keys()):
            incarnation, finished = standby.gone.get(worker, (-1, False))
            present = self._decider.roster.incarnations[worker]
            self._act(self._do(Leave(worker, present, finished and incarnation == present)).steps)
        for worker, peer in sorted(self._executor.peers.items()):
            self._answer_unheard(worker, peer)

    def _answer_unheard(self, worker: int, peer: WorkerPeer) -> None:
        """What this worker has asked last, if the lead before has told us nothing of it."""
        if peer.asked is None:
            return
        kind, body = peer.asked
        if kind in _OF_THE_LEAD or field(body, "n", int) > self._decider.roster.requests.get(worker, 0):
            self._hub.handle(peer.connection, Frame(kind, body, 0, []))

    # --- followers --------------------------------------------------------------------------------

    def _on_follower(self, connection: Connection, frame: Frame) -> None:
        rank = _rank(connection)
        if frame.kind is Kind.ADOPTED:
            connection.send_aside()  # it and we may give each other slices
        if frame.kind is Kind.ADOPTED and rank in self._newcomer_links:
            self._changes.adopted.add(rank)
            self._plan_change()
        elif frame.kind is Kind.ADOPTED and self._adopting is not None:
            self._adopting.discard(rank)
            self._try_answer()
        elif frame.kind is Kind.DONE and "placed" in frame.body:
            self._on_placed(rank, field(frame.body, "placed", int))
        elif frame.kind is Kind.STATE:
            self._relay(connection, frame)
        elif frame.kind is Kind.DONE and "norms" in frame.body:
            self._add_norms(field(frame.body, "number", int), frame.body["norms"])
        elif frame.kind is Kind.DONE and "answers" in frame.body:
            self._answered(frame.body["answers"])
        elif frame.kind is Kind.DONE:
            self._checkpoints.part_written(frame.body)

    # --- the model --------------------------------------------------------------------------------

    def _on_offer(self, connection: Connection, frame: Frame) -> None:
        if frame.payload_bytes:
            self._begin_adoption(self._adoption.take_weights(connection, frame))
        else:
            self._adoption.offered(rank_of(connection), connection, frame, begun=self._decider.begun)
            if self._adoption.offered_anew(self.config.workers):
                self._begin_anew()
            self._gate_since = self._gate_since or time.monotonic()
            self._try_answer()
            self._try_adopt()

    def _begin_anew(self) -> None:
        """All workers have prepared more before the first step: the run has no model yet, as at its start."""
        for peer in [*self._executor.peers.values()]:  # whose goodbye over an older link is on its way
            self._worker_left(peer, finished=False)
        self._forget_model()
        followers, where = self._followers, self._where
        self._start_over(new_decider(self.config), self._adoption, gate=set())
        self._followers, self._where = followers, where

    def _try_adopt(self) -> None:
        if len(self._followers) == self.config.servers - 1 and self._adoption.ask_for_weights():
            assert self._adoption.model is not None
            self._begin_adoption(Region.create(self._adoption.model.layout.nbytes))

    def _begin_adoption(self, region: Region) -> None:
        """Take the model and hand it to the other servers."""
        model, saved = self._adoption.model, self._adoption.checkpoint
        assert model is not None
        begin(self._decider, self.config, model.data, model.spec, None)
        for mode in parse_schedule(self._executor.mode, self.config.schedule).modes:
            if reason := undealt(mode, self._decider.book):
                raise PlanError(reason)
            if len(model.spec.groups_of) > 1 and (reason := mode.one_optimizer_reason()):
                raise PlanError(f"prepare() got {len(model.spec.groups_of)} optimizers: {reason}.")
        if self._executor.mode.by_epoch:
            self._tell_descent(model.spec.groups[0])
        placement = Placement.over(model.layout, range(self.config.servers), self.config.replicas)
        model.numerics.apply()
        self._adopt(model.layout, model.spec, region, placement, lambda slices: None)
        if saved is not None:
            self._decider.restore(saved.meta["lead"])
            self._checkpoints.last_saved = self._decider.version
            book = state_book(saved, optimizer=not self._executor.mode.serverless)
            self._executor.present_shard.restore(book, vectors=self._executor.mode.by_epoch)
            # Until workers send newer ones, the next checkpoint keeps what this one has of them.
            for rank in range(self.config.workers):
                if kept := worker_state(saved, rank):
                    self._checkpoints.states[f"worker-{rank}.safetensors"] = kept
                    self._attachments.hear_buffers(kept, rank)
        self._adopting = set(self._followers)
        for rank, link in self._followers.items():
            self._hand_over(rank, link, None if saved is None else str(saved.path))
        self._try_answer()

    def _tell_descent(self, settings: dict[str, Any]) -> None:
        """Sandblaster: the settings are L-BFGS's."""
        if "instead_of" in settings:
            mode = self._executor.mode
            self._say_once(
                f"in mode {mode} the servers step by L-BFGS with lr {settings['lr']:g}; nothing of the "
                f"script's {settings['instead_of']} is used, neither learning rate nor weight decay. Give "
                "the script torch.optim.LBFGS to choose L-BFGS's settings."
            )

    def _try_answer(self) -> None:
        """Once all servers have the model nobody else may write to it, and workers may come."""
        if self._adopting is None or self._adopting:
            return
        assert self._executor.region is not None
        self._adoption.answer(
            self._executor.region,
            facts=self._servers_facts(),
            writable=self._executor.mode.needs_memory,
            epoch=self._decider.epoch,
            share=self._executor.mode.in_place
            or self._executor.mode.needs_memory
            or self._executor.mode.switchable,
            mode=str(self._executor.mode),
            first=self._gate is not None,
            buffers=self._attachments.buffers,
        )

    # --- workers ----------------------------------------------------------------------------------

    def _on_attach(self, connection: Connection, frame: Frame) -> None:
        peer = self._attach(connection, frame)
        if "listens" in frame.body:
            self._listens[peer.worker] = frame.body["listens"]
        if self._gate is None:
            self._let_in([peer])
            return
        # The first step waits until all planned workers are here, so that a run is repeatable.
        self._gate.add(peer.worker)
        self._gate_since = self._gate_since or time.monotonic()
        if len(self._gate) == self.config.workers:
            self._gate = None
            self._let_in([self._executor.peers[rank] for rank in sorted(self._executor.peers)])
            self._tell_whole()

    def _let_in(self, peers: list[WorkerPeer]) -> None:
        for peer in peers:
            self._act(self._do(Join(peer.worker, peer.incarnation)).steps)
        self._stop_if_asked()
        self._checkpoints.current = self._decider.version
        for peer in peers:
            facts: dict[str, Any] = {"version": self._decider.version, "mode": str(self._executor.mode)}
            facts |= self._progress()
            if self.config.groups:
                facts["group"] = self._listens.get(self._decider.groups.root_of(peer.worker))
            self._checkpoints.announce_cut(peer.worker, facts)
            if (following := self._changes.attached(peer.worker)) is not None:
                facts["next"] = following
            if self._decider.ballot.reason is not None:
                facts["stop"] = True
            facts["placement"] = self._executor.placement.to_json()
            self._attachments.welcome(peer, **facts)

    def _on_push(self, connection: Connection, frame: Frame) -> None:
        peer, body = self._attachments.peer_of(connection), frame.body
        push = self._attachments.receive_push(peer, body)
        void = field(body, "void", bool, False)
        norm = field(body, "norm", float) if "norm" in body else None
        event = Push(
            push,
            field(body, "read_version", int),
            field(body, "samples", int, 0),
            _leases(body, "leases"),
            void,
            norm,
            field(body, "fetch", bool, True),
        )
        if self._executor.optimizers > 1:
            event = event._replace(
                optimizer=field(body, "optimizer", int, 0), weight=field(body, "weight", int, 0)
            )
        self._heard(peer, body)
        peer.residual = field(body, "residual", float, peer.residual)
        if "refused" in body:
            self._do(Refuse(peer.worker, _leases(body, "refused")))
        if norm is not None and len(self._norms_told) < _MOST_NORMS:
            self._norms_told.append((peer.worker, norm))
        self._hear_account(peer, body)
        if field(body, "carries", str, "slot") == "parameters":
            self._take_parameters(peer)
        if void:
            log.warning("%s pushed NaN or Inf at step %s: refused", peer.name, push.sequence + 1)
        self._acting = peer.worker
        if self._decider.descent is not None:
            self._checkpoints.unsaved = True  # it is in a sum, which has no version of its own
            if peer.settings is not None:
                self._do(Rate(float(peer.settings[0]["lr"])))
        self._held_since[peer.worker] = time.monotonic()
        ruling = self._do(event)
        if ruling.refused_norm is not None:
            norm, usual = ruling.refused_norm
            log.warning(
                "%s pushed a gradient of norm %.3g at step %s, and %.3g is usual: refused (--norm-bound)",
                *(peer.name, norm, push.sequence + 1, usual),
            )
        self._act(ruling.steps)
        self._tell_mixed()
        if self._sick:
            self._quarantine()

    def _hear_account(self, peer: WorkerPeer, body: dict[str, Any]) -> None:
        """Batches that a worker's script read and made no step with come with its next message, and so do
        samples that a script without a loader has counted."""
        if (logged := field(body, "logged", int, 0)) > 0:
            self._do(Count(logged))
        if "skipped" in body:
            leases, samples = _leases(body, "skipped"), field(body, "skipped_samples", int, 0)
            self._do(Skip(peer.worker, leases, samples))

    def _on_bye(self, connection: Connection, frame: Frame) -> None:
        self._hear_account(self._attachments.peer_of(connection), frame.body)
        super()._on_bye(connection, frame)

    def _tell_mixed(self) -> None:
        machine = self._decider.machine
        if isinstance(machine, Rounds) and machine.mixed == 1:
            who = ", ".join(f"worker:{w} optimizer {k}" for w, k in sorted(machine.last_mix.items()))
            self._say_once(
                f"at version {self._decider.version} workers stepped different optimizers at the same time "
                f"({who}). Each update is made of the pushes for one optimizer, and the other workers wait "
                "until all are in step again: this happens after a worker was replaced"
            )

    def _heard(self, peer: WorkerPeer, body: dict[str, Any]) -> None:
        """A request that is answered by an admit."""
        self._heard_at[peer.worker] = time.monotonic()
        self._owed.add(peer.worker)
        number = field(body, "n", int)
        self._do(Heard(peer.worker, number))
        self._hear_ready(peer, body)

    def _hear_ready(self, peer: WorkerPeer, body: dict[str, Any]) -> None:
        """A worker may say that it is ready for the placement to come."""
        if self._changes.ready(peer.worker, body.get("ready")):
            self._change_if_ready()

    def _on_saved(self, connection: Connection, frame: Frame) -> None:
        """A worker's part of a checkpoint, or only its buffers."""
        rank = rank_of(connection)
        name, tensors = saved_part(connection, frame)
        self._attachments.hear_buffers(tensors, rank)
        if "buffers" not in frame.body:
            self._checkpoints.worker_saved(rank, name, tensors, field(frame.body, "cut", int, 0))

    def _describe(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says that is cut here."""
        self._write_pushes()  # who goes back to this checkpoint finds the record of all that is in it
        model = self._adoption.model
        assert model is not None
        return {
            **model.facts(),
            "lead": self._decider.snapshot(),
            "servers": self.config.servers,
            "workers": self.config.workers,
        }

    def _tell_controller(self, message: Any) -> None:
        with contextlib.suppress(LinkError):
            self._controller.tell(message)

    def _report(self, ended: SaveEnded) -> None:
        """What became of a checkpoint."""
        with contextlib.suppress(LinkError):
            self._controller.tell(self._stats())
            self._controller.tell(ended)

    def _take_parameters(self, peer: WorkerPeer) -> None:
        """allreduce: the root has made its step, and waits."""
        if not self._executor.mode.serverless:
            raise FrameError(
                f"{peer.name} pushed parameters, and in mode {self._executor.mode} servers have their own"
            )
        assert peer.copy is not None
        whole = [each for each in peer.copy if each is not None]
        self._executor.present_shard.assign(whole if isinstance(peer, ShmPeer) else peer.gradients.flat)
        self._checkpoints.current = self._decider.version + 1

    def _on_assign(self, connection: Connection, frame: Frame) -> None:
        peer = self._attachments.peer_of(connection)
        push = self._attachments.receive_push(peer, frame.body)
        self._heard(peer, frame.body)
        self._checkpoints.unsaved = True
        self._checkpoints.current = self._decider.version
        self._held_since[peer.worker] = time.monotonic()
        self._acting = peer.worker
        self._act(self._do(Assign(push)).steps)

    def _on_pull(self, connection: Connection, frame: Frame) -> None:
        peer, fetch = self._attachments.peer_of(connection), field(frame.body, "fetch", bool, True)
        self._heard(peer, frame.body)
        if "load" in frame.body:
            self._checkpoints.unsaved = True
            self._act(self._do(Load(peer.worker, peer.incarnation, field(frame.body, "load", int))).steps)
        if lost := set(field(frame.body, "without", list, [])) & self._executor.placement.servers:
            self._lost[peer.worker] = (lost, fetch, time.monotonic())
        else:
            self._act([AdmitStep(peer.worker, self._decider.version, None if fetch else "keep")])

    def _on_take(self, connection: Connection, frame: Frame) -> None:
        peer, body = self._attachments.peer_of(connection), frame.body
        if self._adoption.model is None or self._adoption.model.data is None:
            raise FrameError("leases of a run without a prepared loader")
        self._acting = peer.worker
        self._heard_at[peer.worker] = time.monotonic()
        self._taking.add(peer.worker)
        number, epoch = field(body, "n", int, 0), field(body, "epoch", int)
        self._hear_ready(peer, body)
        if number and self._decider.roster.takes.get(peer.worker) == number:  # the lead before had heard it
            granted, given, over = self._decider.roster.grants.get(peer.worker, (0, (), False))
            if granted == number:
                self._grant(peer, given, over=over)
            return
        if "give_back" in body:
            self._do(GiveBack(peer.worker, _leases(body, "give_back")))
        if "carry" in body:
            self._do(Carry(peer.worker, _leases(body, "carry")))
        self._hear_account(peer, body)
        if "order" in body:
            drawn = field(body, "order", list)
            if len(drawn) != 2 or not all(isinstance(each, str) for each in drawn):
                raise FrameError("an order of samples that is not a fingerprint and a sampler's name")
            self._do(DrawOrder(peer.worker, epoch, drawn[0][:64], drawn[1][:200]))
        limit = min(LEASES_AT_ONCE, max(0, field(body, "limit", int)))
        ruling = self._do(Take(peer.worker, epoch, limit, field(body, "wait", bool), number))
        if not ruling.replies:
            self._held_since[peer.worker] = time.monotonic()
        self._reply(ruling.replies)
        self._act(ruling.steps)

    def _grant(self, peer: WorkerPeer, leases: tuple[Lease, ...], *, over: bool) -> None:
        body: dict[str, Any] = {
            "leases": [[lease.id, list(lease.ranges)] for lease in leases],
            "over": over,
            "version": self._decider.version,
        }
        self._taking.discard(peer.worker)
        self._released(peer.worker, body)
        self._flag(peer.worker, body)
        self._forward([])  # before anybody acts on it
        with contextlib.suppress(LinkError):
            peer.connection.send(Kind.GRANT, body)

    def _on_vote(self, connection: Connection, frame: Frame) -> None:
        """A worker asks whether the run ends early."""
        peer, body = self._attachments.peer_of(connection), frame.body
        number, who, wants = field(body, "n", int), field(body, "who", str), field(body, "wants", bool)
        if who not in WHO:
            raise FrameError(f"a vote of {who!r:.40}, expected one of {', '.join(WHO)}")
        self._acting = peer.worker
        self._heard_at[peer.worker] = time.monotonic()
        self._voting.add(peer.worker)
        self._hear_ready(peer, body)
        if self._decider.ballot.answer_to(peer.worker, number) is not None:  # the lead before had decided it
            self._tell_verdict(peer)
            return
        self._held_since[peer.worker] = time.monotonic()
        self._do(Vote(peer.worker, number, who, wants))
        self._act([])

    def _tell_verdict(self, peer: WorkerPeer) -> None:
        body: dict[str, Any] = {}
        self._voting.discard(peer.worker)
        self._released(peer.worker, body)
        self._flag(peer.worker, body)
        self._forward([])  # before anybody acts on it
        with contextlib.suppress(LinkError):
            peer.connection.send(Kind.VERDICT, body)

    def _on_call(self, connection: Connection, frame: Frame) -> None:
        """A worker calls a collective."""
        peer, body = self._attachments.peer_of(connection), frame.body
        number, place, value = field(body, "n", int), field(body, "place", str), field(body, "value", str)
        self._acting = peer.worker
        self._heard_at[peer.worker] = time.monotonic()
        self._calling[peer.worker] = place
        self._hear_ready(peer, body)
        if (
            self._decider.collectives.answer_to(peer.worker, number) is not None
        ):  # the lead before had settled it
            self._tell_answer(peer)
            return
        self._held_since[peer.worker] = time.monotonic()
        self._do(Call(peer.worker, number, place, value))
        self._act([])

    def _tell_answer(self, peer: WorkerPeer) -> None:
        self._calling.pop(peer.worker, None)
        body: dict[str, Any] = {"values": self._decider.collectives.last_answer(peer.worker)}
        self._released(peer.worker, body)
        self._flag(peer.worker, body)
        self._forward([])  # before anybody acts on it
        with contextlib.suppress(LinkError):
            peer.connection.send(Kind.ANSWER, body)

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        self._held_since.pop(peer.worker, None)
        self._acting = -1
        self._leaving.discard(peer.worker)
        self._taking.discard(peer.worker)
        self._voting.discard(peer.worker)
        self._calling.pop(peer.worker, None)
        self._lost.pop(peer.worker, None)
        self._owed.discard(peer.worker)
        self._changes.left(peer.worker)
        if peer.residual and not finished:
            self._say_once(
                f"{peer.name} is gone, and with it a gradient of L2 norm {peer.residual:.3g} that "
                "compression had held back until later pushes"
            )
        super()._worker_left(peer, finished=finished)
        if self._gate is not None:
            self._gate.discard(peer.worker)
        else:
            self._act(self._do(Leave(peer.worker, peer.incarnation, finished)).steps)
        self._order(self._checkpoints.worker_left(peer.worker, finished=finished))

    def _worker_lost(self, peer: WorkerPeer) -> None:
        super()._worker_lost(peer)
        self._linkless[peer.worker] = (peer.incarnation, time.monotonic())

    def _quarantine(self) -> None:
        sick, self._sick = self._sick, []
        what = "NaN or Inf" + (", or more than --norm-bound," if self.config.norm_bound else "")
        for worker in sick:
            self._replace(
                worker,
                f"worker:{worker} pushed {what} {QUARANTINE} times in a row while other workers did not: "
                "something is wrong with its process, its data or its device",
            )

    def _admit_body(self, worker: int, version: int) -> dict[str, Any]:
        body = super()._admit_body(worker, version)
        body |= self._progress()
        self._owed.discard(worker)
        self._released(worker, body)
        self._flag(worker, body)
        self._checkpoints.announce_cut(worker, body)
        if self._executor.peers[worker].needs_fates:
            body["settled"] = self._decider.pushes.fates.settled(worker)
            if unapplied := self._decider.pushes.fates.unapplied.get(worker):
                body["unapplied"] = unapplied
                self._do(FatesTold(worker))
        return body

    def _progress(self) -> dict[str, Any]:
        """How far the run is, for the script and its schedulers."""
        told: dict[str, Any] = {"samples": self._decider.totals.samples}
        if self._decider.book is not None:
            told["done"] = self._decider.book.settled
        if self.config.workers == 1 and len(self._decider.machine.members) > 1:
            told["others"] = True  # who began alone does not know of them
        return told

    def _flag(self, worker: int, body: dict[str, Any]) -> None:
        """With a reply it gets anyway, ask a worker for its part of the checkpoint in the making, and tell
        it of a new mode."""
        if worker in self._leaving:
            body["leave"] = True
        if self._decider.ballot.reason is not None:
            body["stop"] = True
        if worker in self._untold:
            self._untold.discard(worker)
            body["mode"] = str(self._executor.mode)
        self._changes.inform(worker, self._executor.placement, body)
        if (version := self._checkpoints.flag(worker)) is not None:
            body["save"] = version

    # --- the order --------------------------------------------------------------------------------

    def _follow_from(self, outcome: Outcome) -> None:
        match outcome:
            case Reduced(number, norms):
                self._add_norms(number, norms)
            case VectorAnswers(answers):
                self._answered(answers)
            case PushSpoiled(worker):
                self._do(Spoiled(worker))
            case ModeChanged():
                self._untold = set(self._executor.peers)
                self._tell_mode()
            case Placed():
                self._changes.outdated = set(self._executor.peers)
                self._hub.post(self._answer_lost)
            case SlicesDue(server, number, tensors):
                self._give(server, number, tensors)
            case SnapshotTaken(directory, tensors):
                self._part_writer.write(directory, tensors, self._checkpoints.part_written)
            case Forgotten(peer):
                self._worker_left(peer, finished=False)
            case _:
                assert_never(outcome)

    # --- watching ---------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if now - self._last_stats < TICK_S:
            return
        self._last_stats = now
        self._write_pushes()
        self._check_deadline(now)
        self._check_lost(now)
        self._change_if_ready()
        self._let_depart()
        self._order(self._checkpoints.hurry_if_late(now))
        self._checkpoints.tell_cut()
        self._tell_controller(self._stats())

    def _check_deadline(self, now: float) -> None:
        """Nobody waits for ever, and the error names who is missing."""
        limit = self.config.deadline_s
        advice = f"the deadline is {limit:g} s (--deadline)"
        if self._gate is not None and self._gate_since and now - self._gate_since > limit:
            missing = sorted(set(range(self.config.workers)) - self._gate - self._adoption.waiting)
            who = ", ".join(f"worker:{r}" for r in missing)
            self._fail(DeadlineError(f"{who} did not reach paceline.prepare() while others wait; {advice}."))
        for worker in self._decider.left_behind:
            silent = now - self._heard_at.get(worker, now)
            if silent > limit:
                self._heard_at[worker] = now
                self._replace(
                    worker,
                    f"DeadlineError: worker:{worker} has said nothing for {silent:.0f} s in an epoch that is "
                    f"over without it, and others have finished; {advice}. Look at its log, or raise the "
                    "deadline if a step may take this long.",
                )
        for worker, (incarnation, since) in [*self._linkless.items()]:
            if worker in self._executor.peers:  # another one in its place
                del self._linkless[worker]
            elif now - since > limit:
                self._linkless[worker] = (incarnation, now)
                self._replace(
                    worker,
                    f"DeadlineError: worker:{worker} has no link any more, and its process has neither ended "
                    f"nor said why for {now - since:.0f} s: it hangs; {advice}. Look at its log.",
                    incarnation,
                )
        for worker, since in self._held_since.items():
            if now - since > limit:
                blockers = self._blockers(worker)
                who = ", ".join(f"worker:{b}" for b in sorted(blockers))
                text = (
                    f"worker:{worker} has waited {now - since:.0f} s at version {self._decider.version} "
                    f"for {who or 'a server'}; {advice}. Look at its log, or raise the deadline if a "
                    "step may take this long."
                )
                if not blockers:
                    self._fail(DeadlineError(text))
                    return
                if worker in self._calling and self._skip_the_call(worker, blockers, since):
                    return
                for blocker in blockers:
                    self._replace(blocker, f"DeadlineError: {text}")
                # Who waits, waits anew: for those that come instead.
                self._held_since = dict.fromkeys(self._held_since, now)
                return

    def _skip_the_call(self, worker: int, blockers: set[int], since: float) -> bool:
        """Whether workers that one waits for in a collective trained on meanwhile: that ends the run."""
        elsewhere = [b for b in sorted(blockers) if self._heard_at.get(b, since) > since]
        if elsewhere:
            who = ", ".join(f"worker:{b}" for b in elsewhere)
            self._fail(
                UsageError(
                    f"worker:{worker} has waited {time.monotonic() - since:.0f} s in paceline."
                    f"{self._calling[worker]} for {who}, which went on training meanwhile; the deadline is "
                    f"{self.config.deadline_s:g} s (--deadline). Call it on every worker: look for what in "
                    "the script depends on the rank."
                )
            )
        return bool(elsewhere)

    def _replace(self, worker: int, reason: str, incarnation: int | None = None) -> None:
        """Have the controller put another process in a worker's place. This one can write no more then."""
        if (peer := self._executor.peers.get(worker)) is not None:
            incarnation = peer.incarnation
        log.warning("%s", reason)
        self._tell_controller(ReplaceWorker(worker, incarnation, reason))

    def _blockers(self, worker: int) -> set[int]:
        """Workers that this one waits for; none if it waits for a server."""
        if worker in self._voting:
            return self._decider.awaited_votes - {worker}
        if worker in self._calling:
            return self._decider.awaited_callers - {worker}
        if self._sequencer.waiting:
            return set()
        waits_for = self._decider.machine.waiting.get(worker, set()) | self._decider.missing_assigns
        if not waits_for and self._decider.book:
            waits_for = set(self._decider.book.outstanding)
        # What nobody holds, somebody has still to take or to read to its end.
        waits_for = waits_for - {worker} or self._decider.machine.members - self._held_since.keys()
        return waits_for - {worker}


_OF_THE_LEAD = (Kind.TAKE, Kind.VOTE, Kind.CALL)
"""What the lead alone answers."""


def _leases(body: dict[str, Any], name: str) -> tuple[int, ...]:
    """Numbers of leases that a worker sent."""
    ids = field(body, name, list, [])
    if not all(type(each) is int for each in ids):
        raise FrameError(f"field {name!r} has leases that are not numbers")
    return tuple(ids)


def _rank(connection: Connection) -> int:
    return int(connection.peer.partition(":")[2])


def serve(config: ServerConfig, secret: bytes, controller: LastingLink) -> None:
    """Be a server in this process until the controller stops it."""
    if config.import_from is not None:
        sys.path.insert(0, config.import_from)
    torch.set_num_threads(1)  # the shard has its own threads
    torch.set_grad_enabled(False)
    parts = make_parts(config, secret, controller)
    server: Server = LeadServer.first(parts) if config.lead == config.rank else Server(parts)
    server.meet_controller()
    while server.run():
        server = LeadServer.succeeding(server)
