"""What a stage does with the micro-batches of a call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad as plain_grad
from torch.utils import _pytree as pytree

from paceline.core.pipeline_spec import Action
from paceline.exceptions import UsageError
from paceline.worker.parallel.part_graph import Circumstances
from paceline.worker.parallel.stage_link import StageLink
from paceline.worker.parallel.stage_program import StageProgram

__all__ = ["GradientSum", "StageCall", "StageRunner"]

LossOf = Callable[[int, Any], Tensor]
"""The loss of a micro-batch, from what the model returned for it."""


class GradientSum:
    """Adds up gradients of parameters, micro-batch by micro-batch."""

    def __init__(self, count: int) -> None:
        self.total: list[Tensor | None] = [None] * count
        self._own = [False] * count
        """Whether a total is memory of nobody else: autograd may give one tensor for two gradients."""

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Those of the next micro-batch."""
        totals: list[Tensor] = []
        added: list[Tensor] = []
        for k, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            before = self.total[k]
            if before is None:
                self.total[k] = gradient
            elif self._own[k]:
                totals.append(before)
                added.append(gradient)
            else:
                self.total[k], self._own[k] = before + gradient, True
        if totals:
            torch._foreach_add_(totals, added)


class _Computed:
    """A micro-batch between its forward and its backward pass in a stage."""

    def __init__(self) -> None:
        self.received: list[Tensor] = []
        """Leaves for which the stage before wants a gradient."""
        self.inputs: list[Tensor] = []
        """Leaves for which the script wants one."""
        self.outputs: list[Any] = []
        """What has a gradient of what the stage passed on; in the last stage everything that it returned."""


class StageCall:
    """A call of a model, in one stage.

    Args:
        number: of the call.
        seed: of its random numbers.
        inputs: of each micro-batch, the tensors that the program takes.
        wanted: the places of those tensors for which the script wants a gradient.
    """

    def __init__(
        self,
        number: int,
        program: StageProgram,
        circumstances: Circumstances,
        seed: int,
        inputs: Sequence[Sequence[Tensor]],
        wanted: Sequence[int],
        parameters: Sequence[Tensor],
    ) -> None:
        self.number = number
        self.program = program
        self.circumstances = circumstances
        self.seed = seed
        self.inputs = [list(each) for each in inputs]
        self.wanted = [k for k, place in enumerate(program.inputs) if place in wanted]
        self.trained = [k for k in program.parameters if parameters[k].requires_grad]
        """The places of the parameters that it finds gradients of, among the model's."""
        self.parameters = [parameters[k] for k in self.trained]
        self.sum = GradientSum(len(self.trained))
        self.computed: dict[int, _Computed] = {}
        self.results: dict[int, list[Any]] = {}
        """Last stage: what the model returned for each micro-batch, without its structure."""
        self.spec: Any = None
        """Last stage: that structure."""
        self.input_gradients: dict[int, list[Tensor | None]] = {}
        """Of each micro-batch, in the order of `wanted`."""
        self.most_held = 0
        """The most micro-batches that were held at a time."""


class StageRunner:
    """Of one process.

    Args:
        before, behind: the links to the neighbours; the first stage has none before it, the last none behind.
    """

    def __init__(self, stage: int, before: StageLink | None, behind: StageLink | None) -> None:
        self.stage = stage
        self._before = before
        self._behind = behind

    def begin_call(self) -> None:
        """The call before is over in all stages."""
        for link in (self._before, self._behind):
            if link is not None:
                link.begin_call()

    def run(
        self,
        call: StageCall,
        actions: Sequence[Action],
        gradients: Sequence[Sequence[Tensor | None]] = (),
        loss_of: LossOf | None = None,
    ) -> None:
        """Do what the schedule says.

        Args:
            gradients: last stage: of each micro-batch, those of what the model returned …
            loss_of: … or what computes its loss.
        """
        try:
            for action in actions:
                if action.kind == "F":
                    self._forward(call, action.microbatch, loss_of)
                    call.most_held = max(call.most_held, len(call.computed))
                else:
                    given = gradients[action.microbatch] if gradients else None
                    self._backward(call, action.microbatch, given)
        except BaseException:
            for link in (self._before, self._behind):
                if link is not None:
                    try:
                        link.abort(call.number)
                    except Exception:  # the neighbour is gone, and the worker knows
                        continue
            raise

    def close(self) -> None:
        """Close the links."""
        for link in (self._before, self._behind):
            if link is not None:
                link.close()

    def _forward(self, call: StageCall, m: int, loss_of: LossOf | None) -> None:
        made = _Computed()
        needs = call.circumstances.needs_gradients
        arrived = [] if self._before is None else self._receive(call, m, made)
        with call.circumstances.apply():
            inputs = []
            for k, tensor in enumerate(call.inputs[m]):
                if needs and k in call.wanted:
                    leaf = tensor.detach().requires_grad_()
                    made.inputs.append(leaf)
                    tensor = leaf.clone()  # a model may write to what it gets
                inputs.append(tensor)
            call.program.draws.begin(call.seed, m)
            found = call.program(inputs, arrived)
            if self._behind is None and loss_of is not None:
                root = loss_of(m, found)
        if self._behind is not None:
            made.outputs = self._pass_on(call, m, found)
        else:
            values, call.spec = pytree.tree_flatten(found)
            call.results[m] = values
            made.outputs = values
            if loss_of is not None:
                made.outputs = [root]
                call.results[m] = [v.detach() if isinstance(v, Tensor) else v for v in values]
        call.inputs[m] = []
        if needs:
            call.computed[m] = made

    def _receive(self, call: StageCall, m: int, made: _Computed) -> list[Any]:
        assert self._before is not None
        passed = self._before.receive(call.number, f"F{m}")
        fresh: dict[int, Tensor] = {}
        with torch.enable_grad():
            for k, view in enumerate(passed.tensors):
                if k in passed.differentiable and call.circumstances.needs_gradients:
                    leaf = view.detach().requires_grad_()
                    made.received.append(leaf)
                    fresh[id(view)] = leaf.clone()  # into memory of its own
                else:
                    fresh[id(view)] = view.clone()
        leaves, spec = pytree.tree_flatten(passed.values)
        return list(
            pytree.tree_unflatten([fresh[id(x)] if isinstance(x, Tensor) else x for x in leaves], spec)
        )

    def _pass_on(self, call: StageCall, m: int, found: Any) -> list[Tensor]:
        assert self._behind is not None
        try:
            self._behind.send(call.number, f"F{m}", list(found))
        except TypeError as error:
            raise UsageError(
                f"stage {self.stage + 1} of the pipeline ends where the model has something that cannot be "
                f"passed on: {error}. Choose another place with --split-at."
            ) from None
        return [t for t in pytree.tree_leaves(list(found)) if _has_gradient(t)]

    def _backward(self, call: StageCall, m: int, given: Sequence[Tensor | None] | None) -> None:
        made = call.computed.pop(m)
        seeds: Sequence[Tensor | None]
        if self._behind is not None:
            arrived = self._behind.receive(call.number, f"B{m}").values
            seeds = [None if g is None else g.clone() for g in arrived]
        elif given is not None:
            seeds = given
        else:
            seeds = [torch.ones_like(made.outputs[0])]
        pairs = [
            (out, g)
            for out, g in zip(made.outputs, seeds, strict=True)
            if g is not None and _has_gradient(out)
        ]
        wanted = [*made.received, *made.inputs, *call.parameters]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            roots, gradients = zip(*pairs, strict=True)
            found = plain_grad(roots, wanted, gradients, allow_unused=True)
        received, inputs = len(made.received), len(made.inputs)
        if self._before is not None:
            self._before.send(call.number, f"B{m}", list(found[:received]))
        call.input_gradients[m] = list(found[received : received + inputs])
        call.sum.add(found[received + inputs :])


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
