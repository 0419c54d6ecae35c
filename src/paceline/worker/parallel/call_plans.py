"""How the calls of models are cut into stages. A call that differs in more than its tensors has a plan of its
own: other arguments, or other modules that train or evaluate."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from paceline.core.pipeline_spec import PipelineSpec
from paceline.exceptions import UsageError
from paceline.worker.parallel.batch_parts import BatchPart
from paceline.worker.parallel.handed_values import handed
from paceline.worker.parallel.helper_process import HelperProcess
from paceline.worker.parallel.model_graph import follow, names_of
from paceline.worker.parallel.part_graph import Circumstances
from paceline.worker.parallel.stage_costs import choose_cuts, measure
from paceline.worker.parallel.stage_program import StageProgram, inputs_of, stages_of

__all__ = ["CallPlan", "CallPlans"]

_MOST_PLANS = 64


class CallPlan:
    """How one kind of call is cut.

    Args:
        number: among those of the model.
        structure: of the arguments, as `handed` wrote them.
        tensors: how many of them are tensors.
        cuts: the places of the nodes that stages begin with, from the second stage on.
        draws: the places of nodes that draw random numbers.
    """

    def __init__(
        self,
        number: int,
        graph: fx.Graph,
        structure: Any,
        tensors: int,
        cuts: Sequence[int],
        draws: Sequence[int],
    ) -> None:
        self.number = number
        self._graph = graph
        self._structure = structure
        self._tensors = tensors
        self.cuts = list(cuts)
        self._draws = list(draws)
        self._stages = stages_of(graph, cuts)
        self.inputs = [inputs_of(graph, self._stages, s) for s in range(len(cuts) + 1)]
        """Of each stage, the places of the tensors that it uses, among those of the call."""
        self._programs: dict[int, StageProgram] = {}

    def program(self, model: nn.Module, stage: int) -> StageProgram:
        """The part of a stage, on this process's copy of the model."""
        if stage not in self._programs:
            self._programs[stage] = StageProgram(model, self._graph, self._stages, stage, self._draws)
        return self._programs[stage]

    def to_json(self) -> dict[str, Any]:
        """For the processes of other stages."""
        return {
            "number": self.number,
            "structure": self._structure,
            "tensors": self._tensors,
            "cuts": self.cuts,
            "draws": self._draws,
            "nodes": names_of(self._graph),
        }

    @classmethod
    def from_json(cls, model: nn.Module, said: dict[str, Any], option: str) -> "CallPlan":
        """In another process: the same plan.

        Raises:
            UsageError: the model does something else in this process.
        """
        graph = follow(model, said["structure"], said["tensors"], option)
        if names_of(graph) != said["nodes"]:
            raise UsageError(
                f"{option}: {type(model).__name__}.forward does something else in the process of another "
                "stage than in the worker. It must depend on its arguments and on its modules only."
            )
        return cls(said["number"], graph, said["structure"], said["tensors"], said["cuts"], said["draws"])


class CallPlans:
    """In the worker: the plans of all models' calls, made when they are first needed.

    Args:
        copies: of the models that were prepared, on memory that processes share.
    """

    def __init__(self, copies: Sequence[nn.Module], spec: PipelineSpec, *, deadline_s: float) -> None:
        self._copies = copies
        self._spec = spec
        self._deadline_s = deadline_s
        self._plans: dict[tuple[int, str], CallPlan] = {}

    def plan_of(self, model: int, part: BatchPart, circumstances: Circumstances) -> CallPlan:
        """The plan of a call. Making a new one leaves anything in the copies' buffers.

        Args:
            part: the first micro-batch.

        Raises:
            UsageError: this model cannot be cut, or not into so many stages, or not where it was asked for.
        """
        structure, tensors = _structure_of(part, self._spec)
        found = self._copies[model]
        state = [m.training for m in found.modules()], circumstances.needs_gradients
        key = model, json.dumps([structure, *state])
        if key not in self._plans:
            self._plans[key] = self._make(model, structure, tensors, circumstances)
        return self._plans[key]

    def _make(
        self, model: int, structure: Any, tensors: Sequence[Tensor], circumstances: Circumstances
    ) -> CallPlan:
        number = sum(which == model for which, _ in self._plans)
        copy = self._copies[model]
        name = type(copy).__name__
        if number == _MOST_PLANS:
            raise UsageError(
                f"{self._spec}: {name} was called with more than {_MOST_PLANS} different sets of arguments "
                f"that are no tensors, and the model is cut anew for each. Pass what changes as a tensor."
            )
        graph = follow(copy, structure, len(tensors), str(self._spec))
        costs = HelperProcess(
            f"the process that measures {name} for {self._spec}",
            partial(_begin_measuring, copy, graph, tensors, circumstances),
            deadline_s=self._deadline_s,
        )
        try:
            costs.ask({})
            measured, _ = costs.answer()
        finally:
            costs.close()
        cuts = choose_cuts(self._spec, name, copy, graph, measured["seconds"], measured["sizes"])
        return CallPlan(number, graph, structure, len(tensors), cuts, measured["draws"])


def _begin_measuring(
    model: nn.Module, graph: fx.Graph, tensors: Sequence[Tensor], circumstances: Circumstances
) -> Any:
    """In a new process, whose model is nobody's: what answers the worker there."""

    def serve(said: Any, _: list[Tensor]) -> tuple[Any, Sequence[Tensor]]:
        try:
            seconds, sizes, draws = measure(model, graph, tensors, circumstances)
        except Exception as error:
            raise RuntimeError(
                f"{type(model).__name__} failed with the first micro-batch: {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}"
            ) from None
        return {"seconds": seconds, "sizes": sizes, "draws": draws}, ()

    return serve


def _structure_of(part: BatchPart, spec: PipelineSpec) -> tuple[Any, list[Tensor]]:
    """A call's arguments without their tensors, and these."""
    args, kwargs = part.arguments()
    tensors: list[Tensor] = []
    try:
        structure = handed([list(args), kwargs], tensors)
    except TypeError as error:
        raise UsageError(
            f"{spec}: the model's arguments: {error}. Call the model with tensors, numbers, texts, and "
            "lists, tuples and dicts of these."
        ) from None
    assert len(tensors) == len([x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)])
    return structure, tensors
