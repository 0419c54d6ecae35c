"""Replicas of a model in processes of their own (`--local processes:K`).

The worker computes the first part itself, and forks a process for every other one. Before each forward pass
it writes parameters and buffers into memory that all of them map, so every part is computed from the same;
gradients come back in the same way, and the worker adds them up.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.exceptions import UsageError
from paceline.params import dtype_named
from paceline.worker.parallel.batch_parts import BatchPart
from paceline.worker.parallel.handed_values import from_handed, handed
from paceline.worker.parallel.helper_process import HelperProcess
from paceline.worker.parallel.part_graph import Circumstances, PartGraph
from paceline.worker.parallel.shared_state import SharedState
from paceline.worker.parallel.thread_replicas import Replica
from paceline.worker.randomness import derive

__all__ = ["ProcessReplicas"]

T = TypeVar("T")


class ProcessReplicas:
    """The first replica is the worker's own, every other one a process, forked at the first call of a model:
    it has the models as the script has them then.

    Args:
        models: those that were prepared.
        count: number of replicas of each.
    """

    def __init__(self, models: Sequence[nn.Module], count: int, *, deadline_s: float) -> None:
        self._models = models
        self._count = count
        self._deadline_s = deadline_s
        self._state: SharedState | None = None
        self._helpers: list[HelperProcess] = []
        self._calls = 0
        self._dropped: list[int] = []
        """Calls that nobody can go backward through any more."""

    def _begin(self) -> SharedState:
        state = SharedState(self._models)
        for k in range(1, self._count):
            begin = partial(_begin_serving, self._models, state, k)
            name = f"process {k} of --local processes:{self._count}"
            self._helpers.append(HelperProcess(name, begin, deadline_s=self._deadline_s))
        return state

    def forward(
        self, model: int, parts: Sequence[BatchPart], circumstances: Circumstances
    ) -> "_ProcessParts":
        """See `Replicas`."""
        self._state = self._state or self._begin()
        self._calls += 1
        autocast = circumstances.autocast
        said = {
            **self._state.write(model),
            "call": self._calls,
            "drop": [self._dropped.pop() for _ in range(len(self._dropped))],
            "needs_gradients": circumstances.needs_gradients,
            "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        }
        messages = [(said | arguments, tensors) for arguments, tensors in map(_arguments, parts[1:])]
        replica = Replica(self._models[model], first=True)
        graph = PartGraph(replica.parameters)
        first = parts[0]
        helpers = self._helpers[: len(messages)]
        outputs, answers = _ask_all(
            helpers,
            messages,
            lambda: graph.forward(replica, first.arguments(), first.inputs, circumstances),
        )
        running = _ProcessParts(
            helpers,
            self._calls,
            graph,
            [outputs, *(from_handed(body["outputs"], tensors) for body, tensors in answers)],
            [graph.differentiable(), *(body["differentiable"] for body, _ in answers)],
        )
        weakref.finalize(running, self._dropped.append, self._calls).atexit = False
        return running

    def close(self) -> None:
        """End the processes."""
        for helper in self._helpers:
            helper.close()
        if self._state is not None:
            self._state.close()


class _ProcessParts:
    def __init__(
        self,
        helpers: Sequence[HelperProcess],
        call: int,
        graph: PartGraph,
        outputs: list[list[Any]],
        differentiable: list[list[bool]],
    ) -> None:
        self._helpers = helpers
        self._call = call
        self._graph = graph
        self.outputs = outputs
        self.spec = graph.spec
        self.differentiable = [any(d) for d in zip(*differentiable, strict=True)]

    def backward(self, gradients: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
        messages = []
        for given in gradients[1:]:
            tensors: list[Tensor] = []
            messages.append(({"backward": self._call, "gradients": handed(list(given), tensors)}, tensors))
        first, answers = _ask_all(self._helpers, messages, lambda: self._graph.backward(gradients[0]))
        return [first, *(from_handed(body["gradients"], tensors) for body, tensors in answers)]


def _ask_all(
    helpers: Sequence[HelperProcess], messages: Sequence[tuple[Any, Sequence[Tensor]]], own: Callable[[], T]
) -> tuple[T, list[tuple[Any, list[Tensor]]]]:
    """Ask the processes, do the worker's own part meanwhile, and collect the answers.

    Whatever fails, every answer is awaited: the next question must not find an old one.
    """
    for helper, (body, tensors) in zip(helpers, messages, strict=True):
        helper.ask(body, tensors)
    answers: list[tuple[Any, list[Tensor]]] = []
    failures: list[Exception] = []
    try:
        done = own()
    finally:
        for helper in helpers:
            try:
                answers.append(helper.answer())
            except Exception as error:
                failures.append(error)
    if failures:
        raise failures[0]
    return done, answers


def _begin_serving(
    models: Sequence[nn.Module], state: SharedState, number: int
) -> Callable[[Any, list[Tensor]], tuple[Any, Sequence[Tensor]]]:
    """In a new process: what answers the worker's messages there."""
    torch.manual_seed(derive(torch.get_rng_state().numpy().tobytes(), number))
    for model in models:
        vars(model).pop("forward", None)
    state.bind()
    return _Served(state).serve


class _Served:
    """What a forked process answers."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._graphs: dict[int, PartGraph] = {}

    def serve(self, said: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, Sequence[Tensor]]:
        """Answer a message."""
        found: list[Tensor] = []
        if "backward" in said:
            graph = self._graphs.pop(said["backward"])
            gradients = graph.backward(from_handed(said["gradients"], tensors))
            return {"gradients": handed(gradients, found)}, found
        for call in said["drop"]:
            self._graphs.pop(call, None)
        model = self._state.follow(said)
        tensors = [tensor.clone() for tensor in tensors]  # what is kept for backward must stay
        inputs = [tensors[i].requires_grad_() for i in said["wanted"]]
        args, kwargs = from_handed(said["arguments"], tensors)
        autocast = None if said["autocast"] is None else dtype_named(said["autocast"])
        circumstances = Circumstances(said["needs_gradients"], autocast)
        graph = PartGraph([p for p in model.parameters() if p.requires_grad])
        forward = partial(type(model).forward, model)
        outputs = graph.forward(forward, (tuple(args), kwargs), inputs, circumstances)
        if circumstances.needs_gradients:
            self._graphs[said["call"]] = graph
        return {"outputs": handed(outputs, found), "differentiable": graph.differentiable()}, found


def _arguments(part: BatchPart) -> tuple[dict[str, Any], list[Tensor]]:
    """A part's arguments as a message."""
    tensors: list[Tensor] = []
    args, kwargs = part.arguments()
    try:
        arguments = handed([list(args), kwargs], tensors)
    except TypeError as error:
        raise UsageError(
            f"--local processes: the model's arguments: {error}. Call the model with tensors, numbers, "
            "texts, and lists, tuples and dicts of these; or use --local threads, which hands anything over."
        ) from None
    wanted = {id(x) for x in part.inputs}
    return {
        "arguments": arguments,
        "wanted": [i for i, t in enumerate(tensors) if id(t) in wanted],
    }, tensors
