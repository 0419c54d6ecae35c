"""The part of a model's graph that one stage computes, as a module."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.worker.randomness import derive

__all__ = ["Draws", "StageProgram", "inputs_of", "stages_of"]

_DRAWS = "paceline_draws"


class Draws(nn.Module):
    """Lets an operation that draws random numbers draw the same ones however the model is cut: its numbers
    follow from the call, the micro-batch and its place in the model."""

    def __init__(self) -> None:
        super().__init__()
        self._call = b""
        self._microbatch = 0

    def begin(self, seed: int, microbatch: int) -> None:
        """What is computed next. Stages draw from torch's global generator, which is the worker's to keep."""
        self._call = seed.to_bytes(8)
        self._microbatch = microbatch
        self(-1)

    def forward(self, place: int) -> None:
        """Before the operation at this place of the graph."""
        torch.default_generator.manual_seed(derive(self._call, self._microbatch, place))


class StageProgram:
    """Computes the part of one stage.

    Args:
        model: copy of the model in this process.
        stages: of each node of the graph.
        draws: the places of nodes that draw random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        stages: Mapping[fx.Node, int],
        stage: int,
        draws: Sequence[int],
    ) -> None:
        mine = [n for n in graph.nodes if stages.get(n) == stage and n.op != "placeholder"]
        is_last = stage == max(stages.values())
        self.inputs = inputs_of(graph, stages, stage)
        """The places of those arguments, among the tensors of the call, that it uses."""
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        received = _crossing(graph, stages, stage - 1) if stage else []
        sent = [] if is_last else _crossing(graph, stages, stage)
        self.draws = Draws()
        part = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        for n in (*(placeholders[k] for k in self.inputs), *received):
            known[n] = part.placeholder(n.name)
        for n in graph.nodes:  # parameters that the model's own forward uses: any stage may
            if n.op == "get_attr" and any(user in stages and stages[user] == stage for user in n.users):
                known[n] = part.node_copy(n)
        places = {n: k for k, n in enumerate(graph.nodes)}
        for n in mine:
            if n.op in ("get_attr", "output"):
                continue
            if places[n] in draws:
                part.call_module(_DRAWS, (places[n],))
            known[n] = part.node_copy(n, lambda old: known[old])
        if is_last:
            end = next(n for n in graph.nodes if n.op == "output")
            part.node_copy(end, lambda old: known[old])
        else:
            part.output(tuple(known[n] for n in sent))
        attributes: dict[str, Any] = {_DRAWS: self.draws}
        for n in part.nodes:
            if n.op in ("call_module", "get_attr") and n.target != _DRAWS:
                attributes[n.target] = _attribute(model, n.target)
        self._module = fx.GraphModule(attributes, part)
        used = {id(p) for value in attributes.values() for p in _parameters_of(value)}
        self.parameters = [k for k, p in enumerate(model.parameters()) if id(p) in used]
        """The places of the parameters that it uses, among the model's."""
        held = {id(b) for value in attributes.values() for b in _buffers_of(value)}
        self.buffers = [k for k, b in enumerate(model.buffers()) if id(b) in held]
        """The places of the buffers that it uses."""

    def __call__(self, inputs: Sequence[Tensor], received: Sequence[Any]) -> Any:
        """Compute. Returns what goes to the next stage, a tuple; the last stage: what the model returns."""
        return self._module(*inputs, *received)


def stages_of(graph: fx.Graph, cuts: Sequence[int]) -> dict[fx.Node, int]:
    """The stage of each node but the model's arguments.

    Args:
        cuts: the places of the nodes that stages begin with, from the second stage on.
    """
    found, stage = {}, 0
    for place, node in enumerate(graph.nodes):
        while stage < len(cuts) and place >= cuts[stage]:
            stage += 1
        if node.op not in ("placeholder", "get_attr"):
            found[node] = stage
    return found


def inputs_of(graph: fx.Graph, stages: Mapping[fx.Node, int], stage: int) -> list[int]:
    """The places of the call's tensors that a stage uses."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return [k for k, n in enumerate(placeholders) if any(stages[user] == stage for user in n.users)]


def _crossing(graph: fx.Graph, stages: Mapping[fx.Node, int], stage: int) -> list[fx.Node]:
    """What is computed up to a stage and used behind it."""
    return [
        n
        for n in graph.nodes
        if n in stages and stages[n] <= stage and any(stages[user] > stage for user in n.users)
    ]


def _attribute(model: nn.Module, path: str) -> Any:
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _parameters_of(value: Any) -> list[Tensor]:
    return [*value.parameters()] if isinstance(value, nn.Module) else [value]


def _buffers_of(value: Any) -> list[Tensor]:
    return [*value.buffers()] if isinstance(value, nn.Module) else [value]
