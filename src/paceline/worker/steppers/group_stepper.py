"""What a worker in a group does at optimizer.step().

The members average their gradients, weighed by samples. Then, in allreduce, everybody makes the same step
with its own optimizer; in a hybrid mode the root makes a step of the mode between the groups, and gives the
parameters that come of it to the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.collective import Group, ring_bytes, shared_bytes
from paceline.comm import Region
from paceline.core.modes import ModeSpec
from paceline.params import Layout, tensor_views
from paceline.worker.account import Account
from paceline.worker.steppers.factory import make_stepper
from paceline.worker.steppers.gradient_memory import GradientMemory
from paceline.worker.steppers.gradient_stepper import GradientStepper
from paceline.worker.steppers.stepper import Request, Stepper, StepperMemory

__all__ = ["GroupMemory", "GroupRun", "GroupStepper"]


class GroupRun(Protocol):
    """What a member knows about the run, and is told about it."""

    def cut_next(self) -> int:
        """The version of a checkpoint that this step ends with, 0 if there is none. On the root."""

    def save_asked(self) -> bool:
        """Whether the run has asked the root for its part of a checkpoint since the last time."""

    def owe_save(self, cut: int = 0) -> None:
        """This member's part of a checkpoint (of version `cut`) is due after this step."""

    def version(self) -> int:
        """The version that this member's parameters are of."""

    def samples(self) -> int:
        """Samples of the run's updates so far, as this member knows."""

    def done(self) -> int | None:
        """Samples of all epochs that are through, as this member knows."""

    def told_by_root(self, version: int, samples: int, done: int | None) -> None:
        """The root says how far the run is."""

    def updated_together(self, samples: int) -> None:
        """Every member has made the run's next update by itself, of so many samples."""

    def moved(self, out: int, back: int, *, wire: bool) -> None:
        """A step moved so many bytes within the group, over sockets (`wire`) or through memory."""

    def stop_told(self) -> bool:
        """Whether the run ends early, as the root was told."""

    def end_early(self) -> None:
        """All members have heard from the root that the run ends early."""


@dataclass(frozen=True)
class GroupMemory:
    """A member's gradient and parameters, on its model's device and in the memory that its group sees.

    Where the model is on the host, the two are the same.
    """

    region: Region
    gradient: Tensor
    host_gradient: Tensor
    near: Tensor
    host_near: Tensor

    @classmethod
    def of(cls, region: Region, layout: Layout, device: torch.device) -> "GroupMemory":
        """Over a region of twice the layout's size: the gradient, and behind it the parameters."""
        memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
        gradient, near = memory[: layout.nbytes], memory[layout.nbytes :]
        if device.type == "cpu":
            return cls(region, gradient, gradient, near, near)
        return cls(region, torch.zeros_like(gradient, device=device), gradient, near.to(device), near)

    def averages(self) -> None:
        """Let the group see the gradient."""
        if self.gradient is not self.host_gradient:
            self.host_gradient.copy_(self.gradient)

    def averaged(self) -> None:
        """Take the group's gradient."""
        if self.gradient is not self.host_gradient:
            self.gradient.copy_(self.host_gradient)

    def show(self) -> None:
        """Let the others see the parameters."""
        if self.near is not self.host_near:
            self.host_near.copy_(self.near)

    def take(self) -> None:
        """Take what the root has shown."""
        if self.near is not self.host_near:
            self.near.copy_(self.host_near)


class GroupStepper(Stepper):
    """One member's side of a mode with groups."""

    def __init__(
        self,
        group: Group,
        run: GroupRun,
        account: Account,
        mine: GroupMemory,
        mode: ModeSpec,
        layout: Layout,
        memory: StepperMemory,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        local_step: Callable[[], Any],
    ) -> None:
        super().__init__(mode, layout, memory, parameters, optimizer, local_step)
        self._group = group
        self._run, self._account = run, account
        self._mine = mine
        self._inner: Stepper | None = None
        if mode.inner is not None and group.is_root:
            self._inner = make_stepper(mode.inner, layout, memory, parameters, optimizer, local_step)
        views = tensor_views(mine.gradient, layout)
        self.gradients = (
            self._inner.gradients
            if isinstance(self._inner, GradientStepper)
            else GradientMemory(parameters, views, names=[t.name for t in layout.tensors])
        )

    def _step(self) -> Iterator[Request]:
        missing, finite = self.gradients.collect()
        if self._group.size > 1:
            self._mine.averages()  # before they meet: from then on the others read it
        samples, counts = self._account.tally()
        cut = self._run.cut_next() if self._group.is_root else 0
        facts = self._group.meet(
            "calls optimizer.step()",
            samples=samples,
            counts=counts,
            finite=finite,
            missing=missing,
            cut=cut,
            stop=self._run.stop_told(),
            logged=self._account.take_logged(),
        )
        if facts[0]["stop"]:
            self._run.end_early()
        if self._group.is_root:  # whose pushes tell it
            self._account.log_samples(sum(fact["logged"] for fact in facts))
        heavy = [fact for fact in facts if fact["counts"]]
        known = all(fact["samples"] > 0 for fact in heavy)
        self._account.agreed(sum(fact["samples"] for fact in heavy))
        cut = facts[0]["cut"]
        if cut:
            self._run.owe_save(cut)
        if all(fact["finite"] for fact in heavy):
            absent = set(heavy[0]["missing"]).intersection(*(fact["missing"] for fact in heavy[1:]))
            finite = self._average(
                [(fact["samples"] if known else 1) if fact["counts"] else 0 for fact in facts], absent
            )
        else:
            finite = False
        if self.mode.inner is None:
            if finite:
                self._run.updated_together(sum(fact["samples"] for fact in heavy))
            yield from self._step_together(finite, cut > 0)
        else:
            yield from self._step_for_all(finite)

    def _average(self, weights: list[int], absent: set[int]) -> bool:
        if self._group.size > 1:
            finite = self._group.mean(weights)
            self._mine.averaged()
            around = ring_bytes(self._layout.tensor_bytes, self._group.size)
            self._run.moved(around, around, wire=self._group.on_wire)
        else:
            finite = True
        self.gradients.received(i for i in range(len(self._parameters)) if i not in absent)
        return finite

    def _step_together(self, finite: bool, cut: bool) -> Iterator[Request]:
        """allreduce: everybody has the same gradient, and the same optimizer."""
        if finite:
            self._local_step()
        self.unsent = 0
        if self._group.is_root:
            if cut:
                self._mine.show()
            yield Request(fetch=False, finite=finite, carries="parameters" if cut else "nothing")

    def _step_for_all(self, finite: bool) -> Iterator[Request]:
        """A hybrid mode: the root steps, with its group's gradient for its own."""
        if self._inner is not None:
            if finite:
                yield from self._inner.step()
            elif isinstance(self._inner, GradientStepper):
                yield Request(finite=False)
            else:
                self._account.refuse()
        self.share()
        given, got = shared_bytes(self._layout.tensor_bytes, self._group.size, root=self._group.is_root)
        self._run.moved(given, got, wire=self._group.on_wire)

    def share(self) -> None:
        """Everybody goes on from the root's parameters."""
        if self._group.is_root:
            self._mine.show()
            save = self._run.save_asked()
            news = self._group.share(
                save=save,
                version=self._run.version(),
                samples=self._run.samples(),
                done=self._run.done(),
            )
        else:
            news = self._group.share()
            self._mine.take()
            self._run.told_by_root(news["version"], news["samples"], news["done"])
        if news["save"]:
            self._run.owe_save()

    def end_epoch(self, epoch: int) -> None:
        """The script has read an epoch to its end. The group does that together, and goes on from the same
        parameters. (Where an epoch begins one member may be alone: its script only looks at a batch.)"""
        facts = self._group.meet(f"ends epoch {epoch + 1} of its loader", stop=self._run.stop_told())
        if facts[0]["stop"]:
            self._run.end_early()
        if self.mode.inner is not None:
            self.share()

    def flush(self) -> Iterator[Request]:
        """Push what no push has covered."""
        return self._inner.flush() if self._inner is not None else iter(())

    def caught_up(self) -> None:
        """It rested, with all its steps pushed, and fresh parameters came meanwhile."""
        if self._inner is not None:
            self._inner.caught_up()

    def overwritten(self) -> None:
        """The parameters were assigned: take them over, and forget what was on its way."""
        self.gradients.overwritten()
        if self._inner is not None:
            self._inner.overwritten()
        elif self.memory.near is not self.memory.base:
            self._take_fresh()

    def state(self) -> dict[str, Tensor]:
        """The root's, of the mode between the groups."""
        return self._inner.state() if self._inner is not None else {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from `state()`. What another root left is of no use here."""
        if self._inner is not None:
            self._inner.load(state)

    def _exchange(self) -> Iterator[Request]:
        return self.flush()
