"""What prepare() talks to in a worker of a run."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.collective import GroupLinks
from paceline.comm.device import device_of
from paceline.comm.faults import OF_FRAMES
from paceline.comm.protection import protection
from paceline.core.modes import ModeSpec
from paceline.exceptions import UsageError
from paceline.observe.record.phase import Phase
from paceline.params import OptimizerSpec
from paceline.worker.account import Account
from paceline.worker.alone import AloneSession, Session, offer_no_sync, order_seed
from paceline.worker.checkpoint_part import epoch_of, steps_of
from paceline.worker.device_placement import DevicePlacement
from paceline.worker.epochs import EpochCounter, RemainingEpochs, check_has_epochs
from paceline.worker.exchange.client import Client
from paceline.worker.exchange.encoders import lay_out, without_momentum
from paceline.worker.exchange.entry import Adopted, Entry, ModelOffer
from paceline.worker.exchange.sample_report import SampleReport
from paceline.worker.gathered_values import Collectives
from paceline.worker.joined_run import JoinedRun, ScriptPart
from paceline.worker.leased_data import LeasedData
from paceline.worker.loader import LeasedLoader, StreamLoader, data_facts, lease_loader
from paceline.worker.optimizer_side import Incomplete, OptimizerSide, SideCalls, incomplete
from paceline.worker.parameter_space import ParameterSpace
from paceline.worker.phase_hooks import on_backward
from paceline.worker.prepared import Models, Prepared
from paceline.worker.randomness import part_ways
from paceline.worker.run_progress import RunProgress
from paceline.worker.run_settings import RunSettings
from paceline.worker.schedules import Schedules
from paceline.worker.script_optimizer import (
    StateDict,
    as_loaded,
    as_made,
    has_history,
    make_exchanging,
    pack_state,
    stop_exchanging,
)
from paceline.worker.steppers import runs_here, served_optimizer
from paceline.worker.telemetry import Telemetry
from paceline.worker.training_view import TrainingView
from paceline.worker.validation import ValidationLoader

__all__ = [
    "AloneSession",
    "RunSession",
    "Session",
    "current_session",
    "enter_session",
]


class RunSession(Session):
    """A worker of a run, as its script sees it.

    Args:
        reach_servers: connects to the lead server.
        group: how to reach the workers that this one all-reduces with, if the mode has groups.
    """

    def __init__(
        self,
        settings: RunSettings,
        reach_servers: Callable[[], Entry],
        telemetry: Telemetry,
        group: GroupLinks | None = None,
    ) -> None:
        super().__init__()
        self.rank = settings.rank
        self.world_size = settings.world_size
        self._settings = settings
        self._reach_servers = reach_servers
        self._telemetry = telemetry
        self._lane = telemetry.lane
        self._group_links = group
        self._placement = DevicePlacement(settings.device, settings.local_rank)
        self._account = Account()
        self._view = TrainingView(settings, self.kept)
        self.schedules = Schedules(self._view, self._account.passed_over)
        self.kept.paces = self.schedules.paces
        self._view.schedulers = self.schedules.each
        self._data = LeasedData(
            settings.rank,
            self._joined,
            self._view,
            self._account,
            self.schedules,
            self.kept,
            telemetry,
            send_kept=self._send_kept,
        )
        self._objects: list[Any] = []
        """What prepare() got, in all calls."""
        self._calls = 0
        self._has_loader = False
        self._entry: Entry | None = None
        """Where to offer what is prepared, until this worker has left again."""
        self._sides: list[OptimizerSide] = []
        self._run: JoinedRun | None = None
        """The run, once this worker is part of it."""
        self._joined_at: int | None = None
        """The version that the run had when this worker joined it first."""
        self._load_hooks: list[Any] = []
        self._batch_samples = 0
        """Samples of the last step that had any."""

    @property
    def mode(self) -> ModeSpec:
        """The run's present mode."""
        return self._view.mode

    @property
    def mode_text(self) -> str:
        """See `paceline.mode`."""
        return str(self.mode)

    @property
    def client(self) -> Client:
        """Talks to the servers. For tests and benchmarks."""
        return self._joined().client

    def _joined(self) -> JoinedRun:
        """The run; UsageError if it was prepared by more calls than this worker has made."""
        if self._run is None:
            raise incomplete(self._calls)
        return self._run

    def _prepared(self, call: str) -> JoinedRun:
        """The run; UsageError if the script calls this before prepare()."""
        if not self.prepared:
            raise UsageError(f"{call} before prepare(): call paceline.prepare(…) first.")
        return self._joined()

    # --- prepare ----------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Offer the models, join the run, and make the objects work with it.

        Called again before the first batch and step, it leaves, offers what all calls brought, and joins
        again.
        """
        got = self._check_prepared(objects)
        self._placement.place(objects)
        if self.prepared:
            self._leave_for_more()
        self._objects += objects
        self._calls += 1
        space, offer = self._lay_out(got)
        if self._entry is None:
            self._entry = self._reach_servers()
        adopted = self._entry.offer(offer, space.weights)
        if adopted is not None:
            self._join(got, self._entry, adopted, space)
        else:  # the run was prepared by more calls than this worker has made
            for side in self._sides:
                make_exchanging(side.optimizer, Incomplete(self._calls))
        self.prepared = True
        return got.give_back(objects, self._lease_loader(got, objects))

    def _check_prepared(self, objects: Sequence[Any]) -> Prepared:
        """All objects of this and earlier calls, sorted."""
        if self._view.begun:
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
        return got

    def _lay_out(self, got: Prepared) -> tuple[ParameterSpace, ModelOffer]:
        """Lay out what is trained, and look at the data."""
        models = Models(got.models)
        self.schedules.prepare(got.schedulers, got.optimizers)
        served = [self._served_for(optimizer) for optimizer in got.optimizers]
        spec = OptimizerSpec.of_all(served, self._settings.optimizers)
        spec, layout, parameters = lay_out(
            models, got.optimizers, spec, self._settings.transfer, servers=self._settings.servers
        )
        self._telemetry.traffic.lay_out(layout)
        self._sides = [
            OptimizerSide(k, optimizer, served[k], layout, parameters, spec)
            for k, optimizer in enumerate(got.optimizers)
        ]
        space = ParameterSpace(models, got.optimizers, layout, parameters)
        data = data_facts(got.loader) if got.loader is not None else None
        self._has_loader = data is not None
        if self.mode.by_epoch or self.mode.deals_by_speed:
            check_has_epochs(self.mode, data)
        return space, ModelOffer(
            layout=layout,
            spec=spec,
            data=data,
            state_keys=[*models.state()],
            models=len(models),
            calls=self._calls,
            device=device_of(parameters[0].device, self._settings.device),
        )

    def _served_for(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that the servers run for one of the script's."""
        served = served_optimizer(self.mode, optimizer)
        compress = self._settings.transfer.compress
        return without_momentum(compress, self.mode, served) if compress.has_momentum else served

    def _join(self, got: Prepared, entry: Entry, adopted: Adopted, space: ParameterSpace) -> None:
        """Start from what the run has, and train with it from here on."""
        run = JoinedRun(
            self._settings,
            self._telemetry,
            self._account,
            entry,
            adopted,
            space,
            self._sides,
            self._group_links,
            self._script_part,
            batch_size=None if got.loader is None else got.loader.batch_size,
            has_loader=got.loader is not None,
        )
        for side in self._sides:
            make_exchanging(side.optimizer, SideCalls(self, side))
        run.resumption.put_back_script(self.kept)
        self._view.start = adopted.epoch
        if self._joined_at is None:  # and not when it prepares more
            self._joined_at = run.client.version
            part_ways(self._settings.seed, self.rank, self._joined_at)
            on_backward(self._find_zeroed, self._account.backward)
        if adopted.resumed:
            self.resumed = True
            self._load_part(run, adopted.tensors)
        elif run.client.version > 0:
            self.schedules.join_late(self.kept.found_paces)
        self._run = run
        self._view.join(run.client.news, run.counts, run.resumption)
        self._share_start(run)
        for model in got.models:
            offer_no_sync(model)
            self._load_hooks.append(model.register_load_state_dict_post_hook(self._make_load_hook(space)))
        self._view.begun = False
        self._telemetry.ledger.joined()
        self._telemetry.watch(got.models, self._settings.device)
        if self.rank == 0:
            self._telemetry.reporter.declare_evaluation(self.evaluation, self._settings.eval_every)

    def _load_part(self, run: JoinedRun, tensors: dict[str, Tensor]) -> None:
        """After a resume: take over this worker's part of the checkpoint."""
        run.load_part(tensors)
        if (steps := steps_of(tensors)) is not None:
            self._telemetry.values.begin_at(steps)
        elif epoch_of(tensors) is None:  # this worker was not there
            self._telemetry.values.begin_at(0)

    def _share_start(self, run: JoinedRun) -> None:
        """Go on from the root's parameters in a group; let the servers have an optimizer state that worker 0
        brings along."""
        mode = run.memory.mode
        if (stepper := run.group_stepper) is not None and mode.inner is not None:
            stepper.share()
        elif self.rank == 0 and not run.resumption.replaying and not runs_here(mode):
            for side in self._sides:
                if has_history(side.optimizer):
                    own = side.optimizer.local_state()  # type: ignore[attr-defined]
                    self._give_state(side, as_made(own, fused=side.fused))

    def _make_load_hook(self, space: ParameterSpace) -> Callable[[nn.Module, Any], None]:
        """A plain function: a copy of a model keeps it as it is, where it does no harm."""

        def loaded(module: nn.Module, keys: Any) -> None:
            if any(module is model for model in space.models.each):  # and not a copy of it (an average, say)
                space.guard.check_loaded()
                self.assign()

        return loaded

    def _lease_loader(self, got: Prepared, objects: Sequence[Any]) -> LeasedLoader | StreamLoader | None:
        """The prepared loader, if this call brought one."""
        if got.loader is None or not any(o is got.loader for o in objects):
            return None
        group = None if self._run is None else self._run.group
        self._view.loader = lease_loader(
            got.loader,
            self._data,
            seed=self._settings.seed,
            rank=self.rank,
            world_size=self.world_size,
            group_start=self.rank if group is None else group.root,
            version=self._joined_at or 0,
        )
        if self._placement.where is not None:
            self._view.loader.place = self._placement.batch
        return self._view.loader

    def _leave_for_more(self) -> None:
        """The script prepares more: leave the run as if it had not been joined."""
        for side in self._sides:
            stop_exchanging(side.optimizer)
        if self._run is None:
            return
        run, self._run = self._run, None
        self._view.leave()
        run.leave_for_more()
        self._entry = None
        for hook in self._load_hooks:
            hook.remove()
        self._load_hooks = []

    def _script_part(self) -> ScriptPart:
        return ScriptPart(
            self.schedules.each(),
            self._view.epoch,
            self._telemetry.values.steps,
            self._view.generator,
            self.kept.tensors(),
        )

    # --- the optimizers' calls --------------------------------------------------------------------

    def step(self, side: OptimizerSide) -> None:
        """What optimizer.step() does: a step of the mode, with the exchanges it asks for."""
        run = self._joined()
        self._view.begun = True
        if self.schedules.is_late:
            self.schedules.catch_up(self._view.epoch)
        phase = self._lane.enter(Phase.PUSH)
        self._before_step(run, side)
        for request in side.stepper.step():
            run.exchange.answer(side, request)
        with run.exchange.lock:  # the root's pushes cover its group's samples
            self._account.end_step(keep=run.speaks)
            side.stepper.step_ended()
        if run.free is not None:
            run.free.wake()
        self._view.clock += 1
        self._telemetry.values.stepped()
        self._telemetry.ledger.stepped()
        self._lane.enter(phase)
        self._after_step(run)

    def _before_step(self, run: JoinedRun, side: OptimizerSide) -> None:
        """Save if a checkpoint waits for it, and refuse what the script must not have changed."""
        samples = self._account.tally()[0]
        if len(self._sides) == 1 or samples or not self._has_loader:
            run.save_if_due()  # not between two steps with the same batch
        if not run.memory.mode.local:
            run.space.guard.check_parameters()
        run.space.guard.check_frozen()
        run.resumption.step()
        if self._settings.faults.all:
            self._inject_faults(run, side)
        # A step of another optimizer with the same batch weighs as many samples.
        self._batch_samples = samples or self._batch_samples
        side.weight += self._batch_samples

    def _after_step(self, run: JoinedRun) -> None:
        """Report and send what is due, and end the script if the run ends here."""
        clock = self._view.clock
        if self._telemetry.reporter.due:
            self._telemetry.report(run.client, run.group, clock)
            run.space.guard.check_pages(run.client.private_pages())
        if run.buffers is not None and run.buffers.due:
            run.saver.send_for_others(run.buffers.collect())
            run.buffers.sent()
        if self.kept.due:
            self._send_kept()
        self._telemetry.spans.begin_step(clock)
        protection.begin_step(clock)
        if run.client.news.leave_due:
            raise SystemExit(0)  # the script ends here; `finish` says goodbye
        run.end.stepped()

    def _send_kept(self) -> None:
        """Let the run know what worker 0's script keeps, for workers that join later."""
        run = self._joined()
        if self.rank == 0 and run.group is None:
            run.saver.send_for_others(self.kept.tensors())
        self.kept.sent()

    def _inject_faults(self, run: JoinedRun, side: OptimizerSide) -> None:
        """Faults on purpose, at this step."""
        clock = self._view.clock
        for kind in self._settings.faults.at(clock + 1):
            if kind in OF_FRAMES:
                run.client.links.damage_next(kind, clock)
                continue
            for p in side.parameters:
                if p.grad is not None:
                    p.grad = p.grad * (float("nan") if kind == "nan" else 1e4)

    def zeroed(self, optimizer: torch.optim.Optimizer) -> None:
        """The script zeroed an optimizer's gradients: removed them, or filled them with zeros."""
        if self._account.accumulating:
            for side in self._sides:
                side.zeroed |= side.optimizer is optimizer
            if all(side.zeroed or side.without_gradients for side in self._sides):
                self._account.zeroed()

    def _find_zeroed(self) -> None:
        """A backward pass begins: the script may have removed gradients without the optimizer's help."""
        if self._account.accumulating and all(side.without_gradients for side in self._sides):
            self._account.zeroed()
        for side in self._sides:
            side.zeroed = False

    def optimizer_state(self, side: OptimizerSide) -> StateDict:
        """The optimizer's state_dict, with the state from where the optimizer runs."""
        return self._joined().optimizer_state(side)

    def load_optimizer_state(self, side: OptimizerSide, state: StateDict) -> None:
        """Take over an optimizer state_dict, where the optimizer runs."""
        run = self._joined()
        mode = run.memory.mode
        self._view.begun = True
        if run.resumption.replaying:
            return
        if run.group is not None and mode.serverless:
            run.group.meet("loads an optimizer state")
        if runs_here(mode):
            side.optimizer.load_local_state(state)  # type: ignore[attr-defined]
            return
        infos = side.infos()
        if sum(len(g["params"]) for g in state["param_groups"]) != len(infos):
            raise UsageError(
                f"the optimizer state has {sum(len(g['params']) for g in state['param_groups'])} parameters, "
                f"this optimizer has {len(infos)}."
            )
        if type(side.optimizer).__module__.startswith("torch.optim."):
            state = as_loaded(state, infos, fused=side.fused)
        self._give_state(side, state)

    def _give_state(self, side: OptimizerSide, state: StateDict) -> None:
        """Make the servers take over an optimizer state_dict, with the dtypes that it has."""
        run = self._joined()
        if run.memory.mode.by_epoch:  # what torch's LBFGS remembers does not fit: settings only
            state = {**state, "state": {}}
        run.client.load_optimizer_state(pack_state(state, side.infos()), side.index)
        for group, saved in zip(side.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})
        run.exchange.send_settings_again()

    # --- the script's calls -----------------------------------------------------------------------

    def assign(self) -> None:
        """Make the servers take over the model's present parameters."""
        run = self._run
        if run is None:
            return  # the run's are newer, and come when it joins
        if run.client.arrives_late:
            run.client.settle()
        if run.group is None or run.resumption.replaying:
            run.assign()
            return
        run.group.meet("assigns its model's parameters")
        run.assign()
        assert run.group_stepper is not None
        run.group_stepper.share()

    @contextlib.contextmanager
    def run_parameters(self) -> Iterator[None]:
        """Within, the model has the run's parameters, not the worker's own."""
        run = self._joined()
        client, memory = run.client, run.memory
        if memory.views.near is memory.views.base:
            if not (client.arrives_late or memory.mode.serverless):  # there they are here, and only here
                client.settle()
                memory.from_host()
            yield
            return
        with run.exchange.lock:
            shown = memory.fetch_copy(run.sides)
        with memory.showing(shown):
            yield

    def should_stop(self, condition: bool, who: str) -> bool:
        """Whether the run ends early, with this worker's vote: see `paceline.should_stop`.

        A script that was started again has no vote until it has made a step: in epochs that it skips it
        would judge by what it did not train.
        """
        run = self._prepared("should_stop() was called")
        run.end.asks()
        if run.resumption.replaying or run.end.told:
            return run.end.told
        with run.exchange.lock:
            stop = run.end.vote(who, condition)
        run.memory.follow_switch(run.sides)
        return stop

    def epochs(self, count: int) -> RemainingEpochs:
        """See `paceline.epochs`."""
        run = self._prepared("epochs() was called")
        view = self._view
        if view.epochs is None:
            view.epochs = EpochCounter(
                view.start, view.loader, self.kept, ended=lambda: self._joined().end.told
            )
        run.resumption.script_skips()
        return view.epochs.loop(count)

    def prepare_validation(self, loader: Any, place: str) -> ValidationLoader:
        """See `paceline.prepare_validation`."""

        def find_place() -> tuple[int, int]:
            # A worker that catches up with the run may be told of readers before it came.
            readers = sorted({*self.gather(place, "null"), self.rank})
            return readers.index(self.rank), len(readers)

        planned = self.rank % self.world_size, self.world_size
        made = ValidationLoader(loader, seed=self._settings.seed, planned=planned, find_place=find_place)
        if self._placement.where is not None:
            made.place = self._placement.batch
        return made

    def gather(self, place: str, text: str) -> dict[int, str]:
        """The values of all workers that call at this place of the script, by rank."""
        run = self._prepared(f"paceline.{place} came")
        with run.exchange.lock:
            found = Collectives(run.client, run.group, self.rank).gather(place, text)
        run.memory.follow_switch(run.sides)
        return found

    def log(self, metrics: dict[str, float]) -> None:
        """Show metrics in the progress display and keep them in the run directory."""
        if "samples" in metrics and self.prepared and not self._has_loader:
            metrics = dict(metrics)
            self._account.log_samples(_whole(metrics.pop("samples")))
        self._telemetry.norms.logged(metrics)
        view = self._view
        self._telemetry.reporter.log(metrics, view.clock, *view.reached(), view.epoch)

    def run_progress(self) -> RunProgress:
        """See `paceline.progress`."""
        return self._view.run_progress() or super().run_progress()

    def progress(self) -> dict[str, int]:
        """How far the run is, as this worker knows (updates and samples applied), and its own steps."""
        return self._view.progress() if self.prepared else {}

    # --- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """The script ended in order: push the rest, save this worker's part, and say goodbye."""
        if not self.prepared:
            return
        run = self._joined()
        run.end_together()
        self._telemetry.report(run.client, run.group, self._view.clock)
        if not run.resumption.skipping and not run.client.news.leave_due:
            run.save()  # else it found nothing left to do, and has nothing new to keep
        if run.group is not None:
            run.group.close()
        self._lane.enter(Phase.IDLE)
        last = self._account.take_skipped(ending=True)
        run.client.bye(last + SampleReport(logged=self._account.take_logged()))


def _whole(samples: Any) -> int:
    """Of log(samples=…)."""
    if not float(samples).is_integer() or samples < 0:
        raise UsageError(
            f"paceline.log(samples={samples!r:.40}): without a prepared loader `samples` counts what this "
            "worker trained on since it logged last, and must be a whole number. Log other figures by "
            "another name."
        )
    return int(samples)


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
