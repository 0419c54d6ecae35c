"""Stands for the `forward` of a model in stages.

`model(x)` computes all forward passes; when the script's loss goes backward, all backward passes follow. With
`paceline.loss_of` the loss of a micro-batch is known as soon as its last stage is computed, so that its
backward pass can begin at once (1F1B).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.core.pipeline_spec import PipelineSpec
from paceline.exceptions import UsageError
from paceline.worker.parallel.batch_parts import Batch
from paceline.worker.parallel.part_graph import Circumstances
from paceline.worker.parallel.pipeline_stages import PipelineStages
from paceline.worker.parallel.split_model import SplitForward

__all__ = ["StagedForward", "loss_of"]

log = logging.getLogger(__name__)

Loss = Callable[[Any, Any], Tensor]

_CHECKED_FIRST, _CHECKED_EVERY = 2, 100


def loss_of(model: nn.Module, loss: Loss, inputs: tuple[Any, ...], target: Any) -> Tensor:
    """See `paceline.loss_of`."""
    forward = vars(model).get("forward")
    if isinstance(forward, StagedForward):
        return forward.loss_of(loss, inputs, target)
    return loss(model(*inputs), target)


class StagedForward:
    """Of one model.

    Args:
        index: the model's place among those that were prepared.
        split: computes a call with all forward passes first.
    """

    def __init__(
        self, model: nn.Module, index: int, stages: PipelineStages, spec: PipelineSpec, split: SplitForward
    ) -> None:
        self._model = model
        self._index = index
        self._stages = stages
        self._spec = spec
        self._split = split
        self._asked: tuple[Loss, Any] | None = None
        """The loss and the target that the call which follows is for."""
        self._shares: dict[Loss, _Shares] = {}

    def install(self) -> None:
        """From here on the model computes in stages."""
        vars(self._model)["forward"] = self

    def remove(self) -> None:
        """From here on it computes as ever."""
        vars(self._model).pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked, self._asked = self._asked, None
        if asked is not None:
            return self._loss(*asked, args, kwargs)
        if self._spec.schedule == "1f1b" and torch.is_grad_enabled() and self._model.training:
            raise UsageError(
                "--pipeline-schedule 1f1b: the loss of a micro-batch must be known before the next one is "
                "computed. Call loss = paceline.loss_of(model, criterion, x, target=y) in place of "
                "criterion(model(x), y), or use --pipeline-schedule gpipe."
            )
        return self._split(*args, **kwargs)

    def loss_of(self, loss: Loss, inputs: tuple[Any, ...], target: Any) -> Tensor:
        """The loss of a batch; if gradients are wanted they are computed with it."""
        self._asked = loss, target
        try:
            found: Tensor = self._model(*inputs)  # with its hooks
        finally:
            self._asked = None
        return found

    def _loss(self, loss: Loss, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        batch = Batch(args, kwargs, str(self._spec))
        targets = Batch((target,), {}, str(self._spec))
        if targets.rows != batch.rows:
            raise UsageError(
                f"paceline.loss_of: the inputs have {batch.rows} samples and the target has {targets.rows}. "
                "Both need a row for every sample, in their first dimension."
            )
        count = min(self._spec.most_microbatches, batch.rows)
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        if count < 2 or not torch.is_grad_enabled() or not (parameters or batch.inputs):
            return loss(self._split(*args, **kwargs), target)
        shares = self._shares.setdefault(loss, _Shares(loss, self._spec))
        if self._spec.schedule == "gpipe" or not shares.usable(targets):
            return shares.check(self._split(*args, **kwargs), targets, count)
        call = _LossCall(self._stages, self._index, batch, targets, count, shares)
        found: Tensor = _LossNode.apply(call, *batch.inputs, *parameters)
        return found


class _Shares:
    """Whether the loss of a batch is the mean of what it is for the micro-batches, or the sum.

    Found by trying, with the first batches and now and then: those are computed with all forward passes
    first, which is right for any loss.
    """

    def __init__(self, loss: Loss, spec: PipelineSpec) -> None:
        self._loss = loss
        self._spec = spec
        self._adds: bool | None = None
        """Whether the loss is a sum over samples; None: not known yet."""
        self._separable = True
        self._calls = 0

    def usable(self, targets: Batch) -> bool:
        """Whether the next batch can be computed micro-batch by micro-batch."""
        self._calls += 1
        if not self._separable or targets.inputs:
            return False
        return self._adds is not None and self._calls > _CHECKED_FIRST and self._calls % _CHECKED_EVERY != 0

    def of_part(self, found: Any, target: Any, share: float) -> Tensor:
        """A micro-batch's share in the loss.

        Args:
            share: in the samples of the batch.
        """
        value = self._loss(found, target)
        return value if self._adds else value * share

    def check(self, found: Any, targets: Batch, count: int) -> Tensor:
        """The loss of a batch that was computed as a whole; learns from it what its shares are."""
        (target,), _ = targets.parts(1, needs_gradients=False)[0].arguments()
        whole = self._loss(found, target)
        if self._spec.schedule == "gpipe" or not self._separable:
            return whole
        if whole.dim():
            raise UsageError(
                f"paceline.loss_of: the loss has the shape {list(whole.shape)}; it must be one number."
            )
        why = None
        if targets.inputs or _has_other_leaves(whole):
            why = "it depends on trained tensors that are not the model's output"
        else:
            mean, added = self._by_parts(found, targets, count)
            value = float(whole.detach())
            fits = [abs(value - each) <= 1e-4 * max(abs(each), 1e-6) for each in (mean, added)]
            known = [adds for adds, fit in zip((False, True), fits, strict=True) if fit]
            if not known or (self._adds is not None and self._adds not in known):
                why = (
                    f"that of the batch, {value:.6g}, is neither the mean over samples of what it is for the "
                    f"micro-batches ({mean:.6g}) nor their sum ({added:.6g})"
                )
            elif len(known) == 1:
                self._adds = known[0]
        if why is not None:
            self._refuse(why)
        return whole

    def _refuse(self, why: str) -> None:
        said = f"paceline.loss_of: the loss cannot be computed micro-batch by micro-batch: {why}."
        if self._spec.schedule == "1f1b" or self._adds is not None:
            raise UsageError(
                f"{said} Use --pipeline-schedule gpipe, which computes the loss from the whole batch."
            )
        self._separable = False
        log.warning("%s All forward passes are computed first (gpipe).", said)

    @torch.no_grad()
    def _by_parts(self, found: Any, targets: Batch, count: int) -> tuple[float, float]:
        """The mean over samples, and the sum, of the micro-batches' losses."""
        outputs = Batch((found,), {}, str(self._spec)).parts(count, needs_gradients=False)
        mean = added = 0.0
        for out, target in zip(outputs, targets.parts(count, needs_gradients=False), strict=True):
            value = float(self._loss(out.arguments()[0][0], target.arguments()[0][0]))
            mean += value * out.rows / targets.rows
            added += value
        return mean, added


class _LossCall:
    """One batch, from its loss to its gradients."""

    def __init__(
        self, stages: PipelineStages, index: int, batch: Batch, targets: Batch, count: int, shares: _Shares
    ) -> None:
        self._stages = stages
        self._index = index
        self._batch = batch
        self._targets = targets
        self._count = count
        self._shares = shares
        self._gradients: list[Tensor | None] | None = None

    def forward(self) -> Tensor:
        """The loss; the gradients are kept."""
        parts = self._batch.parts(self._count, needs_gradients=True)
        targets = self._targets.parts(self._count, needs_gradients=False)
        found: dict[int, Tensor] = {}

        def of_part(m: int, output: Any) -> Tensor:
            (target,), _ = targets[m].arguments()
            value = self._shares.of_part(output, target, parts[m].rows / self._batch.rows)
            found[m] = value.detach()
            return value

        running = self._stages.loss(self._index, parts, Circumstances.now(needs_gradients=True), of_part)
        inputs = len(self._batch.inputs)
        of_inputs = self._batch.join_gradients([g[:inputs] for g in running.gradients])
        self._gradients = [*of_inputs, *running.gradients[0][inputs:]]
        return torch.stack([found[m] for m in sorted(found)]).sum()

    def backward(self, gradient: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the inputs and of the trained parameters."""
        found, self._gradients = self._gradients, None
        if found is None:
            raise RuntimeError("a second backward pass from the same paceline.loss_of: call it again.")
        if float(gradient) == 1.0:
            return found
        return [None if g is None else g * gradient.to(g.dtype) for g in found]


class _LossNode(torch.autograd.Function):
    """The node that stands for model and loss in the script's graph."""

    @staticmethod
    def forward(ctx: Any, call: _LossCall, *tensors: Tensor) -> Tensor:
        """Compute the loss and the gradients."""
        ctx.call = call
        return call.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Hand out the gradients."""
        return None, *ctx.call.backward(gradient)


def _has_other_leaves(loss: Tensor) -> bool:
    """Whether a loss has gradients for more than what the model returned."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name() == "_SplitCallBackward":
            continue
        if hasattr(node, "variable"):
            return True
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
    return False
