"""Executor: the run's one order of steps, executed on a shard."""

import collections
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor

from paceline.comm import Region
from paceline.comm.device_time import time_marks_of
from paceline.comm.faults import Faults
from paceline.comm.fence import Fence
from paceline.comm.protection import protection
from paceline.comm.worker_messages import AdmitReply
from paceline.core.modes import PushId, parse_mode, parse_schedule
from paceline.core.server.departures import Departures
from paceline.core.server.slice_transfers import SliceTransfers
from paceline.core.server.step_needs import can_execute
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
    FrameError,
    LinkError,
)
from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import Recorder
from paceline.params import Layout, OptimizerSpec, Placement, Slice, StateBook, flat_view
from paceline.ps.carriers import Carrier
from paceline.ps.config import ServerConfig
from paceline.ps.device_parameters import DeviceParameters, on_device
from paceline.ps.device_reader import DeviceReader
from paceline.ps.device_shard import DeviceShard
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
from paceline.ps.peers import WorkerPeer, has_ended
from paceline.ps.shard import Contribution, Copy, Gradients, Shard

__all__ = ["Executor", "Pushed"]

log = logging.getLogger("paceline.server")

_WITH_ADMITS = (AdmitStep, ApplyStep, CommitStep, AddStep, AssignStep, HoldStep)
"""Steps that the admits behind them are executed with: parameters are copied while they are in the cache."""


@dataclass(slots=True)
class Pushed:
    """A push whose gradient is here."""

    peer: WorkerPeer
    gradients: Gradients
    void: bool
    missing: frozenset[int]
    groups: Collection[int] | None = None
    """Parameter groups of the optimizer that it is for, where there are several; None: all."""
    fence: Fence | None = None
    """When its gradient is in memory; None: it is."""
    held: bool = False
    """Its gradient was copied: the worker has gone on."""


MakeReply = Callable[[int, int], AdmitReply]
"""Makes the reply that admits a worker, from its rank and the version."""


class Executor:
    """Executes steps of the order, as far as the pushes that they need are here. The main thread only.

    Args:
        faults: on purpose, for tests.
        spans: records what the main thread does.
    """

    def __init__(self, config: ServerConfig, faults: Faults, spans: Recorder) -> None:
        self.config = config
        self.name = f"server:{config.rank}"
        self.mode = parse_mode(config.mode)
        self.layout: Layout | None = None
        self.shard: Shard | None = None
        self.spec: OptimizerSpec | None = None
        self.region: Region | None = None
        self.on_device: DeviceParameters | None = None
        """The parameters' memory, if that is a device's."""
        self.base: Tensor | None = None
        self.placement = Placement(0, frozenset(), ())
        self.peers: dict[int, WorkerPeer] = {}
        """The workers that are attached."""
        self.queue: collections.deque[Step] = collections.deque()
        """Steps of the order that are still to be executed."""
        self.pushed: dict[PushId, Pushed] = {}
        self.loads: dict[PushId, tuple[StateBook, Collection[int] | None]] = {}
        """Optimizer states that workers gave, until the order says when to take them over; and the parameter
        groups that each is for (None: all)."""
        self.reduced: Reduced | None = None
        """The first half of an update whose second has not come."""
        self.lost = 0
        """Pushes of the order that died with their worker before they arrived here."""
        self.updates = 0
        self.update_s = 0.0
        self._faults = faults
        self._spans = spans
        self._reduce_settings: Any = None
        self.departures = Departures()
        """Processes of workers that are gone here, and still in the order."""
        self._transfers: SliceTransfers[dict[str, Tensor]] = SliceTransfers()
        self._outcomes: list[Outcome] = []
        """Of the present step."""

    # --- the model --------------------------------------------------------------------------------

    @property
    def present_shard(self) -> Shard:
        """The shard, of a run that has a model."""
        assert self.shard is not None
        return self.shard

    @property
    def optimizers(self) -> int:
        """How many optimizers the run has."""
        return 1 if self.spec is None else len(self.spec.groups_of)

    def adopt(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        region: Region | None,
        placement: Placement,
        read_weights: Callable[[Sequence[Tensor]], None],
        device: str | None = None,
    ) -> None:
        """Take this layout and optimizer.

        Args:
            region: the parameters' memory, shared on this host.
            read_weights: fills these slices, if the memory has them not.
            device: the id of the device that the workers' models are on; the parameters go there, too, if
                they can. None: they are in host memory.

        Raises:
            PlanError: the job wants the parameters on a device, and they cannot be there.
        """
        self.layout, self.spec, self.region, self.placement = layout, spec, region, placement
        if region is not None:
            self.base = torch.frombuffer(region.buffer, dtype=torch.uint8)
        else:
            self.base = torch.zeros(layout.nbytes, dtype=torch.uint8)
        if device is not None:
            modes = parse_schedule(self.mode, self.config.schedule).modes
            self.on_device = on_device(device, self.config, modes, layout, spec, self.base)
        if self.on_device is not None:
            self.base, self.region = self.on_device.base, None
        mine = [layout.slices[i] for i in placement.held(self.config.rank)]
        read_weights([flat_view(self.base, piece) for piece in mine])
        self.shard = self._make_shard(layout, spec, mine, self.base, placement)
        log.info(
            "adopted %s tensors in %s slices, %.1f MB mine, fingerprint %s",
            len(layout.tensors),
            len(layout.slices),
            self.shard.nbytes / 1e6,
            layout.fingerprint,
        )

    def forget_model(self) -> None:
        """Before the first step the workers have prepared more: another model takes this one's place."""
        if self.shard is not None:
            self.shard.close()
        if self.on_device is not None:
            self.on_device.close()
        self.shard = self.layout = self.spec = self.region = self.base = self.on_device = None
        self.pushed.clear()
        self.queue.clear()

    def _make_shard(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        slices: Sequence[Slice],
        base: Tensor,
        placement: Placement,
    ) -> Shard:
        if self.on_device is not None:
            marks = time_marks_of(base.device, self.config.device)
            if marks is not None:
                self._spans.follow_device(marks)
            reader = DeviceReader(self.on_device.device, self._release_dead)
            allowed, damping = self.config.optimizers, self.mode.damping
            return DeviceShard(layout, spec, slices, base, reader, allowed, damping)
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

    def _release_dead(self) -> None:
        """The device may wait for a worker that has died: let it go on. Its link's end is seen later."""
        for peer in self.peers.values():
            if peer.pid and has_ended(peer.pid):
                peer.carrier.release()

    # --- the order --------------------------------------------------------------------------------

    def execute_next(self, make_reply: MakeReply) -> Sequence[Outcome] | None:
        """Execute the next step of the queue, and the admits behind it, if all that it needs is here.

        Returns:
            What is to be done about it before the next step; None if nothing could be executed.
        """
        if not self.queue:
            self._hear_refusals()
            return self._take_outcomes() or None
        step = self.queue[0]
        if not can_execute(
            step,
            pushes=self.pushed,
            loads=self.loads,
            workers=self.peers,
            has_slices=self._has_slices_for,
        ):
            return self._take_outcomes() or None
        self.queue.popleft()
        admits = [step] if isinstance(step, AdmitStep) else []
        if isinstance(step, _WITH_ADMITS):
            while self.queue and isinstance(admit := self.queue[0], AdmitStep):
                admits.append(admit)
                self.queue.popleft()
        self._execute(step, admits, make_reply)
        return self._take_outcomes()

    def _take_outcomes(self) -> Sequence[Outcome]:
        if not self._outcomes:
            return ()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _execute(self, step: Step, admits: list[AdmitStep], body: MakeReply) -> None:
        """One step, and the admits that follow it: those are served while slices are in the cache."""
        assert self.shard is not None
        match step:
            case DropStep(push):
                self.pushed.pop(push, None)
            case LeaveStep(worker, incarnation):
                self.departures.left(worker, incarnation)
                self._forget(worker, incarnation)
            case ModeStep(text):
                self._change_mode(text)
            case PlaceStep(placement):
                self._place(placement)
            case CheckpointStep(directory=directory):
                self._take_snapshot(Path(directory))
            case ReduceStep(pushes, number):
                contributions, self._reduce_settings = self._contributions(pushes)
                self.reduced = Reduced(number, self.shard.reduce(contributions))
                self._outcomes.append(self.reduced)
            case HoldStep(push):
                self._hold(push)
                self._admit(admits, body, self._copy_only)
            case AddStep(pushes):
                contributions, _ = self._contributions(pushes)
                self.shard.add(contributions)
                if len(contributions) < len(pushes):
                    self.shard.spoil()
                self._admit(admits, body, self._copy_only)
            case AskStep(ops):
                self._outcomes.append(VectorAnswers(self.shard.run(ops)))
            case VectorsStep(ops, kept):
                self._update(admits, body, lambda copies, done: self.present_shard.move(ops, kept))
            case ApplyStep(pushes):
                contributions, settings = self._contributions(pushes)
                self._update(admits, body, self._work_of(contributions, settings))
            case CommitStep(scale):
                settings, self.reduced = self._reduce_settings, None
                self._update(
                    admits,
                    body,
                    lambda copies, done: self.present_shard.commit(scale, settings, copies, done),
                )
            case AssignStep(push):
                pushed = self.pushed.pop(push, None)
                if pushed is not None:
                    self._await_gradients(pushed)
                    self.shard.assign(pushed.peer.carrier.gradients.flat)
                self._admit(admits, body, self._copy_only)
            case LoadStep(push):
                if (given := self.loads.pop(push, None)) is not None:
                    self.shard.restore(given[0], parameters=False, groups=given[1])
            case AdmitStep():
                self._admit(admits, body, self._copy_only)
            case _:
                assert_never(step)

    def _change_mode(self, text: str) -> None:
        """Go on in another mode. Who is told of it by its next reply then uses the memory that fits."""
        self.mode = parse_mode(text)
        self.present_shard.damping = self.mode.damping
        for peer in self.peers.values():
            self.keep_backup(peer)  # first: its copy is what it computes on
            peer.carrier.read_in_place(self.mode.in_place)
        self._outcomes.append(ModeChanged())
        log.info("mode %s", text)

    def keep_backup(self, peer: WorkerPeer) -> None:
        """Delay compensation and the gap need to know what a worker read."""
        if self.mode.damping not in ("dc", "gap"):
            peer.backup = None
        elif peer.backup is None:
            assert self.layout is not None and self.base is not None
            peer.backup = self.present_shard.flats(torch.empty_like(self.base))
            present = self.present_shard.parameters
            for i, mine in enumerate(peer.backup):
                copied = None if peer.carrier.copy is None else peer.carrier.copy[i]
                mine.copy_(present[i] if copied is None else copied)

    def _place(self, placement: Placement) -> None:
        """From here on in the order, slices are held and owned as this says."""
        rank = self.config.rank
        before, self.placement = self.placement, placement
        mine = placement.owned(rank)
        if more := set(mine) - set(before.owned(rank)):
            log.info("%s answers for %s more slices from here on", self.name, len(more))
        if before.held(rank) == placement.held(rank):
            self.present_shard.own(mine)
        else:
            self._hold_others(placement)
        for peer in self.peers.values():
            peer.carrier.refit(self.present_shard)
        for pushed in self.pushed.values():
            if not pushed.held:
                pushed.gradients = pushed.peer.carrier.gradients
        self._outcomes.append(Placed(placement))

    def _hold_others(self, placement: Placement) -> None:
        """The slices that this server has are other ones than before."""
        assert self.layout is not None and self.spec is not None and self.base is not None
        old, rank = self.present_shard, self.config.rank
        arrived = self._transfers.take(placement.number)
        book = StateBook([old.snapshot(indices=placement.held(rank)), *arrived])
        slices = [self.layout.slices[i] for i in placement.held(rank)]
        self.shard = self._make_shard(self.layout, self.spec, slices, self.base, placement)
        self.shard.restore(book)
        old.close()

    def _has_slices_for(self, placement: Placement) -> bool:
        """Whether all that we hold from this placement on is here. What others lack, they are sent."""
        transfers, rank = self._transfers, self.config.rank
        for server, due in transfers.due(self.placement, placement, rank):
            tensors = self.present_shard.snapshot(indices=due)
            self._outcomes.append(SlicesDue(server, placement.number, tensors))
        return transfers.complete(self.placement, placement, rank)

    def receive_slices(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Slices that another server sent, for the placement of this number."""
        self._transfers.receive(number, tensors)

    def groups_of(self, optimizer: int) -> Collection[int] | None:
        """The parameter groups of an optimizer; None: of all that there are."""
        if self.optimizers == 1:
            return None
        assert self.spec is not None
        if not 0 <= optimizer < self.optimizers:
            raise FrameError(f"a message about optimizer {optimizer} of {self.optimizers}")
        return self.spec.groups_of[optimizer]

    def _copy_only(self, copies: Sequence[Copy], done: Callable[[int], None] | None) -> None:
        self.present_shard.update((), None, copies, done)

    def _work_of(self, contributions: list[Contribution], settings: Any) -> Callable[..., None]:
        """What an update with these contributions does to the shard."""
        match self.mode.payload:
            case "none":
                return lambda copies, done: None
            case "elastic":
                if not contributions:
                    return lambda copies, done: self.present_shard.mix(-1, None, 0.0, copies, done)
                only = contributions[0]  # its scale is the elastic alpha, which the order says
                return lambda copies, done: self.present_shard.mix(
                    only.worker, only.gradients, only.scale, copies, done, only.groups
                )
            case _:
                return lambda copies, done: self.present_shard.update(contributions, settings, copies, done)

    def _hold(self, push: PushId) -> None:
        """Keep a gradient for an update to come: its worker goes on and uses its memory again."""
        pushed = self.pushed.get(push)
        if pushed is None or pushed.void:  # void ones keep their place in the order, and are not applied
            self.pushed.pop(push, None)
            return
        assert self.layout is not None and self.base is not None
        self._await_gradients(pushed)
        kept = Gradients(torch.empty_like(self.base), self.layout, self.present_shard.slices)
        for piece, mine, theirs in zip(
            self.present_shard.slices, kept.flat, pushed.gradients.flat, strict=True
        ):
            if pushed.groups is None or piece.group in pushed.groups:
                mine.copy_(theirs)
        pushed.gradients = kept
        pushed.held = True

    def _await_gradients(self, pushed: Pushed) -> None:
        """Let the work that follows wait until a push is in memory. What was held was copied in order."""
        if pushed.fence is not None and not pushed.held:
            pushed.fence.wait()

    def _update(self, admits: list[AdmitStep], body: MakeReply, work: Callable[..., None]) -> None:
        started = time.perf_counter()
        if self._faults.all:
            for damage in self._faults.at(self.updates + 1):
                for admit in admits[self.updates % len(admits) :][:1] if admits else ():
                    if admit.worker in self.peers:
                        self.peers[admit.worker].connection.damage_next(damage)
        self._spans.begin_step(self.updates)
        protection.begin_step(self.updates)
        self._spans.main.enter(Phase.UPDATE)
        self._admit(admits, body, work)
        self._spans.main.enter(Phase.IDLE)
        self.updates += 1
        self.update_s += time.perf_counter() - started
        self._hear_refusals()

    def _hear_refusals(self) -> None:
        """What was refused for NaN or Inf since the last time."""
        for worker, slices in self.shard.take_refusals().items() if self.shard is not None else ():
            log.warning("worker:%s pushed NaN or Inf: %s slices of it refused", worker, slices)
            self._outcomes.append(PushSpoiled(worker))

    @property
    def awaits_verdicts(self) -> bool:
        """Whether a device has yet to say whether what was pushed is finite."""
        return isinstance(self.shard, DeviceShard) and self.shard.awaits_verdicts

    def _admit(self, admits: list[AdmitStep], make_reply: MakeReply, work: Callable[..., None]) -> None:
        """Do some work on the shard that ends with fresh parameters for these workers."""
        answered: list[Carrier] = []
        streaming: list[Carrier] = []
        copies: list[Copy] = []
        for worker, version, keep in admits:
            peer = self.peers.get(worker)
            if peer is None or not self.departures.answers_present(worker):
                continue
            reply = make_reply(worker, version)
            if peer.told != self.placement.number:
                peer.told = self.placement.number
                reply.owned = tuple(self.placement.owned(self.config.rank))
            carrier = peer.carrier
            fetch = keep is None  # the order says it, not the request: that may come later than the order
            copies += carrier.begin_reply(reply, fetch=fetch)
            if fetch and peer.backup is not None:
                copies.append(peer.backup)
            if fetch and carrier.streams:
                streaming.append(carrier)
            answered.append(carrier)

        def done(position: int) -> None:
            for carrier in streaming:
                carrier.slice_ready(position)

        work(copies, done if streaming else None)
        for carrier in answered:
            with contextlib.suppress(LinkError):  # it died meanwhile; its link says so by itself
                carrier.end_reply()

    def _contributions(self, pushes: Sequence[WeightedPush]) -> tuple[list[Contribution], Any]:
        contributions, settings = [], None
        grouped = self.mode.grouped  # there a root pushes what others computed, too
        for worker, incarnation, sequence, weight, scale in pushes:
            pushed = self.pushed.pop(PushId(worker, incarnation, sequence), None)
            if pushed is None:
                self.lost += 1
                log.warning("a push of worker:%s died with it before it reached %s", worker, self.name)
                continue
            self._await_gradients(pushed)
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
                    not grouped and pushed.peer.carrier.checked,
                    pushed.groups,
                )
            )
        return contributions, settings

    def _forget(self, worker: int, incarnation: int) -> None:
        """The lead says a worker is gone: nothing of it will be in the order any more."""
        peer = self.peers.get(worker)
        for push in [p for p in self.pushed if (p.worker, p.incarnation) == (worker, incarnation)]:
            if not self.pushed[push].held:
                self.pushed.pop(push).peer.carrier.close()
        for load in [p for p in self.loads if (p.worker, p.incarnation) == (worker, incarnation)]:
            del self.loads[load]
        if peer is not None and peer.incarnation == incarnation:
            self._outcomes.append(Forgotten(peer))

    def _take_snapshot(self, directory: Path) -> None:
        """Copy the shard now; the copy is written while training goes on."""
        self._spans.main.enter(Phase.CHECKPOINT)
        tensors = self.present_shard.snapshot(vectors=True)
        self._spans.main.enter(Phase.IDLE)
        self._outcomes.append(SnapshotTaken(directory, tensors))
