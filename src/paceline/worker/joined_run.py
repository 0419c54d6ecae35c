"""A worker's membership in the run: made when prepare() has joined it, and given up when it leaves."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.collective import ENDS, Group, GroupLinks
from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import Lane
from paceline.params import StateBook, use_fused
from paceline.worker.account import Account
from paceline.worker.buffers import BufferSchedule
from paceline.worker.checkpoint_part import OWN_PARTS, capture, load_extras
from paceline.worker.early_end import EarlyEnd
from paceline.worker.exchange.entry import Adopted, Entry
from paceline.worker.exchange.free_exchange import FreeExchange
from paceline.worker.exchange.pipeline import PipelinedExchange
from paceline.worker.exchange.run_news import new_pull
from paceline.worker.gate import guard_parameters
from paceline.worker.group_member import GroupMember
from paceline.worker.model_memory import ModelMemory
from paceline.worker.optimizer_side import OptimizerSide
from paceline.worker.parallel import LocalParallelism
from paceline.worker.parameter_space import ParameterSpace
from paceline.worker.part_saver import PartSaver
from paceline.worker.resumption import Resumption
from paceline.worker.run_counts import RunCounts
from paceline.worker.run_settings import RunSettings
from paceline.worker.script_optimizer import StateDict, pack_state, unpack_state
from paceline.worker.step_exchange import StepExchange
from paceline.worker.steppers import GradientStepper, GroupStepper, local_step_of, make_stepper, runs_here
from paceline.worker.telemetry import Telemetry

__all__ = ["JoinedRun", "ScriptPart"]

log = logging.getLogger("paceline.worker")


class ScriptPart(NamedTuple):
    """What the script adds to its worker's part of a checkpoint."""

    schedulers: Sequence[Any]
    epoch: int
    steps: int
    generator: torch.Generator | None
    """Seeds the DataLoader's processes, if it is not torch's global one."""
    kept: dict[str, Tensor]
    """See `paceline.state`."""


class JoinedRun:
    """All that a worker has while it is part of the run.

    Args:
        entry: has reached the lead server.
        adopted: the run's answer to what the script prepared.
        space: the parameters, which become views of the memory shared with the servers.
        sides: the script's optimizers; each gets its stepper.
        group_links: lead to the workers that this one all-reduces with, if the mode has groups.
        script_part: what the script adds to this worker's part of a checkpoint.
        batch_size: of the prepared loader, if there is one and it has a batch size.
    """

    def __init__(
        self,
        settings: RunSettings,
        telemetry: Telemetry,
        account: Account,
        entry: Entry,
        adopted: Adopted,
        space: ParameterSpace,
        sides: list[OptimizerSide],
        group_links: GroupLinks | None,
        script_part: Callable[[], ScriptPart],
        *,
        batch_size: int | None,
        has_loader: bool,
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._script_part = script_part
        self.space = space
        self.sides = sides
        extras = {k: v for k, v in adopted.tensors.items() if not k.startswith(OWN_PARTS)}
        load_extras(space.models, extras, space.trained)
        replaced = entry.links.settings.incarnation > 0
        self.resumption = Resumption(
            adopted.tensors, adopted.epoch, resumed=adopted.resumed, replaced=replaced
        )
        local_steps = [_timed(local_step_of(side.optimizer), telemetry.lane) for side in sides]
        if runs_here(adopted.mode):
            # While its class is the script's: kernels are tried with one of that class.
            for side in sides:
                use_fused(side.optimizer)
        on_host = space.parameters[0].device.type == "cpu"
        listens = None if group_links is None else group_links.address
        client = entry.attach(adopted, in_place=on_host, listens=listens)
        self.client = client
        self.memory = ModelMemory(
            client, space, telemetry.lane, grouped=group_links is not None, optimizers=len(sides)
        )
        self.group = None if group_links is None else self._meet(group_links)
        self.speaks = self.group is None or self.group.is_root
        """Whether this worker's pushes count: in a group, the root's do."""
        self.exchange = StepExchange(
            client, self.memory, sides, account, telemetry, tells_norms=settings.tells_norms
        )
        self.counts = RunCounts(client.news, self.group, counts_samples=batch_size is not None)
        self.end = EarlyEnd(client, self.group, has_loader=has_loader)
        self.saver = PartSaver(client, self.exchange.lock, telemetry.lane, is_root=self.speaks)
        self.buffers: BufferSchedule | None = None
        if self.group is None:  # without one of its members a group goes back to a checkpoint
            self.buffers = BufferSchedule(space.models, space.trained, workers=settings.world_size)
        self._give_steppers(account, local_steps)
        space.guard.accept()
        if client.pipeline is not None:
            self._hide_exchanges(client.pipeline)
        if self.memory.mirror is not None:
            self._let_leave(self.memory.mirror.watch())
            guard_parameters(space.models.modules(), space.parameters, space.layout, self.memory.mirror.need)
        self.free: FreeExchange | None = None
        """dogwild's exchange thread."""
        self.local: LocalParallelism | None = None
        """The replicas that share a batch, or the stages of the models."""
        if settings.local.splits or settings.pipeline.splits:
            self.local = LocalParallelism(
                space.models.each,
                local=settings.local,
                pipeline=settings.pipeline,
                deadline_s=settings.deadline_s,
            )
        if self.memory.mode.own_threads:
            client.links.lane = telemetry.spans.lane("exchange")
            self.free = FreeExchange(self.exchange.flush)

    # --- joining ----------------------------------------------------------------------------------

    def _meet(self, links: GroupLinks) -> Group:
        assert self.memory.group is not None
        return Group(
            links.ranks,
            links.rank,
            links.meet(self.client.news.welcome.group),
            region=self.memory.group.region,
            layout=self.space.layout,
            deadline_s=links.deadline_s,
            lane=self._telemetry.lane,
        )

    def _give_steppers(self, account: Account, local_steps: list[Callable[[], Any]]) -> None:
        memory, mode = self.memory, self.memory.mode
        for side, local_step in zip(self.sides, local_steps, strict=True):
            if self.group is None:
                side.stepper = make_stepper(
                    mode, side.layout, memory.views, side.parameters, side.optimizer, local_step
                )
                side.version = self.client.version
                continue
            assert memory.group is not None
            news, traffic = self.client.news, self._telemetry.traffic
            side.stepper = GroupStepper(
                self.group,
                GroupMember(news, self.counts, self.saver, self.end, traffic),
                account,
                memory.group,
                mode,
                side.layout,
                memory.views,
                side.parameters,
                side.optimizer,
                local_step,
            )

    def _hide_exchanges(self, pipeline: PipelinedExchange) -> None:
        """Let gradients leave, and parameters come, while the script computes."""
        memory, space = self.memory, self.space
        if self._settings.transfer.leaves_early and memory.mode.payload == "gradient":
            self._let_leave(pipeline.watch(memory.views.slot))
        if pipeline.arrives_late:
            guard_parameters(space.models.modules(), space.parameters, space.layout, pipeline.need)
            if memory.is_mirrored:
                pipeline.upload_with(memory.upload)

    def _let_leave(self, got: Callable[[int], None]) -> None:
        """Tell `got` of each tensor whose gradient is in the memory."""
        for side in self.sides:
            assert isinstance(side.stepper, GradientStepper)
            side.stepper.gradients.watch(_numbered(got, side.tensors))

    @property
    def group_stepper(self) -> GroupStepper | None:
        """The stepper in a mode with groups, where a script has one optimizer."""
        stepper = self.sides[0].stepper
        return stepper if isinstance(stepper, GroupStepper) else None

    # --- parameters -------------------------------------------------------------------------------

    def assign(self) -> None:
        """Make the servers take over the model's present parameters; while replaying, the other way round."""
        with self.exchange.lock:
            if self.speaks and not self.resumption.replaying:
                self.memory.assign()
            elif self.resumption.replaying:
                self.client.exchange(new_pull())
                self.client.settle()
            # The root's parameters count in a group, and come with the next share.
            self.memory.rebind()
            for side in self.sides:
                side.version = self.client.version
                side.stepper.overwritten()
            self.space.guard.accept()

    # --- checkpoints ------------------------------------------------------------------------------

    def save_if_due(self) -> None:
        """Send this worker's part of a checkpoint, if the run wants it.

        It is due between two batches and not in a step: what the script does after a step (a scheduler's
        step, say) belongs to it.
        """
        if self.saver.due:
            self.save()

    def save(self) -> None:
        """Send this worker's part of a checkpoint."""
        self.saver.save(self._part)

    def _part(self) -> dict[str, Tensor]:
        sides, space, script = self.sides, self.space, self._script_part()
        part = capture(
            space.models,
            space.trained,
            script.schedulers,
            [side.optimizer for side in sides],
            script.epoch,
            script.steps,
            with_frozen=self._settings.rank == 0,
            generator=script.generator,
        )
        part |= script.kept
        for side in sides:
            mine = f"{side.index}:" if side.index else ""
            part |= {f"stepper:{mine}{k}": v for k, v in side.stepper.state().items()}
        if (encoders := self.client.payloads.encoders) is not None:
            part |= {f"encoder:{k}": v for k, v in encoders.state().items()}
        if runs_here(self.memory.mode) and self.speaks:
            for side in sides:
                inner = pack_state(self.optimizer_state(side), side.infos())
                part |= {f"inner:{k}": v for k, v in inner.items()}
        return part

    def load_part(self, tensors: dict[str, Tensor]) -> None:
        """After a resume: take over what this worker alone has of the state."""
        if (encoders := self.client.payloads.encoders) is not None:
            dropped = encoders.load(_under("encoder:", tensors))
            if dropped is not None:
                log.warning("worker:%s: %s", self._settings.rank, dropped)
        steppers, inner = _under("stepper:", tensors), _under("inner:", tensors)
        for side in self.sides:
            mine = f"{side.index}:" if side.index else ""
            side.stepper.load({k: v for k, v in _under(mine, steppers).items() if mine or ":" not in k})
            if inner and runs_here(self.memory.mode):
                state = unpack_state(StateBook([inner]), side.infos(), side.optimizer, fused=False)
                side.optimizer.load_local_state(state)  # type: ignore[attr-defined]

    def optimizer_state(self, side: OptimizerSide) -> StateDict:
        """An optimizer's state_dict, with the state from where the optimizer runs."""
        if runs_here(self.memory.mode):
            return side.optimizer.local_state()  # type: ignore[attr-defined, no-any-return]
        book = StateBook(self.client.optimizer_state())
        return unpack_state(book, side.infos(), side.optimizer, fused=side.fused)

    # --- leaving ----------------------------------------------------------------------------------

    def leave_for_more(self) -> None:
        """The script prepares more: leave the run as if it had not been joined."""
        if self.local is not None:
            self.local.close()
        if self.free is not None:
            self.free.stop()
        self.client.settle()
        self.client.bye(comes_back=True)
        for side in self.sides:
            if isinstance(side.stepper, GradientStepper):
                side.stepper.gradients.release()

    def end_together(self) -> None:
        """The script has ended: stop the exchange thread, meet the group for the last time, push the rest."""
        if self.local is not None:
            self.local.close()
        if self.free is not None:
            self.free.stop()
        if (group := self.group) is not None:
            if group.ended is None:
                group.meet(ENDS)
            if group.ended is not None and group.is_root:
                log.warning("%s", group.ended)
                self._telemetry.reporter.note(group.ended)
        self.exchange.flush()
        if self.group is not None and self.group.is_root and self.memory.mode.serverless:
            self.assign()  # the lead server's are those of the last checkpoint
        self.client.settle()


def _timed(step: Callable[[], Any], lane: Lane) -> Callable[[], Any]:
    """A local step, recorded as an update."""

    def update() -> Any:
        phase = lane.enter(Phase.UPDATE)
        try:
            return step()
        finally:
            lane.enter(phase)

    return update


def _numbered(got: Callable[[int], None], tensors: list[int]) -> Callable[[int], None]:
    """Tell `got` of a tensor by its place in the layout of the whole run."""
    return lambda i: got(tensors[i])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries whose keys begin with the prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
