"""Modes in which the worker makes local steps: between two pushes, or into shared memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.params import tensor_views
from paceline.worker.steppers.gradient_memory import check_dense
from paceline.worker.steppers.stepper import Request, Stepper, all_finite

__all__ = ["DeltaStepper", "ElasticStepper", "FreeStepper", "InPlaceStepper", "SumStepper"]


class SumStepper(Stepper):
    """Downpour, and any mode with a period: plain SGD between exchanges, gradients add up in the slot."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        views = tensor_views(self.memory.slot, self._layout)
        self._sums = {id(p): view for p, view in zip(self._parameters, views, strict=True)}
        self._names = {id(p): t.name for p, t in zip(self._parameters, self._layout.tensors, strict=True)}
        self._behind = 0

    @torch.no_grad()
    def _add_up(self) -> None:
        for group in self._optimizer.param_groups:
            trained = [p for p in group["params"] if p.grad is not None and id(p) in self._sums]
            if not trained:
                continue
            gradients = [check_dense(p.grad, self._names[id(p)]) for p in trained]
            sign = -1.0 if group.get("maximize") else 1.0
            torch._foreach_add_([self._sums[id(p)] for p in trained], gradients)
            torch._foreach_add_(trained, gradients, alpha=-sign * float(group["lr"]))

    def _step(self) -> Iterator[Request]:
        self._add_up()
        self._behind += 1
        fetch = self._behind >= self.mode.fetch_every
        if self.unsent >= self.mode.push_every:
            yield from self._exchange(fetch=fetch)
        elif fetch:
            yield self._request(push=False)
            self._fetched()

    def _exchange(self, *, fetch: bool = True) -> Iterator[Request]:
        yield self._request(fetch=fetch)
        torch._foreach_zero_(self._slot)
        if fetch:
            self._fetched()

    def overwritten(self) -> None:
        """The slot held parameters meanwhile."""
        super().overwritten()
        torch._foreach_zero_(self._slot)

    def _fetched(self) -> None:
        self._behind = 0
        self._take_fresh()


class DeltaStepper(Stepper):
    """local, diloco: the script's optimizer steps here; what it moved is the gradient of the outer one."""

    def _step(self) -> Iterator[Request]:
        self._local_step()
        if self.unsent >= self.mode.push_every:
            yield from self._exchange()

    def _exchange(self) -> Iterator[Request]:
        with torch.no_grad():
            for slot, base, near in zip(self._slot, self._base, self._near, strict=True):
                torch.sub(base, near, out=slot)
        request = self._request()
        yield request
        self._take_fresh()
        if not request.finite:  # its momentum is as broken as what it moved
            self._optimizer.state.clear()


class ElasticStepper(Stepper):
    """easgd, eamsgd: every period the worker and the centre are drawn together by the same difference.

    In the order of the authors' code: the gradient was taken at the value before the elastic step. With
    Nesterov momentum (eamsgd) the model stands where the gradient is taken, at x + momentum·v, and x is what
    is exchanged.
    """

    def _step(self) -> Iterator[Request]:
        if self.steps > 1 and (self.steps - 1) % self.mode.push_every == 0:
            sound = True
            for request in self._exchange(covers_step=False):
                sound = request.finite
                yield request
            if not sound:
                return  # the gradient was taken at what is not finite, and is not either
            self.unsent = 1
        self._local_step()

    def _exchange(self, *, covers_step: bool = True) -> Iterator[Request]:
        with torch.no_grad():
            torch._foreach_copy_(self._slot, self._near)
            ahead = self._ahead()
            for view, p in zip(tensor_views(self.memory.slot, self._layout), self._parameters, strict=True):
                if p in ahead:
                    view.sub_(ahead[p])
        request = self._request()
        yield replace(request, covers_step=covers_step or not request.finite)
        self._take_fresh()
        if not request.finite:
            self._optimizer.state.clear()
            return
        with torch.no_grad():
            for p, distance in ahead.items():
                p.add_(distance)

    def _ahead(self) -> dict[nn.Parameter, Tensor]:
        """How far the model stands ahead of the worker's value, parameter by parameter."""
        if not self.mode.local_nesterov:
            return {}
        found = {}
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                velocity = self._optimizer.state.get(p, {}).get("momentum_buffer")
                if velocity is not None:
                    found[p] = velocity * (-float(group["lr"]) * float(group["momentum"]))
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Start from the centre, as a replaced worker does.

        Checkpoints do not keep the worker's own parameters (older ones did): they hold steps that the centre
        of the checkpoint has not had, and whose samples are dealt again.
        """


class InPlaceStepper(Stepper):
    """hogwild: the optimizer writes into the shared memory, without locks; the servers only count.

    No server sees the gradients, so the worker itself refuses those that are not finite.
    """

    def _step(self) -> Iterator[Request]:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        finite = all_finite([g if g.layout == torch.strided else g.coalesce().values() for g in gradients])
        if finite:
            self._local_step()
        return self._exchange(finite=finite)

    def _exchange(self, *, finite: bool = True) -> Iterator[Request]:
        self.unsent = 0
        yield Request(fetch=False, finite=finite)


class FreeStepper(Stepper):
    """dogwild: the script's optimizer steps here; `flush`, called by another thread, carries what changed.

    The two threads share the parameters and no lock, so a write can get lost. A step counts as unsent from
    its end on: a flush during the step may have carried none of it, so another flush must follow.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sent = [near.clone() for near in self._near]

    def step(self) -> Iterator[Request]:
        """See Stepper."""
        self.steps += 1
        return self._step()

    def _step(self) -> Iterator[Request]:
        self._local_step()
        yield from ()

    def step_ended(self) -> None:
        """See Stepper."""
        self.unsent += 1

    def _exchange(self) -> Iterator[Request]:
        with torch.no_grad():
            torch._foreach_copy_(self._sent, self._near)
            for slot, base, sent in zip(self._slot, self._base, self._sent, strict=True):
                torch.sub(base, sent, out=slot)
        request = replace(self._request(), covers_step=False)
        yield request
        if not request.finite:
            self._take_fresh()
            self._optimizer.state.clear()
            return
        with torch.no_grad():  # what the others did meanwhile
            for near, base, sent in zip(self._near, self._base, self._sent, strict=True):
                near.add_(base - sent)
