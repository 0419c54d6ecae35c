"""What the process of a stage answers to the worker."""

import re
from collections.abc import Sequence
from typing import Any, Literal, cast

from torch import Tensor

from paceline.core.pipeline_spec import Action
from paceline.params import dtype_named
from paceline.worker.parallel.call_plans import CallPlan
from paceline.worker.parallel.part_graph import Circumstances
from paceline.worker.parallel.stage_link import CallAborted
from paceline.worker.parallel.stage_models import StageModel
from paceline.worker.parallel.stage_program import StageProgram
from paceline.worker.parallel.stage_runner import StageCall, StageRunner

__all__ = ["StageServer"]


class StageServer:
    """Of one process.

    Args:
        copies: of the models that were prepared.
        option: for messages.
    """

    def __init__(self, runner: StageRunner, copies: Sequence[StageModel], option: str) -> None:
        self._runner = runner
        self._copies = copies
        self._option = option
        self._programs: dict[tuple[int, int], StageProgram] = {}
        self._calls: dict[int, tuple[StageCall, StageModel]] = {}

    def serve(self, said: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, Sequence[Tensor]]:
        """Answer a message."""
        actions = [_action(text) for text in said["actions"]]
        if said["do"] == "backward":
            call, copy = self._calls.pop(said["call"])
        else:
            call, copy = self._begin(said, tensors)
        try:
            self._runner.run(call, actions)
        except CallAborted:
            self._calls.pop(call.number, None)
            return {"aborted": True}, ()
        answer: dict[str, Any] = {"held": call.most_held}
        if said["do"] != "backward":
            answer["buffers"] = copy.changed_buffers()
        if said["do"] == "forward":
            if call.circumstances.needs_gradients:
                self._calls[call.number] = call, copy
            return answer, ()
        return _with_gradients(answer, call)

    def _begin(self, said: dict[str, Any], tensors: list[Tensor]) -> tuple[StageCall, StageModel]:
        for number in said["drop"]:
            self._calls.pop(number, None)
        copy = self._copies[said["model"]]
        copy.follow(said)
        key = said["model"], said["plan"]
        if said["new_plan"] is not None:
            plan = CallPlan.from_json(copy.model, said["new_plan"], self._option)
            self._programs[key] = plan.program(copy.model, self._runner.stage)
        program = self._programs[key]
        autocast = None if said["autocast"] is None else dtype_named(said["autocast"])
        copy.watch_buffers(program.buffers)
        each = len(program.inputs)
        kept = [tensor.clone() for tensor in tensors]  # what is kept for backward must stay
        call = StageCall(
            said["call"],
            program,
            Circumstances(said["needs_gradients"], autocast),
            said["seed"],
            [kept[m * each : (m + 1) * each] for m in range(said["microbatches"])],
            said["wanted"],
            copy.parameters,
        )
        self._runner.begin_call()
        return call, copy


def _with_gradients(answer: dict[str, Any], call: StageCall) -> tuple[dict[str, Any], list[Tensor]]:
    found: list[Tensor] = []
    parameters, inputs = [], []
    for k, gradient in zip(call.trained, call.sum.total, strict=True):
        if gradient is not None:
            parameters.append(k)
            found.append(gradient)
    for m, gradients in sorted(call.input_gradients.items()):
        for k, gradient in zip(call.wanted, gradients, strict=True):
            if gradient is not None:
                inputs.append([m, call.program.inputs[k]])
                found.append(gradient)
    return answer | {"parameters": parameters, "inputs": inputs}, found


def _action(text: str) -> Action:
    found = re.fullmatch(r"([FB])(\d+)", text)
    assert found is not None
    return Action(cast(Literal["F", "B"], found[1]), int(found[2]))
