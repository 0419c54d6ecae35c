"""Makes a prepared model compute its batches in parts, side by side (`--local`).

The script calls the model as ever. The outputs come back as one, and with them one node of the autograd
graph: when the script's backward pass reaches it, the replicas make theirs, again side by side, and their
gradients are added up in the order of the parts. Loss and gradients are those of the whole batch, and the
same bits in every run, because no replica adds to a gradient that another one adds to.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from paceline.exceptions import UsageError
from paceline.worker.parallel.batch_parts import Batch, BatchPart, join_outputs
from paceline.worker.parallel.part_graph import Circumstances

__all__ = ["PartsInProgress", "Replicas", "SplitForward", "check_can_split"]


class PartsInProgress(Protocol):
    """A forward pass of several parts."""

    outputs: list[list[Any]]
    """What the model returned for each part, without its structure."""
    spec: Any
    """That structure."""
    differentiable: list[bool]

    def backward(self, gradients: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
        """Of each part: the gradients of its inputs and of the trained parameters, from those of its outputs.
        Once."""


class Replicas(Protocol):
    """Several of a model, which compute at the same time."""

    def forward(
        self, model: int, parts: Sequence[BatchPart], circumstances: Circumstances
    ) -> PartsInProgress:
        """Compute the parts of a batch, each on its own replica.

        Args:
            model: its place among those that were prepared.
        """

    def close(self) -> None:
        """End threads and processes."""


class SplitForward:
    """Stands for a prepared model's `forward`.

    Args:
        index: the model's place among those that were prepared.
        count: into how many parts a batch is cut that has as many samples.
        option: that asks for it.
    """

    def __init__(self, model: nn.Module, index: int, replicas: Replicas, *, count: int, option: str) -> None:
        self._model = model
        self._index = index
        self._replicas = replicas
        self._count = count
        self._option = option

    def install(self) -> None:
        """From here on the model computes in parts."""
        vars(self._model)["forward"] = self

    def remove(self) -> None:
        """From here on it computes as ever."""
        vars(self._model).pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch = Batch(args, kwargs, self._option)
        count = min(self._count, batch.rows)
        if count < 2:
            return type(self._model).forward(self._model, *args, **kwargs)
        inputs = batch.inputs
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        needs = torch.is_grad_enabled() and bool(inputs or parameters)
        call = _Call(self._replicas, self._index, batch, count, self._option)
        if needs:
            return call.with_structure(_SplitCall.apply(call, *inputs, *parameters))
        return call.with_structure(call.forward(Circumstances.now(needs_gradients=False)))


class _Call:
    """One call of a split model, from forward to backward."""

    def __init__(self, replicas: Replicas, model: int, batch: Batch, count: int, option: str) -> None:
        self._replicas = replicas
        self._model = model
        self._batch = batch
        self._count = count
        self._option = option
        self._running: PartsInProgress | None = None
        self._values: list[Any] = []
        """What the model returned, with None in the place of tensors."""
        self._spec: Any = None
        self._is_tensor: list[bool] = []
        self._rows: list[int] = []

    def forward(self, circumstances: Circumstances) -> tuple[Tensor, ...]:
        """Compute all parts. Returns the tensors that the model returns."""
        parts = self._batch.parts(self._count, needs_gradients=circumstances.needs_gradients)
        self._rows = [part.rows for part in parts]
        running = self._replicas.forward(self._model, parts, circumstances)
        outputs, self._is_tensor = join_outputs(running.outputs, self._rows, self._option)
        self._spec, running.outputs = running.spec, []
        if circumstances.needs_gradients:
            self._running = running
        self._values = [None if t else o for o, t in zip(outputs, self._is_tensor, strict=True)]
        return tuple(o for o, t in zip(outputs, self._is_tensor, strict=True) if t)

    def differentiable(self) -> list[bool]:
        """Of each tensor: whether it has a gradient."""
        assert self._running is not None
        found = zip(self._running.differentiable, self._is_tensor, strict=True)
        return [differentiable for differentiable, is_tensor in found if is_tensor]

    def with_structure(self, tensors: Sequence[Tensor]) -> Any:
        """What the model returns. The tensors are not kept: they are part of the script's graph."""
        fresh = iter(tensors)
        pairs = zip(self._values, self._is_tensor, strict=True)
        return pytree.tree_unflatten([next(fresh) if t else value for value, t in pairs], self._spec)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs and the parameters."""
        running, self._running = self._running, None
        if running is None:
            raise RuntimeError(
                f"{self._option}: a second backward pass through the same outputs of a model. Its replicas "
                "have let go of what they computed: call the model again, or add the losses up and go "
                "backward once."
            )
        of_parts: list[list[Tensor | None]] = [[] for _ in self._rows]
        given = iter(gradients)
        for is_tensor in self._is_tensor:
            gradient = next(given) if is_tensor else None
            pieces = [None] * len(self._rows) if gradient is None else gradient.split(self._rows)
            for part, piece in zip(of_parts, pieces, strict=True):
                part.append(piece)
        found = running.backward(of_parts)
        inputs = len(self._batch.inputs)
        of_parameters = [gradients[inputs:] for gradients in found]
        return [*self._batch.join_gradients([g[:inputs] for g in found]), *_added(of_parameters)]


class _SplitCall(torch.autograd.Function):
    """The node that stands for all parts in the script's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the parts."""
        found = call.forward(Circumstances.now(needs_gradients=True))
        ctx.call = call
        ctx.set_materialize_grads(False)
        kept = zip(found, call.differentiable(), strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, differentiable in kept if not differentiable))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Have the parts go backward."""
        return None, *ctx.call.backward(gradients)


def _added(of_parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """The sum of the parts' gradients of each parameter, in the order of the parts."""
    total = list(of_parts[0])
    fresh = [False] * len(total)  # autograd may give one tensor for two gradients: those are not added to
    for gradients in of_parts[1:]:
        for i, gradient in enumerate(gradients):
            before = total[i]
            if gradient is None:
                continue
            if before is None:  # a copy: it may lie in memory that a process writes again
                total[i], fresh[i] = gradient.clone(), True
            elif fresh[i]:
                before.add_(gradient)
            else:
                total[i], fresh[i] = before + gradient, True
    return total


def check_can_split(models: Sequence[nn.Module], option: str) -> None:
    """UsageError if one of the models cannot be computed in parts."""
    for model in models:
        name = type(model).__name__
        if isinstance(model, torch.jit.ScriptModule):
            raise UsageError(f"{option}: {name} is a TorchScript module, which cannot be replicated.")
        if getattr(model, "_compiled_call_impl", None) is not None or name == "OptimizedModule":
            raise UsageError(
                f"{option}: {name} is compiled, and a compiled model cannot be called by several threads. "
                "Leave torch.compile out, or the option."
            )
        for where, module in model.named_modules():
            if "forward" in vars(module):
                raise UsageError(
                    f"{option}: {where or name} has a forward() of its own that is not its class's, and it "
                    "would lead every replica to the same module. Make it a method of a class."
                )
        for where, p in model.named_parameters():
            if p.device.type != "cpu":
                raise UsageError(
                    f"{option} computes on cores of the CPU, and parameter {where!r} is on {p.device}: leave "
                    "the option out, or keep the model on the CPU."
                )
