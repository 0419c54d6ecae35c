"""Replicas of a model in threads of one process (`--local threads:K`)."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from paceline.worker.parallel.batch_parts import BatchPart
from paceline.worker.parallel.module_copy import copy_modules
from paceline.worker.parallel.part_graph import Circumstances, PartGraph

__all__ = ["Replica", "ThreadReplicas"]

T = TypeVar("T")


class Replica:
    """A copy of a model's modules that shares its parameters: their memory, but not their gradients.

    Made anew for every call, so that it is what the script made of the model: training or not, which
    parameters are frozen, hooks. Buffers of the first one are the model's own, those of the others copies
    that nobody sees again: what BatchNorm remembers comes from the first part, as with torch's DataParallel.
    """

    def __init__(self, model: nn.Module, *, first: bool) -> None:
        self._original = model
        self._first = first
        parameters = {id(p): _alias(p) for p in model.parameters()}
        self.parameters = [parameters[id(p)] for p in model.parameters() if p.requires_grad]
        """Those for which a gradient is wanted."""
        buffers = {id(b): b if first else b.clone() for b in model.buffers()}
        self._modules = copy_modules(model, parameters, buffers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without the model's own hooks: those are for the whole batch."""
        root = self._modules[id(self._original)]
        output = type(root).forward(root, *args, **kwargs)
        if self._first:
            self._give_buffers_back()
        return output

    def _give_buffers_back(self) -> None:
        """A module may have got other buffers instead of writing to those it had."""
        for module in self._original.modules():
            theirs, own = vars(self._modules[id(module)])["_buffers"], vars(module)["_buffers"]
            for name, buffer in theirs.items():
                if own.get(name) is not buffer:
                    own[name] = buffer


class ThreadReplicas:
    """The first replica computes in the calling thread, every other one in a thread of its own.

    Args:
        models: those that were prepared.
        count: number of replicas of each.
    """

    def __init__(self, models: Sequence[nn.Module], count: int) -> None:
        self._models = models
        self._pool = ThreadPoolExecutor(count - 1, thread_name_prefix="paceline-local")

    def forward(self, model: int, parts: Sequence[BatchPart], circumstances: Circumstances) -> "_ThreadParts":
        """See `Replicas`."""
        replicas = [Replica(self._models[model], first=k == 0) for k in range(len(parts))]
        graphs = [PartGraph(replica.parameters) for replica in replicas]
        outputs = self.side_by_side(
            [
                partial(graph.forward, replica, part.arguments(), part.inputs, circumstances)
                for graph, replica, part in zip(graphs, replicas, parts, strict=True)
            ]
        )
        return _ThreadParts(self, graphs, outputs)

    def side_by_side(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Call all at once, and raise what the first of them raises, when all are over."""
        others: list[Future[T]] = [self._pool.submit(call) for call in calls[1:]]
        try:
            first = calls[0]()
        finally:
            for other in others:
                other.exception()
        return [first, *(other.result() for other in others)]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class _ThreadParts:
    def __init__(self, replicas: ThreadReplicas, graphs: list[PartGraph], outputs: list[list[Any]]) -> None:
        self._replicas = replicas
        self._graphs = graphs
        self.outputs = outputs
        self.spec = graphs[0].spec
        self.differentiable = [any(d) for d in zip(*(g.differentiable() for g in graphs), strict=True)]

    def backward(self, gradients: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
        pairs = zip(self._graphs, gradients, strict=True)
        return self._replicas.side_by_side([partial(graph.backward, given) for graph, given in pairs])


def _alias(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
