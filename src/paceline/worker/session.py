"""What prepare() talks to in a worker of a run."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.collective import ENDS, Group, GroupLinks, part_of
from paceline.comm import Connection, Kind, Region
from paceline.comm.faults import OF_FRAMES, Faults
from paceline.comm.protection import protection
from paceline.comm.transfer import Transfer
from paceline.core.modes import ModeSpec, parse_mode
from paceline.exceptions import UsageError
from paceline.observe.ledger import LedgerKeeper
from paceline.observe.phases import Phase
from paceline.observe.spans import NO_SPANS, Recorder
from paceline.observe.values import ValueWriter
from paceline.params import (
    Layout,
    OptimizerSpec,
    StateBook,
    bind,
    not_finite,
    settings_of,
    tensor_views,
    use_fused,
)
from paceline.worker.account import Account, Skipped
from paceline.worker.alone import AloneSession, Session, offer_no_sync, order_seed
from paceline.worker.buffers import BufferSchedule
from paceline.worker.checkpoint_part import (
    OWN_PARTS,
    capture,
    epoch_of,
    extras_of,
    load_extras,
    restore_rng,
    restore_schedulers,
    steps_of,
)
from paceline.worker.collective_calls import Collectives
from paceline.worker.early_end import EarlyEnd
from paceline.worker.epochs import EpochCounter, RemainingEpochs
from paceline.worker.exchange.client import Client
from paceline.worker.exchange.encoders import follow_settings, lay_out, without_momentum
from paceline.worker.exchange.entry import Adopted, Entry, Offer
from paceline.worker.exchange.free_exchange import FreeExchange
from paceline.worker.exchange.grants import Grant
from paceline.worker.exchange.pipeline import PipelinedExchange
from paceline.worker.gate import guard_parameters
from paceline.worker.loader import LeasedLoader, StreamLoader, data_facts, lease_loader
from paceline.worker.optimizer_side import Incomplete, OptimizerSide, incomplete
from paceline.worker.ownership import OwnershipGuard
from paceline.worker.phase_hooks import on_backward, watch_backward, watch_forward
from paceline.worker.prepared import Models, Prepared
from paceline.worker.randomness import part_ways
from paceline.worker.reporter import NormSampling, Reporter
from paceline.worker.run_progress import RunPlace, RunProgress, fraction_done
from paceline.worker.schedules import Schedules
from paceline.worker.script_optimizer import (
    as_loaded,
    has_history,
    make_exchanging,
    pack_state,
    stop_exchanging,
    unpack_state,
)
from paceline.worker.script_state import KEY as SCRIPT
from paceline.worker.steppers import (
    GradientStepper,
    Request,
    StepperMemory,
    follows_rate,
    local_step_of,
    make_stepper,
    runs_here,
    served_optimizer,
)
from paceline.worker.steppers.group_stepper import GroupMemory, GroupStepper
from paceline.worker.traffic import Traffic
from paceline.worker.validation import ValidationLoader

__all__ = [
    "AloneSession",
    "RunSession",
    "Session",
    "current_session",
    "enter_session",
]

log = logging.getLogger("paceline.worker")


class RunSession(Session):
    """A worker of a run."""

    def __init__(
        self,
        *,
        reach_servers: Callable[[], Entry],
        controller: Connection,
        rank: int,
        world_size: int,
        servers: int,
        mode: str,
        seed: int,
        optimizers: Sequence[str],
        transfer: Transfer,
        group: GroupLinks | None = None,
        spans: Recorder = NO_SPANS,
        values: ValueWriter | None = None,
        ledger: LedgerKeeper | None = None,
        faults: Faults = Faults(),  # noqa: B008 - it is a value
        tells_norms: bool = False,
    ) -> None:
        super().__init__()
        self.mode = parse_mode(mode)
        self._spans, self._lane = spans, spans.main
        self._ledger = ledger or LedgerKeeper()
        self._traffic = Traffic(self._ledger, transfer)
        self._faults = faults
        self._tells_norms = tells_norms
        self._norms = NormSampling()
        self._transfer = transfer
        self.rank = rank
        self.world_size = world_size
        self._reach_servers = reach_servers
        self._values = values or ValueWriter()
        self._reporter = Reporter(controller, spans, self._values)
        self._samples = self._together = 0
        """Samples of the run, as this worker was told last; updates of its group since it joined."""
        self._servers = servers
        self._seed = seed
        self._optimizers = tuple(optimizers)
        self._account = Account()
        # Held by whoever talks to the servers: in dogwild that is a thread, too.
        self._link = threading.RLock()
        self._free: FreeExchange | None = None
        # The workers that this one all-reduces with, if the mode has groups.
        self._group_links = group
        self._group: Group | None = None
        self._buffers: BufferSchedule | None = None
        self._owes_save = self._relays_save = False
        self._cut = 0
        self._resume: dict[str, Tensor] = {}
        self._skipping: int | None = None
        self._went_on: tuple[int, dict[str, Tensor]] | None = None
        """From where this worker has gone on after a resume, until its first step."""
        self._replaying = False
        self._epoch = -1
        self._clock = 0
        self._objects: list[Any] = []
        """What prepare() got, in all calls."""
        self._calls = 0
        self._joined = self._begun = False
        self._joined_at: int | None = None
        """The version that the run had when this worker joined it."""
        self._loader: LeasedLoader | StreamLoader | None = None
        self._start = 0
        """The epoch that the run was in when this worker joined it."""
        self._epochs: EpochCounter | None = None
        self._kept_again: dict[str, Tensor] = {}
        """What the script kept, to be put back once more when it is through with finished epochs."""
        self._hooks: list[Any] = []
        self._watched: list[nn.Module] = []
        self._entry: Entry | None = None
        """Where to offer what is prepared."""
        self.client: Client
        self.schedules = Schedules(self)
        self.kept.paces = self.schedules.paces
        self._read_before = 0
        self._left_early = False
        self._done: int | None = None
        """Samples that are through, as a member of a group knows."""
        self._batch_samples = 0
        """Samples of the last step that had any."""

    @property
    def mode_text(self) -> str:
        """See `paceline.mode`."""
        return str(self.mode)

    # --- prepare ----------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Offer the models, join the run, and make the objects work with it.

        Called again before the first batch and step, it leaves, offers what all calls brought, and joins
        again.
        """
        if self._begun:
            raise UsageError(
                "prepare() was called again after the first batch or step. Call prepare() for everything "
                "before the training loop."
            )
        got = Prepared([*self._objects, *objects])
        if self._objects and self.mode.grouped:
            raise UsageError(
                f"prepare() was called twice; in mode {self.mode} prepare everything in one call."
            )
        if len(got.optimizers) > 1 and (reason := self.mode.one_optimizer_reason()):
            raise UsageError(f"prepare() got {len(got.optimizers)} optimizers: {reason}.")
        if self.prepared:
            self._leave_for_more()
        self._objects += objects
        self._calls += 1
        spec, data = self._lay_out(got)
        if self._entry is None:
            self._entry = self._reach_servers()
        offer = Offer(
            layout=self._layout,
            spec=spec,
            data=data,
            state_keys=[*self._models.state()],
            models=len(self._models),
            calls=self._calls,
        )
        adopted = self._entry.offer(offer, self._weights)
        if adopted is not None:
            self._join(got, self._entry, adopted)
        else:  # the run was prepared by more calls than this worker has made
            for side in self._sides:
                make_exchanging(side.optimizer, Incomplete(self._calls))
        self.prepared = True
        loader = None
        self._has_loader = got.loader is not None
        if got.loader is not None and any(o is got.loader for o in objects):
            loader = lease_loader(
                got.loader,
                self,
                seed=self._seed,
                rank=self.rank,
                world_size=self.world_size,
                group_start=self.rank if self._group is None else self._group.root,
                version=self._joined_at or 0,
            )
            self._loader = loader
        return got.give_back(objects, loader)

    def _lay_out(self, got: Prepared) -> tuple[OptimizerSpec, dict[str, Any] | None]:
        """Lay out what is trained, and look at the data."""
        self._models = Models(got.models)
        self.schedules.prepare(got.schedulers, got.optimizers)
        served = [self._served_for(optimizer) for optimizer in got.optimizers]
        spec = OptimizerSpec.of_all(served, self._optimizers)
        spec, layout, parameters = lay_out(
            self._models, got.optimizers, spec, self._transfer, servers=self._servers
        )
        self._layout, self._parameters = layout, parameters
        self._traffic.lay_out(layout)
        self._sides = [
            OptimizerSide(self, k, optimizer, served[k], layout, parameters, spec)
            for k, optimizer in enumerate(got.optimizers)
        ]
        names = [t.name for t in layout.tensors]
        self._guard = OwnershipGuard(self._models, got.optimizers, parameters, names)
        self._trained = {*names} | {alias for alias, _ in layout.aliases}
        data = data_facts(got.loader) if got.loader is not None else None
        self._has_loader = data is not None
        if self.mode.by_epoch or self.mode.batches == "speed":
            _check_has_epochs(self.mode, data)
        return spec, data

    def _join(self, got: Prepared, entry: Entry, adopted: Adopted) -> None:
        """Start from what the run has, and train with it from here on."""
        self.mode = adopted.mode
        extras = {k: v for k, v in adopted.tensors.items() if not k.startswith(OWN_PARTS)}
        load_extras(self._models, extras, self._trained)
        self._start = adopted.epoch
        self._kept_again = {k: v for k, v in adopted.tensors.items() if k.startswith(SCRIPT)}
        self.kept.put_back(self._kept_again)
        # What the script loads until it is in an epoch of its own is older than what the run has.
        self._replaying = adopted.resumed or entry.links.settings.incarnation > 0
        if adopted.resumed:
            self._resume = adopted.tensors
            self._skipping = adopted.epoch
        local_steps = [self._as_update(local_step_of(side.optimizer)) for side in self._sides]
        for side in self._sides:
            if runs_here(
                self.mode
            ):  # while its class is the script's: kernels are tried with one of that class
                use_fused(side.optimizer)
            make_exchanging(side.optimizer, side)
        self._take_memory(entry, adopted, self._layout, self._parameters, local_steps)
        if self._joined_at is None:  # and not when it prepares more
            self._joined_at = self.client.version
            part_ways(self._seed, self.rank, self._joined_at)
        if not adopted.resumed and self.client.version > 0:
            self.schedules.join_late(self.kept.found_paces)
        self._sent_settings: list[Any] = []
        if adopted.resumed:
            self._load_local(adopted.tensors)
            if (steps := steps_of(adopted.tensors)) is not None:
                self._values.begin_at(steps)
            elif epoch_of(adopted.tensors) is None:  # it was not there
                self._values.begin_at(0)
        if (stepper := self._group_stepper) is not None and self.mode.inner is not None:
            stepper.share()
        elif self.rank == 0 and not self._replaying and not runs_here(self.mode):
            for side in self._sides:
                if has_history(side.optimizer):
                    self.load_optimizer_state(side, side.optimizer.local_state())  # type: ignore[attr-defined]
        for model in got.models:
            offer_no_sync(model)
            self._hooks.append(model.register_load_state_dict_post_hook(self._make_load_hook()))
        self._ending = EarlyEnd(self.client, self._group, has_loader=got.loader is not None)
        if self._group is None:  # without one of its members a group goes back to a checkpoint
            self._buffers = BufferSchedule(self._models, self._trained, workers=self.world_size)
        self._joined, self._begun = True, False
        self._ledger.joined()
        if not self._watched:
            on_backward(self._find_zeroed, self._account.backward)
        if self._spans.on:
            for model in got.models:
                if not any(model is watched for watched in self._watched):
                    watch_forward(model, self._lane)
            if not self._watched:
                watch_backward(self._lane)
            self._lane.enter(Phase.OTHER)  # what came before is no part of the training
        self._watched = got.models

    def _require_joined(self) -> None:
        """UsageError if the run was prepared by more calls than this worker has made."""
        if not self._joined:
            raise incomplete(self._calls)

    def _leave_for_more(self) -> None:
        """The script prepares more: leave the run as if it had not been joined."""
        for side in self._sides:
            stop_exchanging(side.optimizer)
        if not self._joined:
            return
        self._joined = False
        if self._free is not None:
            self._free.stop()
            self._free = None
        self.client.settle()
        self.client.bye(comes_back=True)
        self._entry = None
        for side in self._sides:
            if isinstance(side.stepper, GradientStepper):
                side.stepper.gradients.release()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _served_for(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that the servers run for one of the script's."""
        served = served_optimizer(self.mode, optimizer)
        compress = self._transfer.compress
        return without_momentum(compress, self.mode, served) if compress.has_momentum else served

    def _make_load_hook(self) -> Callable[[nn.Module, Any], None]:
        """A plain function: a copy of a model keeps it as it is, where it does no harm."""

        def loaded(module: nn.Module, keys: Any) -> None:
            if any(module is model for model in self._models.each):  # and not a copy of it (an average, say)
                self._guard.check_loaded()
                self.assign()

        return loaded

    @property
    def _generator(self) -> torch.Generator | None:
        """Seeds the DataLoader's processes, if it is not torch's global one."""
        return None if self._loader is None else self._loader.own_generator

    @property
    def _group_stepper(self) -> GroupStepper | None:
        """The stepper in a mode with groups, where a script has one optimizer."""
        stepper = self._sides[0].stepper
        return stepper if isinstance(stepper, GroupStepper) else None

    def _as_update(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def update() -> Any:
            phase = self._lane.enter(Phase.UPDATE)
            try:
                return step()
            finally:
                self._lane.enter(phase)

        return update

    def _weights(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Worker 0's initial weights, as the bytes of the whole space; and the rest of its models."""
        base = torch.zeros(self._layout.nbytes, dtype=torch.uint8)
        with torch.no_grad():
            for p, view in zip(self._parameters, tensor_views(base, self._layout), strict=True):
                view.copy_(p)
        self._check_finite(base, "at prepare()")
        return base, extras_of(self._models, self._trained)

    def _check_finite(self, base: Tensor, when: str) -> None:
        """UsageError if parameters that the servers are to take over hold NaN or Inf."""
        if (name := not_finite(base, self._layout)) is not None:
            raise UsageError(
                f"parameter {name!r} held NaN or Inf {when}, and servers train finite parameters only. If "
                "that is meant (a mask, say), make it a buffer or freeze it."
            )

    def _take_memory(
        self,
        entry: Entry,
        adopted: Adopted,
        layout: Layout,
        parameters: list[nn.Parameter],
        local_steps: Sequence[Callable[[], Any]],
    ) -> None:
        """Join, and let parameters and what is pushed be views of the memory shared with the servers."""
        device = parameters[0].device
        on_host = device.type == "cpu"
        greeting = None if self._group_links is None else {"listens": self._group_links.address}
        self.client = entry.attach(adopted, in_place=on_host, greeting=greeting)
        self._slot, self._fresh = self.client.memory.gradients, self.client.parameters
        self._samples, self._together = int(self.client.news.welcome.get("samples", 0)), 0
        self._done = self.client.news.welcome.get("done")
        if self.mode.needs_memory and not self.client.in_place:
            where = "this worker reaches the servers over TCP" if on_host else f"the model is on {device}"
            raise UsageError(
                f"mode {self.mode} lets all workers write into one memory of their host, and {where}. Keep "
                "the model on the CPU and use link auto or shm, or a mode such as asp."
            )
        slot, base = self._slot, self._fresh
        if not on_host:  # the servers' memory is on the host: keep flat mirrors on the device
            slot = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
            base = self._fresh.to(device)
            _pin(self._slot)
            _pin(self._fresh)
        self.mode = self.client.news.mode
        if self._group_links is not None:
            self._join_group(self._group_links, slot, base, local_steps[0])
            return
        near = base
        if self.mode.local and not self.client.in_place:
            if base is self._fresh and len(self._sides) > 1:
                base = base.clone()  # what an optimizer fetches must not change what another one started from
            near = base.clone()
        self._memory = StepperMemory(slot, base, near)
        bind(parameters, tensor_views(near, layout))
        for side, local_step in zip(self._sides, local_steps, strict=True):
            side.stepper = make_stepper(
                self.mode, side.layout, self._memory, side.parameters, side.optimizer, local_step
            )
            side.version = self.client.version
        self._guard.accept()
        if self.client.pipeline is not None:
            self._hide_exchanges(self.client.pipeline)
        if self.mode.name == "dogwild":
            self.client.links.lane = self._spans.lane("exchange")
            self._free = FreeExchange(self._flush)

    def _join_group(
        self, links: GroupLinks, slot: Tensor, base: Tensor, local_step: Callable[[], Any]
    ) -> None:
        """Let parameters and gradients be views of memory that the group sees, too."""
        layout, device = self._layout, base.device
        if self.mode.inner is not None and self.mode.inner.local:
            # What is pushed and fetched is not the gradient, and not what the model computes with.
            mine = GroupMemory.of(Region.create(2 * layout.nbytes), layout, device)
            mine.near.copy_(base)
        else:
            mine = GroupMemory(self.client.memory.region, slot, self._slot, base, self._fresh)
        self._memory = StepperMemory(slot, base, mine.near)
        bind(self._parameters, tensor_views(mine.near, layout))
        self._group = Group(
            links.ranks,
            links.rank,
            links.meet(self.client.news.welcome.get("group")),
            region=mine.region,
            layout=layout,
            deadline_s=links.deadline_s,
            lane=self._lane,
        )
        self._sides[0].stepper = GroupStepper(
            self._group,
            self,
            self._account,
            mine,
            self.mode,
            layout,
            self._memory,
            self._parameters,
            self._sides[0].optimizer,
            local_step,
        )
        self._guard.accept()

    def _hide_exchanges(self, client: PipelinedExchange) -> None:
        """Let gradients leave, and parameters come, while the script computes."""
        if self._transfer.leaves_early and self.mode.payload == "gradient":
            got = client.watch(self._memory.slot)
            for side in self._sides:
                assert isinstance(side.stepper, GradientStepper)
                side.stepper.gradients.watch(_counted_on(got, side.tensors))
        if client.arrives_late:
            guard_parameters(self._models.modules(), self._parameters, self._layout, client.need)
            if self._memory.base is not self._fresh:
                client.upload_with(self._upload)

    def _upload(self, index: int) -> None:
        piece = self._layout.slices[index]
        fresh = self._fresh[piece.start : piece.stop]
        self._memory.base[piece.start : piece.stop].copy_(fresh, non_blocking=True)

    def _load_local(self, tensors: dict[str, Tensor]) -> None:
        """After a resume: what this worker alone has of the state."""
        if self.client.payloads.encoders is not None:
            dropped = self.client.payloads.encoders.load(
                {k.removeprefix("encoder:"): v for k, v in tensors.items() if k.startswith("encoder:")}
            )
            if dropped is not None:
                log.warning("worker:%s: %s", self.rank, dropped)
        steppers = {k[8:]: v for k, v in tensors.items() if k.startswith("stepper:")}
        inner = {k[6:]: v for k, v in tensors.items() if k.startswith("inner:")}
        for side in self._sides:
            mine = f"{side.index}:" if side.index else ""
            side.stepper.load(
                {
                    k.removeprefix(mine): v
                    for k, v in steppers.items()
                    if k.startswith(mine) and (mine or ":" not in k)
                }
            )
            if inner and runs_here(self.mode):
                state = unpack_state(StateBook([inner]), side.infos(), side.optimizer)
                side.optimizer.load_local_state(state)  # type: ignore[attr-defined]

    # --- the optimizer's side ---------------------------------------------------------------------

    def step(self, side: OptimizerSide) -> None:
        """What optimizer.step() does: a step of the mode, with the exchanges it asks for."""
        self._begun = True
        if self.schedules.is_late:
            self.schedules.catch_up(self._epoch)
        phase = self._lane.enter(Phase.PUSH)
        if len(self._sides) == 1 or self._account.tally()[0] or not self._has_loader:
            self._save_if_asked()  # not between two steps with the same batch
        if not self.mode.local:
            self._guard.check_parameters()
        self._guard.check_frozen()
        self._replaying, self._went_on = False, None
        if self._faults.all:
            self._suffer(side)
        # A step of another optimizer with the same batch weighs as many samples.
        self._batch_samples = self._account.tally()[0] or self._batch_samples
        side.weight += self._batch_samples
        for request in side.stepper.step():
            self._exchange(side, request)
        with self._link:  # the root's pushes cover its group's samples
            self._account.end_step(keep=self._group is None or self._group.is_root)
        if self._free is not None:
            self._free.wake()
        self._clock += 1
        self._values.stepped()
        self._ledger.stepped()
        self._lane.enter(phase)
        if self._reporter.due:
            self._report()
            self._guard.check_pages(self.client.private_pages())
        if self._buffers is not None and self._buffers.due:
            self._send_buffers(self._buffers)
        if self.kept.due:
            self._send_kept()
        self._spans.begin_step(self._clock)
        protection.begin_step(self._clock)
        if self.client.news.leave_due:
            raise SystemExit(0)  # the script ends here; `finish` says goodbye
        self._ending.stepped()

    @property
    def steps(self) -> int:
        """Number of steps that the script has made."""
        return self._clock

    def zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        """The script zeroed an optimizer's gradients."""
        if self._account.accumulating:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if all(p.grad is None for p in self._parameters if id(p) not in own):
                self._account.zeroed()

    def _find_zeroed(self) -> None:
        """A backward pass begins: the script may have zeroed gradients without the optimizer's help."""
        if self._account.accumulating and all(p.grad is None for p in self._parameters):
            self._account.zeroed()

    def _suffer(self, side: OptimizerSide) -> None:
        """Faults on purpose, at this step."""
        for kind in self._faults.at(self._clock + 1):
            if kind in OF_FRAMES:
                self.client.links.damage_next(kind, self._clock)
                continue
            for p in side.parameters:
                if p.grad is not None:
                    p.grad = p.grad * (float("nan") if kind == "nan" else 1e4)

    def _exchange(self, side: OptimizerSide, request: Request) -> None:
        """Answer a stepper's request."""
        body: dict[str, Any] = {}
        if request.push:
            body = self._push_body(side, request)
            if request.carries == "slot":
                self._to_host(side)
        kind = Kind.PUSH if request.push else Kind.PULL
        self.client.exchange(kind, fetch=request.fetch, **body)
        self._traffic.exchanged(self.client, self.mode, request, side.layout)
        self._follow_mode()
        if request.fetch:
            side.version = self.client.version
            if not self.client.arrives_late:
                self._from_host(side)

    def _follow_mode(self) -> None:
        """The run was switched: the parameters may lie elsewhere now. Only modes of one kind are switched."""
        if self.client.news.mode is self.mode:
            return
        self.mode = self.client.news.mode
        fresh = self.client.parameters
        if fresh.data_ptr() == self._fresh.data_ptr():
            return
        if self._memory.base is self._fresh:
            self._memory = StepperMemory(self._memory.slot, fresh, fresh)
            bind(self._parameters, tensor_views(fresh, self._layout))
            self.client.forget_private_writes()
            for side in self._sides:
                side.stepper.memory = self._memory
            self._guard.accept()
        else:
            _pin(fresh)
        self._fresh = fresh

    def _flush(self) -> None:
        """Push what no push has covered."""
        with self._link:
            for side in self._sides:
                for request in side.stepper.flush():
                    self._exchange(side, replace(request, covers_step=False))  # no step is being made

    def _push_body(self, side: OptimizerSide, request: Request) -> dict[str, Any]:
        leases, samples = self._account.cover(this_step=request.covers_step)
        body: dict[str, Any] = {}
        if samples:
            body["samples"] = samples
        if leases:
            body["leases"] = leases
        if len(self._sides) > 1:
            body |= self._facts_of(side, samples)
        if self._settings_changed():
            body["settings"] = _without_kernel_choice(
                [group for each in self._sides for group in settings_of(each.served)]
            )
        if request.missing:
            body["missing"] = [side.tensors[i] for i in request.missing]
        if not request.finite:
            body["void"] = True
        if request.carries != "slot":
            body["carries"] = request.carries
        elif request.finite and (self._tells_norms or self._norms.due):
            body["norm"] = self._norms.measured(side.stepper.slot_norm)
        if refused := self._account.take_refused():
            body["refused"] = refused
        if logged := self._account.take_logged():
            body["logged"] = logged
        if request.covers_step:  # else it may be another thread's, and the account is this one's
            body |= _as_told(self._account.take_skipped())
        return body

    def _facts_of(self, side: OptimizerSide, samples: int) -> dict[str, Any]:
        """What a push says about its optimizer, where there are several."""
        facts: dict[str, Any] = {"optimizer": side.index} if side.index else {}
        if side.weight != samples:
            facts["weight"] = side.weight
        side.weight = 0
        # Local steps began from what this optimizer fetched; another one may have fetched since.
        if self.mode.local and self.mode.spare is None:
            facts["read_version"] = side.version
        return facts

    def _settings_changed(self) -> bool:
        """Whether a setting differs from what was sent last. Every step asks, so it must be cheap."""
        if self.client.payloads.encoders is not None and self.client.payloads.encoders.spec.has_momentum:
            self.client.payloads.encoders.use_momentum(
                [group for side in self._sides for group in side.optimizer.param_groups]
            )
            for side in self._sides:
                follow_settings(side.served, side.optimizer)
        for side in self._sides:
            if follows_rate(self.mode, side.optimizer):
                pairs = zip(side.served.param_groups, side.optimizer.param_groups, strict=True)
                for outer, group in pairs:
                    outer["lr"] = group["lr"]
        values = [
            [v for k, v in g.items() if k != "params"]
            for side in self._sides
            for g in side.served.param_groups
        ]
        if any(isinstance(v, Tensor) for group in values for v in group):
            values = [list(g.values()) for side in self._sides for g in settings_of(side.served)]
        if values == self._sent_settings:
            return False
        self._sent_settings = values
        return True

    def _to_host(self, side: OptimizerSide | None = None) -> None:
        """What is pushed, of one optimizer or of all."""
        if self._memory.slot is not self._slot:
            self._copy_slices(self._slot, self._memory.slot, side)

    def _from_host(self, side: OptimizerSide | None = None) -> None:
        """What was fetched; where workers step by themselves, for one optimizer or for all."""
        if self._memory.base is not self._fresh:
            phase = self._lane.enter(Phase.PULL)
            self._copy_slices(self._memory.base, self._fresh, side if self.mode.local else None)
            self._lane.enter(phase)

    def _copy_slices(self, to: Tensor, of: Tensor, side: OptimizerSide | None) -> None:
        if side is None or len(self._sides) == 1:
            to.copy_(of)
            return
        for piece in side.layout.slices:
            to[piece.start : piece.stop].copy_(of[piece.start : piece.stop])

    def assign(self) -> None:
        """Make the servers take over the model's present parameters."""
        if not self._joined:
            return  # the run's are newer, and come when it joins
        if self.client.arrives_late:
            self.client.settle()
        if self._group is not None and not self._replaying:
            self._group.meet("assigns its model's parameters")
            self._assign()
            assert self._group_stepper is not None
            self._group_stepper.share()
        else:
            self._assign()

    def _assign(self) -> None:
        with self._link:
            self._assign_here()

    def _assign_here(self) -> None:
        if self._group is not None and not (self._group.is_root or self._replaying):
            pass  # the root's parameters count, and come with the next share
        elif self._replaying:
            self.client.exchange(Kind.PULL)
            self.client.settle()
        else:
            with torch.no_grad():
                views = tensor_views(self._memory.slot, self._layout)
                for p, view in zip(self._parameters, views, strict=True):
                    view.copy_(p)
            self._check_finite(self._memory.slot, "when it was assigned or loaded")
            self._to_host()
            self.client.exchange(Kind.ASSIGN)
        self.client.forget_private_writes()
        self._from_host()
        bind(self._parameters, tensor_views(self._memory.near, self._layout))
        for side in self._sides:
            side.version = self.client.version
            side.stepper.overwritten()
        self._guard.accept()

    @contextlib.contextmanager
    def run_parameters(self) -> Iterator[None]:
        """Within, the model has the run's parameters, not the worker's own."""
        self._require_joined()
        if self._memory.near is self._memory.base:
            if not (self.client.arrives_late or self.mode.serverless):  # there they are here, and only here
                self.client.settle()
                self._from_host()
            yield
            return
        with self._link:
            # The next push is measured from what was fetched for training: that stays as it is.
            fetched, version = self._memory.base.clone(), self.client.version
            self.client.exchange(Kind.PULL)
            self._follow_mode()
            self.client.settle()
            self._from_host()
            shown = self._memory.base.clone()
            self._memory.base.copy_(fetched)
            self.client.news.version = version
        bind(self._parameters, tensor_views(shown, self._layout))
        try:
            yield
        finally:
            bind(self._parameters, tensor_views(self._memory.near, self._layout))

    def optimizer_state(self, side: OptimizerSide) -> dict[str, Any]:
        """The optimizer's state_dict, with the state from where the optimizer runs."""
        if runs_here(self.mode):
            return side.optimizer.local_state()  # type: ignore[attr-defined, no-any-return]
        book = StateBook(self.client.optimizer_state())
        return unpack_state(book, side.infos(), side.optimizer)

    def load_optimizer_state(self, side: OptimizerSide, state: dict[str, Any]) -> None:
        """Take over an optimizer state_dict, where the optimizer runs."""
        self._begun = True
        if self._replaying:
            return
        if self._group is not None and self.mode.serverless:
            self._group.meet("loads an optimizer state")
        if runs_here(self.mode):
            side.optimizer.load_local_state(state)  # type: ignore[attr-defined]
            return
        infos = side.infos()
        if sum(len(g["params"]) for g in state["param_groups"]) != len(infos):
            raise UsageError(
                f"the optimizer state has {sum(len(g['params']) for g in state['param_groups'])} parameters, "
                f"this optimizer has {len(infos)}."
            )
        if self.mode.by_epoch:  # what torch's LBFGS remembers does not fit: settings only
            state = {**state, "state": {}}
        if type(side.optimizer).__module__.startswith("torch.optim."):
            state = as_loaded(state, infos, fused=side.fused)
        self.client.load_optimizer_state(pack_state(state, infos), side.index)
        for group, saved in zip(side.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})
        self._sent_settings = []

    # --- the loader's side ------------------------------------------------------------------------

    def take(
        self, epoch: int, limit: int, *, wait: bool, give_back: Sequence[int], order: Sequence[str] = ()
    ) -> Grant:
        """Leases from the lead server."""
        self._require_joined()
        self._begun = True
        self._ledger.draws()
        self._ending.enter(epoch)
        self.back()  # from here on it is the loader's time
        if wait and self.mode.local:
            # Nothing waits for a push of the next epoch: a worker that dies would take its samples with it,
            # and a round does not wait for a worker that rests.
            self._flush()
        if self.mode.by_epoch:
            give_back = [*give_back, *self._without_step(epoch, wait=wait)]
        version = self.client.version
        # The end of its epoch: batches that got no step yet (accumulation) must not hold it up.
        with self._link:
            more = _as_told(self._account.take_skipped())
            if order:
                more["order"] = [*order]
            carry = self._account.all_leases() if wait else ()
            grant = self.client.take(epoch, limit, wait=wait, give_back=give_back, carry=carry, more=more)
        self._follow_mode()
        if self.client.version != version:
            self._traffic.fetched(self.mode)
            self._from_host()
            for side in self._sides if self.mode.local else ():
                side.version = self.client.version
                side.stepper.caught_up()
        if grant.save or self.client.save_due():
            self._relays_save = True
            self._save()
        if self.client.news.leave_due and not self._account.accumulating:
            raise SystemExit(0)
        if grant.over and not grant.leases:
            self._ledger.drew_nothing()
            self._lane.enter(Phase.OTHER)  # the script's loop ends here
        return grant if self._group is None else self._my_part(grant, self._group)

    def _without_step(self, epoch: int, *, wait: bool) -> list[int]:
        """Sandblaster: leases of a loop that was left early, whose last batch got no step."""
        if epoch > self._epoch:
            return self._account.drop_open()
        if wait and (leases := self._account.open_leases()):
            raise UsageError(
                f"worker:{self.rank} read {len(leases)} batches at the end of epoch {epoch + 1} and "
                f"made no optimizer.step() for them. In mode {self.mode} a step adds a batch to the gradient "
                "of the whole data set, and that needs every batch: step after each one. Accumulating "
                "several gains nothing here."
            )
        return []

    def _my_part(self, grant: Grant, group: Group) -> Grant:
        """Of every row that the group was granted."""
        leases = []
        for lease, ranges in grant.leases:
            part = part_of(ranges, group.size, group.place)
            if not part.counts:
                self._account.borrow(lease)
            leases.append((lease, part.ranges))
        return replace(grant, leases=leases)

    def used(self, lease: int | None, samples: int, *, counts: bool = True) -> None:
        """The script got a batch."""
        self._lane.enter(Phase.OTHER)
        self._ledger.got_batch()
        self._account.used(lease, samples, counts=counts)
        self.schedules.used()

    def entering(self, epoch: int) -> None:
        """After a resume from between two epochs: all is put back before the epoch is begun."""
        self._account.begin_iteration()
        self._read_before = self.schedules.read
        if epoch_of(self._resume) != epoch:
            self._go_on(epoch)

    def entered(self, epoch: int) -> None:
        """After a resume: from this batch on everything is as it was at the checkpoint."""
        self._go_on(epoch)
        if self._kept_again and epoch >= self._start:
            self.kept.put_back(self._kept_again)
            self._kept_again = {}
        if self.kept.changed:  # usually by what the script found at the end of the epoch before
            self._send_kept()
        self._epoch = epoch

    def ended(self, epoch: int) -> None:
        """The script has read its last batch of this epoch."""
        self._account.read_all()
        self.schedules.in_loop = False
        if self._group_stepper is not None:
            self._group_stepper.end_epoch(epoch)

    def left(self, epoch: int, *, peek: bool) -> list[int]:
        """The script stopped reading before the epoch's end."""
        self.schedules.in_loop = False
        if not peek:
            self._left_early = True
            return self._account.drop_untrained()
        self.schedules.read = self._read_before
        self._account.drop_iteration()
        self._ledger.peeked()
        self._epoch = epoch - 1
        if self._went_on is not None:  # what it drew at random meanwhile must not count
            self._skipping, self._resume = self._went_on
        return []

    def _go_on(self, epoch: int) -> None:
        if self._skipping is None or epoch < self._skipping:
            return
        self._went_on = (self._skipping, self._resume)
        self._skipping = None
        restore_schedulers(self._resume, self.schedules.each(), [side.optimizer for side in self._sides])
        self.schedules.put_back(self.kept.found_paces)
        restore_rng(self._resume, self._generator)
        self._resume = {}

    def back(self) -> None:
        """The script is between two batches."""
        self._lane.enter(Phase.LOAD)
        self._save_if_asked()

    def ends_early(self) -> bool:
        """Whether the loop ends here because the run ends early."""
        self._require_joined()
        if self._ending.told:
            self._lane.enter(Phase.OTHER)
        return self._ending.told

    def should_stop(self, condition: bool, who: str) -> bool:
        """Whether the run ends early, with this worker's vote: see `paceline.should_stop`.

        A script that was started again has no say until it has made a step: in epochs that it skips it
        would judge by what it did not train.
        """
        if not self.prepared:
            raise UsageError("should_stop() was called before prepare(): call paceline.prepare(…) first.")
        self._require_joined()
        self._ending.asks()
        if self._replaying or self._ending.told:
            return self._ending.told
        with self._link:
            stop = self._ending.vote(who, condition)
        self._follow_mode()
        return stop

    def epochs(self, count: int) -> RemainingEpochs:
        """See `paceline.epochs`."""
        if not self.prepared:
            raise UsageError("epochs() was called before prepare(): call paceline.prepare(…) first.")
        self._require_joined()
        if self._epochs is None:
            self._epochs = EpochCounter(self._start, self._loader, self.kept, ended=lambda: self._ending.told)
        self._kept_again = {}  # the script leaves out finished epochs, so they change nothing
        return self._epochs.loop(count)

    def prepare_validation(self, loader: Any, place: str) -> ValidationLoader:
        """See `paceline.prepare_validation`."""

        def find_place() -> tuple[int, int]:
            # A worker that catches up with the run may be told of readers before it came.
            readers = sorted({*self.gather(place, "null"), self.rank})
            return readers.index(self.rank), len(readers)

        planned = self.rank % self.world_size, self.world_size
        return ValidationLoader(loader, seed=self._seed, planned=planned, find_place=find_place)

    def gather(self, place: str, text: str) -> dict[int, str]:
        """The values of all workers that call at this place of the script, by rank."""
        if not self.prepared:
            raise UsageError(f"paceline.{place} came before prepare(): call paceline.prepare(…) first.")
        self._require_joined()
        with self._link:
            found = Collectives(self.client, self._group, self.rank).gather(place, text)
        self._follow_mode()
        return found

    def _save_if_asked(self) -> None:
        """A worker's part of a checkpoint is due between two batches and not in a step: what it does after
        that (a scheduler's step, say) belongs to it."""
        if self._joined and (self.client.save_due() or self._owes_save):
            self._save()

    # --- the schedulers' side ---------------------------------------------------------------------

    def place(self) -> RunPlace | None:
        """How far the run is in its data; None if nobody counts it (a stream, no loader)."""
        if not self._joined or not isinstance(self._loader, LeasedLoader):
            return None
        if (done := self.done()) is None:
            return None
        whole_batches = self._left_early or (self.mode.by_round and self._loader.drop_last)
        whole = self._loader.in_parts if whole_batches else self._loader.positions
        return RunPlace(done=done, whole=whole, batches=len(self._loader))

    def has_others(self) -> bool:
        """Whether there are other workers."""
        return self.world_size > 1 or (self._joined and "others" in self.client.news.last_admit)

    def follows(self) -> bool:
        """Whether the workers' steps are not the run's."""
        return not self.mode.by_round and self.has_others()

    def ahead(self) -> int | None:
        """Where workers count: how many steps a count may be ahead of what the run has told, None: any.

        A hybrid's group goes back to a checkpoint when a member dies, and hears of the run now and then only.
        """
        if not self.has_others() or (self.mode.grouped and not self.mode.serverless):
            return None
        return self.mode.push_every + self._transfer.prefetch + 1

    def skips(self, scheduler: Any) -> bool:
        """Whether the script is in an epoch that the run has finished, and the scheduler will be put back."""
        if self._skipping is None:
            return False
        at = next((k for k, each in enumerate(self.schedules.each()) if each is scheduler), None)
        return f"user:scheduler:{at}" in self._resume

    def habits_known(self) -> None:
        """Workers that join later should hear how this script steps its schedulers."""
        self.kept.mark()

    def run_progress(self) -> RunProgress:
        """See `paceline.progress`."""
        if not self._joined:
            return super().run_progress()
        updates, samples = self._reached_by_now()
        planned = None if self._epochs is None else self._epochs.planned
        return RunProgress(
            updates=max(updates, int(self.client.news.last_admit.get("version", 0))),
            samples=samples,
            epoch=max(self._epoch, self._start),
            fraction=fraction_done(self.place(), planned),
        )

    # --- the group's side (GroupRun) ---------------------------------------------------------------

    def cut_next(self) -> int:
        """The version of a checkpoint that this step ends with, 0 if there is none."""
        return self.client.version + 1 if self.client.news.cut_next else 0

    def save_asked(self) -> bool:
        """Whether the run has asked for this member's part of a checkpoint since the last time."""
        if self.client.save_due():
            self._owes_save = self._relays_save = True
        asked, self._relays_save = self._relays_save, False
        return asked

    def owe_save(self, cut: int = 0) -> None:
        """This member's part of a checkpoint (of version `cut`) is due after this step."""
        if cut or not (self._group is not None and self._group.is_root):
            self._owes_save, self._cut = True, cut

    def version(self, version: int | None = None) -> int:
        """The version that this member's parameters are of; set, if given."""
        if version is not None:
            self.client.news.version = version
        return self.client.version

    def samples(self, samples: int | None = None) -> int:
        """Samples of the run's updates so far, as this member knows; set, if given."""
        if samples is not None:
            self._samples = samples
        return int(self.client.news.last_admit.get("samples", self._samples))

    def updated_together(self, samples: int) -> None:
        """Every member of the group has made the run's next update by itself, of so many samples."""
        self._together += 1
        self._samples += samples
        if self._done is not None and self._loader is not None and self._loader.batch_size is not None:
            self._done += samples

    def moved(self, out: int, back: int, *, wire: bool) -> None:
        """A step moved so many bytes within the group, over sockets (`wire`) or through memory."""
        self._traffic.moved_in_group(out, back, wire=wire)

    def done(self, done: int | None = None) -> int | None:
        """Samples of all epochs that are through, as this member knows; set, if given."""
        if done is not None:
            self._done = done
        if self._group is None or self._group.is_root:
            self._done = self.client.news.last_admit.get("done", self._done)
        return self._done  # a member is where its root is, also if it has heard more by itself

    def stop_told(self) -> bool:
        """Whether the run ends early, as this member was told."""
        return self._ending.known

    def end_early(self) -> None:
        """All members of the group have heard from the root that the run ends early."""
        self._ending.agree()

    # --- the run's side ---------------------------------------------------------------------------

    def _save(self) -> None:
        self._owes_save = False
        phase = self._lane.enter(Phase.CHECKPOINT)
        self.client.settle()
        part = capture(
            self._models,
            self._trained,
            self.schedules.each(),
            [side.optimizer for side in self._sides],
            self._epoch,
            self._values.steps,
            with_frozen=self.rank == 0,
            generator=self._generator,
        )
        part |= self.kept.tensors()
        for side in self._sides:
            mine = f"{side.index}:" if side.index else ""
            part |= {f"stepper:{mine}{k}": v for k, v in side.stepper.state().items()}
        if self.client.payloads.encoders is not None:
            part |= {f"encoder:{k}": v for k, v in self.client.payloads.encoders.state().items()}
        if runs_here(self.mode) and (self._group is None or self._group.is_root):
            for side in self._sides:
                inner = pack_state(self.optimizer_state(side), side.infos())
                part |= {f"inner:{k}": v for k, v in inner.items()}
        cut, self._cut = self._cut, 0
        with self._link:
            self.client.save(part, cut)
        self._lane.enter(phase)

    def _send_buffers(self, buffers: BufferSchedule) -> None:
        """Let the run know the model's buffers, in case that this worker dies."""
        self._send_for_others(buffers.collect())
        buffers.sent()

    def _send_kept(self) -> None:
        """Let the run know what worker 0's script keeps, for those that join later."""
        if self.rank == 0 and self._group is None:
            self._send_for_others(self.kept.tensors())
        self.kept.sent()

    def _send_for_others(self, tensors: dict[str, Tensor]) -> None:
        """Let the run know what a worker that joins later starts from."""
        phase = self._lane.enter(Phase.CHECKPOINT)
        with self._link:
            self.client.save(tensors, buffers=True)
        self._lane.enter(phase)

    def progress(self) -> dict[str, int]:
        """How far the run is, as this worker knows (updates and samples applied), and its own steps."""
        if not self.prepared:
            return {}
        known = {"version": self.version(), **self.client.news.last_admit, "clock": self._clock}
        return {name: int(known[name]) for name in ("version", "samples", "clock") if name in known}

    def log(self, metrics: dict[str, float]) -> None:
        """Show metrics in the progress display and keep them in the run directory."""
        if "samples" in metrics and self.prepared and not self._has_loader:
            metrics = dict(metrics)
            self._account.log_samples(_whole(metrics.pop("samples")))
        self._norms.logged(metrics)
        self._reporter.log(metrics, self._clock, *self._reached_by_now(), self._epoch)

    def _reached_by_now(self) -> tuple[int, int]:
        """Version and samples of the run that this worker's parameters have, as far as it knows."""
        if not self._joined:
            return 0, 0
        if self.mode.serverless:  # members other than the root hear nothing from the servers
            return int(self.client.news.welcome["version"]) + self._together, self._samples
        client = self.client
        return client.version, client.news.last_admit.get("samples", self._samples)

    def _report(self) -> None:
        waited_s = self.client.wait_s + (self._group.waited_s if self._group is not None else 0.0)
        self._traffic.look(self.client)
        self._reporter.report(self._clock, wait_s=waited_s, ledger=self._ledger.told())

    def _end_with_group(self, group: Group) -> None:
        if group.ended is None:
            group.meet(ENDS)
        if group.ended is not None and group.is_root:
            log.warning("%s", group.ended)
            self._reporter.note(group.ended)

    def finish(self) -> None:
        """The script ended in order."""
        if self.prepared:
            self._require_joined()
            if self._free is not None:
                self._free.stop()
            if self._group is not None:
                self._end_with_group(self._group)
            self._flush()
            if self.mode.serverless and self._group is not None and self._group.is_root:
                self._assign()  # the lead server's are those of the last checkpoint
            self.client.settle()
            self._report()
            if (
                self._skipping is None and not self.client.news.leave_due
            ):  # else it found nothing left to do, and has nothing new to keep
                self._save()
            if self._group is not None:
                self._group.close()
            self._lane.enter(Phase.IDLE)
            last = _as_told(self._account.take_skipped(ending=True))
            if logged := self._account.take_logged():
                last["logged"] = logged
            self.client.bye(last)


def _whole(samples: Any) -> int:
    """Of log(samples=…)."""
    if not float(samples).is_integer() or samples < 0:
        raise UsageError(
            f"paceline.log(samples={samples!r:.40}): without a prepared loader `samples` counts what this "
            "worker trained on since it logged last, and must be a whole number. Log other figures by "
            "another name."
        )
    return int(samples)


def _as_told(skipped: Skipped) -> dict[str, Any]:
    """Skipped batches as fields of a message to the servers."""
    if not skipped:
        return {}
    return {"skipped": skipped.leases, "skipped_samples": skipped.unleased}


def _check_has_epochs(mode: ModeSpec, data: dict[str, Any] | None) -> None:
    """Modes that deal out the samples of an epoch need to know them."""
    if data is None or "samples" not in data:
        problem = (
            "prepare() got no DataLoader: pass it the training loader"
            if data is None
            else "an IterableDataset has no length: use a map-style data set"
        )
        does = (
            "makes one step of the gradient of a whole epoch" if mode.by_epoch else "deals batches by speed"
        )
        raise UsageError(f"mode {mode} {does}, and {problem}, or use a mode such as bsp or asp.")


def _without_kernel_choice(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What OptimizerSpec chose for `fused` on the servers stays."""
    return [{k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in settings]


def _counted_on(got: Callable[[int], None], tensors: Sequence[int]) -> Callable[[int], None]:
    """Tell `got` of a tensor by its place in the layout of the whole run."""
    return lambda i: got(tensors[i])


def _pin(memory: Tensor) -> None:
    """Let the GPU copy straight from and to shared memory."""
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)


_current: Session | None = None


def enter_session(session: Session) -> None:
    """This process is a worker from now on."""
    global _current
    _current = session


def current_session() -> Session:
    """The session of this process; a script that runs alone gets one too."""
    global _current
    if _current is None:
        _current = AloneSession(order_seed(os.environ))
    return _current
