"""How long each operation of a model takes, and where a model is cut because of that."""

import difflib
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import grad as plain_grad
from torch.utils import _pytree as pytree

from paceline.core.pipeline_spec import PipelineSpec, cut_by_cost
from paceline.exceptions import UsageError
from paceline.worker.parallel.part_graph import Circumstances

__all__ = ["check_split_points", "choose_cuts", "measure"]

_REPEATS = 3
_BYTES_PER_S = 1e9
"""How fast activations and their gradients pass from stage to stage, roughly."""
_MESSAGE_S = 2e-4


def measure(
    model: nn.Module, graph: fx.Graph, inputs: Sequence[Tensor], circumstances: Circumstances
) -> tuple[list[float], list[int], list[int]]:
    """Compute a micro-batch node by node. Changes the model's buffers and draws random numbers.

    Returns:
        Of each node the seconds that it takes forward and backward, and the bytes it makes; and the places
        of those that draw random numbers.
    """
    with circumstances.apply():
        timed = _Timed(model, graph, backward=circumstances.needs_gradients)
        timed.run(*inputs)
    nodes = list(graph.nodes)
    return (
        [timed.seconds.get(n, 0.0) for n in nodes],
        [timed.sizes.get(n, 0) for n in nodes],
        [k for k, n in enumerate(nodes) if n in timed.drawing],
    )


class _Timed(fx.Interpreter):
    """Runs each node several times, by itself."""

    def __init__(self, model: nn.Module, graph: fx.Graph, *, backward: bool) -> None:
        super().__init__(model, graph=graph)
        self._backward = backward
        self.seconds: dict[fx.Node, float] = {}
        self.sizes: dict[fx.Node, int] = {}
        self.drawing: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Run it, and remember its cost."""
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        drawn = torch.get_rng_state()
        seconds = []
        for _ in range(_REPEATS):
            fresh = [self._fresh(leaf) for leaf in leaves]
            again, more = pytree.tree_unflatten([x for _, x in fresh], spec)
            wanted = [leaf for leaf, _ in fresh if leaf is not None]
            if n.op == "call_module":
                wanted += [p for p in self.fetch_attr(str(n.target)).parameters() if p.requires_grad]
            begun = time.perf_counter()
            found = getattr(self, n.op)(n.target, again, more)
            if self._backward and wanted:
                _backward(found, wanted)
            seconds.append(time.perf_counter() - begun)
        if not torch.equal(drawn, torch.get_rng_state()):
            self.drawing.add(n)
        self.seconds[n] = min(seconds)
        tensors = [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]
        self.sizes[n] = sum(t.numel() * t.element_size() for t in tensors)
        return found

    def _fresh(self, leaf: Any) -> tuple[Tensor | None, Any]:
        """An argument as a leaf of a graph of its own, and what the node gets, which it may write to."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
            return (leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None), leaf
        bare = leaf.detach()
        if self._backward and leaf.requires_grad:
            bare.requires_grad_()
            return bare, bare.clone()
        return None, bare.clone()


def _backward(found: Any, wanted: Sequence[Tensor]) -> None:
    outputs = [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor) and t.requires_grad]
    if outputs:
        plain_grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)


def choose_cuts(
    spec: PipelineSpec,
    name: str,
    model: nn.Module,
    graph: fx.Graph,
    seconds: Sequence[float],
    sizes: Sequence[int],
) -> list[int]:
    """The places of the nodes that stages begin with, from the second stage on.

    Args:
        name: of the model, for messages.

    Raises:
        UsageError: fewer layers than stages, or a split point that is not there.
    """
    nodes = list(graph.nodes)
    if spec.split_at:
        return _named_cuts(spec, name, nodes)
    layers = [k for k, n in enumerate(nodes) if _has_parameters(model, n)]
    if len(layers) < spec.stages:
        raise UsageError(
            f"{spec}: {name} consists of {len(layers)} layer(s) with parameters, so it is cut into at most "
            f"{max(1, len(layers))} stage(s). Give --pipeline {len(layers)} or less, or leave it out."
        )
    starts = [0, *layers[1:]]
    ends = [*starts[1:], len(nodes)]
    costs = [sum(seconds[a:b]) for a, b in zip(starts, ends, strict=True)]
    return [starts[u] for u in cut_by_cost(costs, _crossings(nodes, starts, sizes), spec.stages)]


def check_split_points(models: Sequence[nn.Module], spec: PipelineSpec) -> None:
    """UsageError for a split point that no model has."""
    if spec.split_at and len(models) > 1:
        raise UsageError(
            f"--split-at {','.join(spec.split_at)}: prepare() got {len(models)} models, and their modules "
            "may have the same names. Leave --split-at out: each model is then cut by measured cost."
        )
    for name in spec.split_at:
        known = [each for each, _ in models[0].named_modules() if each]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3) or known[:5]
            raise UsageError(
                f"--split-at {name}: {type(models[0]).__name__} has no module of that name. "
                f"{'Close to it: ' if close != known[:5] else 'It has: '}{', '.join(close)}"
                f"{', …' if close == known[:5] and len(known) > 5 else ''}."
            )


def _crossings(nodes: Sequence[fx.Node], starts: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """Seconds that both neighbours of a cut lose with what crosses it."""
    places = {n: k for k, n in enumerate(nodes)}
    last_use = [max((places[user] for user in n.users), default=-1) for n in nodes]
    found = []
    for start in starts:
        crossing = [
            sizes[k]
            for k in range(start)
            if last_use[k] >= start and nodes[k].op not in ("placeholder", "get_attr")
        ]
        found.append(_MESSAGE_S * len(crossing) + 2 * sum(crossing) / _BYTES_PER_S)
    return found


def _has_parameters(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(True for _ in model.get_submodule(str(node.target)).parameters())
    return any(
        user.op == "get_attr" and isinstance(_found(model, str(user.target)), nn.Parameter)
        for user in node.all_input_nodes
    )


def _found(model: nn.Module, path: str) -> Any:
    value: Any = model
    for each in path.split("."):
        value = getattr(value, each)
    return value


def _named_cuts(spec: PipelineSpec, name: str, nodes: Sequence[fx.Node]) -> list[int]:
    cuts: list[int] = []
    for module in spec.split_at:
        inside = [
            k
            for k, n in enumerate(nodes)
            if n.op == "call_module" and (str(n.target) == module or str(n.target).startswith(f"{module}."))
        ]
        if not inside:
            pieces = [str(n.target) for n in nodes if n.op == "call_module"]
            whole = next((p for p in pieces if module.startswith(f"{p}.")), None)
            why = (
                f"lies inside {whole!r}, which is one piece"
                if whole is not None
                else "is not called by the model's forward"
            )
            raise UsageError(
                f"--split-at {module}: that module of {name} {why}. Modules in the order of calls: "
                f"{', '.join(dict.fromkeys(pieces))}."
            )
        cuts.append(inside[0])
    if cuts != sorted(cuts) or cuts[0] <= min(k for k, n in enumerate(nodes) if n.op == "call_module"):
        calls = list(dict.fromkeys(str(n.target) for n in nodes if n.op == "call_module"))
        raise UsageError(
            f"--split-at {','.join(spec.split_at)}: name modules in the order in which {name} calls them, "
            f"and not the first one, with which the first stage begins anyway. The order of calls: "
            f"{', '.join(calls)}."
        )
    return cuts
