"""Executing the run's one order on a shard. A part of every server."""

import collections
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import torch
from safetensors.torch import save
from torch import Tensor

from paceline.comm import Connection, Frame, Hub, Kind, Region
from paceline.comm.faults import Faults
from paceline.comm.frames import field
from paceline.comm.protection import protection
from paceline.core.modes import PushId, parse_mode
from paceline.core.modes.lbfgs import Answer
from paceline.core.steps import (
    AddStep,
    AdmitStep,
    ApplyStep,
    AskStep,
    AssignStep,
    CheckpointStep,
    CommitStep,
    DropStep,
    HoldStep,
    LeaveStep,
    LoadStep,
    ModeStep,
    PlaceStep,
    ReduceStep,
    Step,
    VectorsStep,
    WeightedPush,
)
from paceline.exceptions import (
    CheckpointError,
    FrameError,
    LinkError,
)
from paceline.observe.phases import Phase
from paceline.observe.spans import recorder_of
from paceline.params import Layout, OptimizerSpec, Placement, Slice, StateBook
from paceline.ps.config import ServerConfig
from paceline.ps.peers import MAX_STATE_BYTES, InlinePeer, ShmPeer, WorkerPeer
from paceline.ps.saving import read_blob
from paceline.ps.shard import Contribution, Copy, Gradients, Shard
from paceline.storage.checkpoint import write_part

__all__ = ["Executing"]

log = logging.getLogger("paceline.server")

_WITH_ADMITS = (AdmitStep, ApplyStep, CommitStep, AddStep, AssignStep, HoldStep)
"""Steps that the admits behind them are executed with: parameters are copied while they are in the cache."""

_BEHIND = 10
"""The niceness of a thread that writes a checkpoint: a tenth of a busy core."""


@dataclass(slots=True)
class Pushed:
    """A push whose gradient is here."""

    peer: WorkerPeer
    gradients: Gradients
    void: bool
    missing: frozenset[int]
    groups: Collection[int] | None = None
    """Parameter groups of the optimizer that it is for, where there are several; None: all."""
    held: bool = False
    """Its gradient was copied: the worker has gone on."""


class Executing:
    """Executes steps of the order, as far as the pushes that they need are here."""

    _hub: Hub

    def __init__(self, config: ServerConfig) -> None:
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
        self._faults = Faults.parse(config.faults)
        self._snapshots = 0
        self._saving: list[int] | None = None
        """Of this server's part of a checkpoint, while it is written: bytes written and bytes to write."""
        self._spec: OptimizerSpec | None = None
        self._region: Region | None = None
        self._base: Tensor | None = None
        self._placement = Placement(0, frozenset(), ())
        self._given = 0
        """The number of the last placement for which slices were sent to others."""
        self._gifts: dict[int, list[dict[str, Tensor]]] = {}
        """Slices that others sent, by the number of the placement in which we hold them."""
        self._reduced_to: list[Any] = []
        """Number and norms of an update's first half whose second has not come."""
        self._reduce_settings: Any = None
        self._peers: dict[int, WorkerPeer] = {}
        self._pushed: dict[PushId, Pushed] = {}
        self._loads: dict[PushId, tuple[StateBook, Collection[int] | None]] = {}
        """Optimizer states that workers gave, until the order says when to take them over; and the parameter
        groups that each is for (None: all)."""
        self._orders: collections.deque[Step] = collections.deque()
        self._lead_link: Connection | None = None

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        """A worker is gone, in order (`finished`) or not."""
        raise NotImplementedError

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

    def _advance(self) -> None:
        """Execute what is due, as far as the pushes it needs are here."""
        while self._orders:
            step = self._orders[0]
            if not self._can_execute(step):
                return
            self._orders.popleft()
            admits = [step] if isinstance(step, AdmitStep) else []
            if isinstance(step, _WITH_ADMITS):
                while self._orders and isinstance(admit := self._orders[0], AdmitStep):
                    admits.append(admit)
                    self._orders.popleft()
            self._execute(step, admits)

    def _can_execute(self, step: Step) -> bool:
        """Whether all that a step needs is here."""
        match step:
            case ApplyStep(pushes) | ReduceStep(pushes) | AddStep(pushes):
                return self._all_here([push[:3] for push in pushes], self._pushed)
            case HoldStep(push) | AssignStep(push):
                return self._all_here([push], self._pushed)
            case LoadStep(push):
                return self._all_here([push], self._loads)
            case PlaceStep(placement):
                return self._has_slices_for(placement)
            case AdmitStep() | DropStep() | LeaveStep() | CommitStep() | ModeStep() | CheckpointStep():
                return True
            case AskStep() | VectorsStep():
                return True
            case _:
                assert_never(step)

    def _all_here(self, ids: Iterable[tuple[int, int, int]], here: Container[PushId]) -> bool:
        """Whether every push has arrived, or never will because its worker is gone."""
        for worker, incarnation, sequence in ids:
            if PushId(worker, incarnation, sequence) in here:
                continue
            peer = self._peers.get(worker)
            if peer is not None and peer.incarnation == incarnation:
                return False
        return True

    def _execute(self, step: Step, admits: list[AdmitStep]) -> None:
        """One step, and the admits that follow it: those are served while slices are in the cache."""
        assert self.shard is not None
        match step:
            case DropStep(push):
                self._pushed.pop(push, None)
            case LeaveStep(worker, incarnation):
                self._forget(worker, incarnation)
            case ModeStep(text):
                self._change_mode(text)
            case PlaceStep(placement):
                self._place(placement)
            case CheckpointStep(directory=directory):
                self._write_snapshot(Path(directory))
            case ReduceStep(pushes, number):
                contributions, self._reduce_settings = self._contributions(pushes)
                norms = self.shard.reduce(contributions)
                self._reduced_to = [number, norms]
                self._reduced(number, norms)
            case HoldStep(push):
                self._hold(push)
                self._admit(admits, self._copy_only)
            case AddStep(pushes):
                contributions, _ = self._contributions(pushes)
                self.shard.add(contributions)
                if len(contributions) < len(pushes):
                    self.shard.spoil()
                self._admit(admits, self._copy_only)
            case AskStep(ops):
                self._answered(self.shard.run(ops))
            case VectorsStep(ops, kept):
                self._update(admits, lambda copies, done: self._shard.move(ops, kept))
            case ApplyStep(pushes):
                contributions, settings = self._contributions(pushes)
                self._update(admits, self._work_of(contributions, settings))
            case CommitStep(scale):
                settings, self._reduced_to = self._reduce_settings, []
                self._update(admits, lambda copies, done: self._shard.commit(scale, settings, copies, done))
            case AssignStep(push):
                pushed = self._pushed.pop(push, None)
                if pushed is not None:
                    self.shard.assign(pushed.peer.gradients.flat)
                self._admit(admits, self._copy_only)
            case LoadStep(push):
                if (given := self._loads.pop(push, None)) is not None:
                    self.shard.restore(given[0], parameters=False, groups=given[1])
            case AdmitStep():
                self._admit(admits, self._copy_only)
            case _:
                assert_never(step)

    @property
    def _shard(self) -> Shard:
        assert self.shard is not None
        return self.shard

    def _change_mode(self, text: str) -> None:
        """Go on in another mode. Who is told of it by its next reply then uses the memory that fits."""
        self.mode = parse_mode(text)
        self._shard.damping = self.mode.damping
        for peer in self._peers.values():
            self._keep_backup(peer)  # first: its copy is what it computes on
            peer.read_in_place(self.mode.in_place)
        log.info("mode %s", text)

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

    @property
    def _optimizers(self) -> int:
        """How many optimizers the run has."""
        return 1 if self._spec is None else len(self._spec.groups_of)

    def _groups_of(self, body: dict[str, Any]) -> Collection[int] | None:
        """The parameter groups of the optimizer that a message is about; None: of all that there are."""
        if self._optimizers == 1:
            return None
        assert self._spec is not None
        optimizer = field(body, "optimizer", int, 0)
        if not 0 <= optimizer < self._optimizers:
            raise FrameError(f"a message about optimizer {optimizer} of {self._optimizers}")
        return self._spec.groups_of[optimizer]

    def _copy_only(self, copies: Sequence[Copy], done: Callable[[int], None] | None) -> None:
        self._shard.update((), None, copies, done)

    def _work_of(self, contributions: list[Contribution], settings: Any) -> Callable[..., None]:
        """What an update with these contributions does to the shard."""
        match self.mode.payload:
            case "none":
                return lambda copies, done: None
            case "elastic":
                if not contributions:
                    return lambda copies, done: self._shard.mix(-1, None, 0.0, copies, done)
                only = contributions[0]  # its scale is the elastic alpha, which the order says
                return lambda copies, done: self._shard.mix(
                    only.worker, only.gradients, only.scale, copies, done, only.groups
                )
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
        for piece, mine, theirs in zip(self._shard.slices, kept.flat, pushed.gradients.flat, strict=True):
            if pushed.groups is None or piece.group in pushed.groups:
                mine.copy_(theirs)
        pushed.gradients = kept
        pushed.held = True

    def _update(self, admits: list[AdmitStep], work: Callable[..., None]) -> None:
        started = time.perf_counter()
        if self._faults.all:
            for damage in self._faults.at(self.updates + 1):
                for admit in admits[self.updates % len(admits) :][:1] if admits else ():
                    if admit.worker in self._peers:
                        self._peers[admit.worker].connection.damage_next(damage)
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

    def _admit(self, admits: list[AdmitStep], work: Callable[..., None]) -> None:
        """Do some work on the shard that ends with fresh parameters for these workers."""
        peers = []
        for worker, version, keep in admits:
            peer = self._peers.get(worker)
            if peer is not None:
                # The order says it, not the request: that may come later than the order.
                peer.fetches = keep is None
                peer.asked = None
                body = self._admit_body(worker, version)
                if peer.told != self._placement.number:
                    peer.told = self._placement.number
                    body["owned"] = self._placement.owned(self.config.rank)
                peer.start_admit(body)
                peers.append(peer)
        copies: list[Copy] = []
        streaming: list[InlinePeer] = []
        for p in peers:
            if p.fetches:
                copies += [copy for copy in (p.copy, p.backup) if copy is not None]
                if isinstance(p, InlinePeer):
                    streaming.append(p)

        def done(position: int) -> None:
            for p in streaming:
                p.slice_ready(position)

        work(copies, done if streaming else None)
        for p in peers:
            with contextlib.suppress(LinkError):  # it died meanwhile; its link says so by itself
                p.end_admit()

    def _admit_body(self, worker: int, version: int) -> dict[str, Any]:
        return {"version": version}

    def _contributions(self, pushes: Sequence[WeightedPush]) -> tuple[list[Contribution], Any]:
        contributions, settings = [], None
        grouped = self.mode.grouped  # there a root pushes what others computed, too
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
                    not grouped and isinstance(pushed.peer, ShmPeer),
                    pushed.groups,
                )
            )
        return contributions, settings

    def _forget(self, worker: int, incarnation: int) -> None:
        """The lead says a worker is gone: nothing of it will be in the order any more."""
        peer = self._peers.get(worker)
        for push in [p for p in self._pushed if (p.worker, p.incarnation) == (worker, incarnation)]:
            if not self._pushed[push].held:
                self._pushed.pop(push).peer.close()
        for load in [p for p in self._loads if (p.worker, p.incarnation) == (worker, incarnation)]:
            del self._loads[load]
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
        saving = self._saving = [0, sum(each.nbytes for each in tensors.values())]

        def before_write(nbytes: int) -> None:
            saving[0] += nbytes
            if fault is not None:
                fault()

        def write() -> None:
            _give_way()
            lane.enter(Phase.CHECKPOINT)
            try:
                info = write_part(directory, name, tensors, before_write=before_write)
                body = {"name": info.name, "sha256": info.sha256, "bytes": info.bytes}
            except CheckpointError as error:
                body = {"failed": str(error)}
            lane.enter(Phase.IDLE)
            self._hub.post(lambda: self._part_done({**body, "directory": str(directory)}))

        threading.Thread(target=write, name="checkpoint part", daemon=True).start()

    def _part_done(self, body: dict[str, Any]) -> None:
        self._saving = None
        self._part_written(body)

    def _part_written(self, body: dict[str, Any]) -> None:
        if self._lead_link is not None:
            with contextlib.suppress(LinkError):
                self._lead_link.send(Kind.DONE, body)


def _give_way() -> None:
    """Let the other threads of this host go first: whoever trains does not notice this one much."""
    if sys.platform == "linux":  # where threads have priorities of their own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)
