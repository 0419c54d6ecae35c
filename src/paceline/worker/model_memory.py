"""Where a worker's parameters and gradients lie: on the model's device, and in memory shared with servers."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.comm import Region
from paceline.exceptions import UsageError
from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import Lane
from paceline.worker.exchange.client import Client
from paceline.worker.exchange.exchange_memory import ExchangeMemory
from paceline.worker.exchange.run_news import new_assign, new_pull
from paceline.worker.host_mirror import HostMirror
from paceline.worker.optimizer_side import OptimizerSide
from paceline.worker.parameter_space import ParameterSpace
from paceline.worker.steppers import GroupMemory, StepperMemory

__all__ = ["ModelMemory"]


class ModelMemory:
    """Lets the model's parameters be views of memory that is exchanged with the servers.

    Args:
        grouped: the worker is a member of a group, which sees its memory, too.
        optimizers: number of the script's optimizers.

    Raises:
        UsageError: the mode needs memory that all workers write to, and this worker cannot share it.
    """

    def __init__(
        self, client: Client, space: ParameterSpace, lane: Lane, *, grouped: bool, optimizers: int
    ) -> None:
        device = space.parameters[0].device
        self._client = client
        self._space = space
        self._lane = lane
        self._several = optimizers > 1
        self.mode = client.news.mode
        """The mode that the memory is arranged for."""
        self._slot, self._fresh = client.memory.gradients, client.parameters
        if self.mode.needs_memory and not client.in_place:
            on_host = device.type == "cpu"
            where = "this worker reaches the servers over TCP" if on_host else f"the model is on {device}"
            raise UsageError(
                f"mode {self.mode} lets all workers write into one memory of their host, and {where}. Keep "
                "the model on the CPU and use link auto or shm, or a mode such as asp."
            )
        slot, base = self._slot, self._fresh
        self.mirror: HostMirror | None = None
        """Copies slices between the device and the host while the model computes."""
        if client.mirrors is not None or device != slot.device:
            # The servers' memory is on the host: keep flat mirrors on the device.
            slot = torch.zeros(space.layout.nbytes, dtype=torch.uint8, device=device)
            base = self._fresh.clone() if device == self._fresh.device else self._fresh.to(device)
            if client.mirrors is not None:
                assert isinstance(client.memory, ExchangeMemory)
                self.mirror = HostMirror(
                    client.mirrors,
                    space.layout,
                    client.links.each,
                    gradients=slot,
                    parameters=base,
                    host=client.memory.all_bytes,
                    pushed=self._slot,
                    fetched=self._fresh,
                )
            else:
                _pin(self._slot)
                _pin(self._fresh)
        near = base
        self.group: GroupMemory | None = None
        """The memory that the group sees."""
        if grouped:
            self.group = self._group_memory(slot, base)
            near = self.group.near
        elif self.mode.local and not client.in_place:
            if base is self._fresh and self._several:
                base = base.clone()  # what an optimizer fetches must not change what another one started from
            near = base.clone()
        self.views = StepperMemory(slot, base, near, client.memory.checks_gradients)
        space.bind_to(near)

    def _group_memory(self, slot: Tensor, base: Tensor) -> GroupMemory:
        layout = self._space.layout
        if self.mode.inner is not None and self.mode.inner.local:
            # What is pushed and fetched is not the gradient, and not what the model computes with.
            mine = GroupMemory.of(Region.create(2 * layout.nbytes), layout, base.device)
            mine.near.copy_(base)
            return mine
        memory = self._client.memory
        assert isinstance(memory, ExchangeMemory), "servers of groups are in host memory"
        return GroupMemory(memory.region, slot, self._slot, base, self._fresh)

    @property
    def is_mirrored(self) -> bool:
        """Whether the model computes with other memory than what servers write to."""
        return self.views.base is not self._fresh

    def to_host(self, side: OptimizerSide | None = None) -> None:
        """Copy what is pushed, of one optimizer or of all."""
        if self.mirror is not None:
            layout = self._space.layout if side is None else side.layout
            self.mirror.push([piece.index for piece in layout.slices])
        elif self.views.slot is not self._slot:
            self._copy_slices(self._slot, self.views.slot, side)

    def fetched(self, side: OptimizerSide) -> None:
        """A step has fetched parameters: the model will have them when it computes with them."""
        if self.mirror is not None:
            self.mirror.fetch()
        else:
            self.from_host(side)

    def from_host(self, side: OptimizerSide | None = None) -> None:
        """Copy what was fetched; where workers make local steps, for one optimizer or for all."""
        if self.mirror is not None:
            self.mirror.fetch()
            self.mirror.need_all()
        elif self.views.base is not self._fresh:
            phase = self._lane.enter(Phase.PULL)
            self._copy_slices(self.views.base, self._fresh, side if self.mode.local else None)
            self._lane.enter(phase)

    def _copy_slices(self, to: Tensor, of: Tensor, side: OptimizerSide | None) -> None:
        if side is None or not self._several:
            to.copy_(of)
            return
        for piece in side.layout.slices:
            to[piece.start : piece.stop].copy_(of[piece.start : piece.stop])

    def _await_slices(self) -> None:
        """Work that follows finds all parameters that are on their way."""
        if self.mirror is not None:
            self.mirror.need_all()

    def upload(self, index: int) -> None:
        """Copy one slice that was fetched to the model's device."""
        piece = self._space.layout.slices[index]
        fresh = self._fresh[piece.start : piece.stop]
        self.views.base[piece.start : piece.stop].copy_(fresh, non_blocking=True)

    def follow_switch(self, sides: Sequence[OptimizerSide]) -> None:
        """After a switch of the mode parameters may lie elsewhere. Only modes of one kind are switched."""
        if self._client.news.mode is self.mode:
            return
        self.mode = self._client.news.mode
        fresh = self._client.parameters
        if fresh.data_ptr() == self._fresh.data_ptr():
            return
        if self.views.base is self._fresh:
            self.views = replace(self.views, base=fresh, near=fresh)
            self._space.bind_to(fresh)
            self._client.forget_private_writes()
            for side in sides:
                side.stepper.memory = self.views
            self._space.guard.accept()
        else:
            _pin(fresh)
        self._fresh = fresh

    def assign(self) -> None:
        """Give the servers the model's present parameters."""
        self._await_slices()
        self._space.write_to(self.views.slot)
        self._space.check_finite(self.views.slot, "when it was assigned or loaded")
        self.to_host()
        self._client.exchange(new_assign())

    def rebind(self) -> None:
        """After an assign or a pull: let the model have what the servers answered."""
        self._client.forget_private_writes()
        self.from_host()
        self._space.bind_to(self.views.near)

    def fetch_copy(self, sides: Sequence[OptimizerSide]) -> Tensor:
        """The run's present parameters. What was fetched for training, from which the next push is measured,
        stays as it is."""
        self._await_slices()
        fetched, version = self.views.base.clone(), self._client.version
        self._client.exchange(new_pull())
        self.follow_switch(sides)
        self._client.settle()
        self.from_host()
        shown = self.views.base.clone()
        self.views.base.copy_(fetched)
        self._client.news.version = version
        return shown

    @contextlib.contextmanager
    def showing(self, shown: Tensor) -> Iterator[None]:
        """Within, the model's parameters are these."""
        self._space.bind_to(shown)
        try:
            yield
        finally:
            self._space.bind_to(self.views.near)


def _pin(memory: Tensor) -> None:
    """Let the GPU copy straight from and to shared memory."""
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
