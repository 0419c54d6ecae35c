"""ModelDesk: the leader takes the model that worker 0 offers, and hands it to the other servers."""

from paceline.comm import Connection, Region
from paceline.comm.worker_messages import AttachedReply, StartFrom, WeightsMessage
from paceline.core.dealing import dealing_refusal
from paceline.core.decider import Decider
from paceline.core.json_types import JsonObject
from paceline.core.modes import parse_schedule
from paceline.core.notes import WelcomeNotes
from paceline.core.server.lead_machine import LeadMachine
from paceline.exceptions import FrameError, PlanError
from paceline.params import GroupSettings, Placement
from paceline.ps.adoption import Adoption
from paceline.ps.checkpoints import CheckpointFiles
from paceline.ps.config import begin
from paceline.ps.parts import ServerParts
from paceline.ps.replicator import Replicator
from paceline.ps.saving import state_book, worker_state

__all__ = ["ModelDesk"]


class ModelDesk:
    """One owner: the leader, whose other parts it uses. The main thread only.

    Args:
        adoption: the workers' offers, and the model that became of them.
        files: gets the workers' parts of a checkpoint that the run goes on from.
    """

    def __init__(
        self, parts: ServerParts, adoption: Adoption, replicator: Replicator, files: CheckpointFiles
    ) -> None:
        self.adoption = adoption
        self._parts = parts
        self._replicator = replicator
        self._files = files

    def adopt_if_ready(self, machine: LeadMachine) -> None:
        """Once all servers are here, ask worker 0 for its weights, or take those of the checkpoint."""
        everyone = len(self._replicator.followers) == self._parts.config.servers - 1
        if everyone and self.adoption.ask_for_weights():
            assert self.adoption.model is not None
            self._adopt(Region.create(self.adoption.model.layout.nbytes), machine)

    def take_weights(self, connection: Connection, message: WeightsMessage, machine: LeadMachine) -> None:
        """Worker 0 sends the weights that it was asked for."""
        self._adopt(self.adoption.take_weights(connection, message.extras_bytes), machine)

    def _adopt(self, region: Region, machine: LeadMachine) -> None:
        """Take the model and hand it to the other servers."""
        model, config, executor = self.adoption.model, self._parts.config, self._parts.executor
        assert model is not None
        decider, optimizers = machine.decider, len(model.spec.groups_of)
        begin(decider, config, model.data, model.spec, None)
        self._check_schedule(decider, optimizers)
        if executor.mode.by_epoch:
            self._tell_descent(model.spec.groups[0])
        placement = Placement.over(model.layout, range(config.servers), config.replicas)
        model.numerics.apply()
        self._parts.adopt(model.layout, model.spec, region, placement, lambda slices: None, model.device)
        if self.adoption.checkpoint is not None:
            self._restore(machine)
        machine.adopt(model.layout, placement, optimizers)
        for server in self._replicator.followers:
            self.hand_over(server, first=True)
        self.answer(machine)

    def _restore(self, machine: LeadMachine) -> None:
        """Go on from a checkpoint."""
        saved, executor = self.adoption.checkpoint, self._parts.executor
        assert saved is not None
        machine.decider.restore(saved.meta["lead"])
        machine.cuts.last_saved = machine.decider.version
        book = state_book(saved, optimizer=not executor.mode.serverless)
        executor.present_shard.restore(book, vectors=executor.mode.by_epoch)
        # Until workers send newer ones, the next checkpoint keeps what this one has of them.
        for rank in range(self._parts.config.workers):
            if kept := worker_state(saved, rank):
                self._files.keep_part(f"worker-{rank}.safetensors", kept, of_this_one=False)
                self._parts.attachments.hear_buffers(kept, rank)

    def _check_schedule(self, decider: Decider, optimizers: int) -> None:
        """PlanError, if a mode that the run goes through by itself does not go with the script."""
        for mode in parse_schedule(self._parts.executor.mode, self._parts.config.schedule).modes:
            if reason := dealing_refusal(mode, decider.book):
                raise PlanError(reason)
            if optimizers > 1 and (reason := mode.one_optimizer_reason()):
                raise PlanError(f"prepare() got {optimizers} optimizers: {reason}.")

    def _tell_descent(self, settings: GroupSettings) -> None:
        """Sandblaster: the settings are L-BFGS's."""
        if "instead_of" in settings:
            mode = self._parts.executor.mode
            self._parts.controller.tell_user_once(
                f"in mode {mode} the servers step by L-BFGS with lr {settings['lr']:g}; nothing of the "
                f"script's {settings['instead_of']} is used, neither learning rate nor weight decay. Give "
                "the script torch.optim.LBFGS to choose L-BFGS's settings."
            )

    @property
    def facts(self) -> JsonObject:
        """What checkpoints must know of the run's model."""
        assert self.adoption.model is not None
        return self.adoption.model.facts()

    def check_loader(self) -> None:
        """FrameError if the run has no prepared loader, and so no leases."""
        model = self.adoption.model
        if model is None or model.data is None:
            raise FrameError("leases of a run without a prepared loader")

    def hand_over(self, server: int, *, first: bool) -> None:
        """Send another server the model.

        Args:
            first: training has not begun, so a run that goes on from a checkpoint starts from it.
        """
        checkpoint = self.adoption.checkpoint if first else None
        path = None if checkpoint is None else str(checkpoint.path)
        self._replicator.hand_over(server, self.adoption, self._parts.executor, path, takes_part=first)

    def addresses(self) -> dict[int, JsonObject]:
        """Where workers reach the servers."""
        me = {self._parts.config.rank: self._parts.hub.listener.address.to_json()}
        return {**self._replicator.addresses, **me}

    def welcome(self, notes: WelcomeNotes) -> AttachedReply:
        """The answer to a worker that attached. Servers may have come since its offer was answered."""
        return AttachedReply(**notes, servers=self.addresses())

    def answer(self, machine: LeadMachine) -> None:
        """Once all servers have the model, answer workers that offered theirs: they may attach."""
        executor, mode = self._parts.executor, self._parts.executor.mode
        if not machine.gate.model_everywhere:
            return
        start = StartFrom(
            epoch=machine.decider.epoch,
            mode=str(mode),
            resumed=False,
            placement=executor.placement,
            servers=self.addresses(),
            replicated=self._parts.config.replicas > 0,
        )
        self.adoption.answer(
            executor.region,
            executor.on_device,
            start,
            writable=mode.needs_memory,
            share=mode.in_place or mode.needs_memory or mode.switchable,
            first=not machine.gate.open,
            buffers=self._parts.attachments.buffers,
        )
