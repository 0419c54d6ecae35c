"""A model cut into stages, each in a process of its own (`--pipeline K`).

The worker computes the last stage itself, because the script's loss follows from what that returns, and forks
a process for every other one at the first call of a model. Parameters and buffers lie in memory that all of
them map, so a parameter may be used in several stages; the worker adds up their gradients.
"""

import contextlib
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from paceline.core.pipeline_spec import Action, PipelineSpec, stage_actions
from paceline.exceptions import LinkError, PacelineError, UsageError
from paceline.worker.parallel.batch_parts import BatchPart
from paceline.worker.parallel.call_plans import CallPlans
from paceline.worker.parallel.helper_process import HelperProcess
from paceline.worker.parallel.part_graph import Circumstances
from paceline.worker.parallel.shared_state import SharedState
from paceline.worker.parallel.stage_costs import check_split_points
from paceline.worker.parallel.stage_link import CallAborted, StageLink
from paceline.worker.parallel.stage_models import StageModel
from paceline.worker.parallel.stage_runner import LossOf, StageCall, StageRunner
from paceline.worker.parallel.stage_server import StageServer
from paceline.worker.randomness import derive

__all__ = ["PipelineCall", "PipelineStages"]


class PipelineStages:
    """The last stage is the worker's own, every other one a process, forked at the first call of a model: it
    has the models as the script has them then.

    Args:
        models: those that were prepared.

    Raises:
        UsageError: a split point that does not exist.
    """

    def __init__(self, models: Sequence[nn.Module], spec: PipelineSpec, *, deadline_s: float) -> None:
        check_split_points(models, spec)
        self._models = models
        self._spec = spec
        self._deadline_s = deadline_s
        self._plans: CallPlans | None = None
        self._state: SharedState | None = None
        self._copies: list[StageModel] = []
        self._helpers: list[HelperProcess] = []
        self._runner: StageRunner | None = None
        self._told: set[tuple[int, int]] = set()
        """The plans that the processes know: model and number."""
        self.most_held: list[int] = []
        """Of each stage, the most micro-batches that it held at a time in the last call with gradients."""
        self._calls = 0
        self._random = b""
        """What the numbers that models draw follow from."""
        self._dropped: list[int] = []
        """Calls that nobody can go backward through any more."""

    # --- calls ------------------------------------------------------------------------------------

    def forward(self, model: int, parts: Sequence[BatchPart], circumstances: Circumstances) -> "PipelineCall":
        """See `Replicas`."""
        running = self._begin_call(model, parts, circumstances)
        actions = [Action("F", m) for m in range(len(parts))]
        self._run(running, [actions] * self._spec.stages, "forward")
        running.take_outputs()
        if circumstances.needs_gradients:
            self._drop_when_gone(running)
        return running

    def loss(
        self, model: int, parts: Sequence[BatchPart], circumstances: Circumstances, loss_of: LossOf
    ) -> "PipelineCall":
        """Compute the loss of a batch and its gradients at once (1F1B).

        Args:
            loss_of: computes the share of a micro-batch in the batch's loss.
        """
        running = self._begin_call(model, parts, circumstances)
        stages = self._spec.stages
        actions = [stage_actions("1f1b", s, stages, len(parts)) for s in range(stages)]
        answers = self._run(running, actions, "both", loss_of=loss_of)
        running.take_outputs()
        running.take_gradients(answers)
        return running

    def backward(
        self, running: "PipelineCall", gradients: list[list[Tensor | None]]
    ) -> list[list[Tensor | None]]:
        """Go backward through a call."""
        actions = [Action("B", m) for m in range(len(gradients))]
        answers = self._run(running, [actions] * self._spec.stages, "backward", gradients=gradients)
        running.take_gradients(answers)
        return running.gradients

    def close(self) -> None:
        """End the processes."""
        if self._runner is not None:
            self._runner.close()
        for helper in self._helpers:
            helper.close()
        if self._state is not None:
            self._state.close()

    # --- the parts of a call ----------------------------------------------------------------------

    def _begin_call(
        self, model: int, parts: Sequence[BatchPart], circumstances: Circumstances
    ) -> "PipelineCall":
        state, plans, runner = self._begin()
        self._calls += 1
        said, copy = state.write(model), self._copies[model]
        copy.follow(said)
        plan = plans.plan_of(model, parts[0], circumstances)
        autocast = circumstances.autocast
        seed = derive(self._random, self._calls)
        known = (model, plan.number) in self._told
        head = {
            **said,
            "call": self._calls,
            "plan": plan.number,
            "new_plan": None if known else plan.to_json(),
            "drop": [self._dropped.pop() for _ in range(len(self._dropped))],
            "needs_gradients": circumstances.needs_gradients,
            "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
            "seed": seed,
            "microbatches": len(parts),
        }
        if not known:  # the model was tried out
            copy.follow(state.write(model))
        tensors = [_tensors_of(part) for part in parts]
        wanted = _wanted_places(parts[0], tensors[0])
        messages = [
            (head | {"wanted": wanted}, [each[k] for each in tensors for k in plan.inputs[stage]])
            for stage in range(self._spec.stages - 1)
        ]
        program = plan.program(copy.model, self._spec.stages - 1)
        copy.watch_buffers(program.buffers)
        call = StageCall(
            self._calls,
            program,
            circumstances,
            seed,
            [[each[k] for k in program.inputs] for each in tensors],
            wanted,
            copy.parameters,
        )
        runner.begin_call()
        self._told.add((model, plan.number))
        return PipelineCall(self, str(self._spec), self._models[model], copy, call, messages, wanted)

    def _run(
        self,
        running: "PipelineCall",
        actions: Sequence[Sequence[Action]],
        do: str,
        *,
        gradients: Sequence[Sequence[Tensor | None]] = (),
        loss_of: LossOf | None = None,
    ) -> list[tuple[Any, list[Tensor]]]:
        """Let all stages do their actions. Returns the answers of the processes.

        Whatever fails, every answer is awaited: the next call must not find an old one.
        """
        assert self._runner is not None
        messages = running.take_messages()
        for stage, helper in enumerate(self._helpers):
            head, tensors = messages[stage] if messages else ({"call": running.call.number}, [])
            said = {"do": do, "actions": [str(action) for action in actions[stage]]}
            helper.ask(head | said, tensors)
        failures: list[BaseException] = []
        answers: list[tuple[Any, list[Tensor]]] = []
        try:
            with _own_random_numbers():
                self._runner.run(running.call, actions[-1], gradients, loss_of)
        except BaseException as error:
            failures.append(error)
        for helper in self._helpers:
            try:
                body, tensors = helper.answer()
                if not body.get("aborted"):
                    answers.append((body, tensors))
            except Exception as error:
                failures.append(error)
        if failures:
            raise _first(failures)
        self.most_held = [*(body["held"] for body, _ in answers), running.call.most_held]
        if do != "backward":
            running.take_buffers(answers)
        return answers

    def _drop_when_gone(self, running: "PipelineCall") -> None:
        weakref.finalize(running, self._dropped.append, running.call.number).atexit = False

    # --- the processes ----------------------------------------------------------------------------

    def _begin(self) -> tuple[SharedState, CallPlans, StageRunner]:
        if self._state is not None and self._plans is not None and self._runner is not None:
            return self._state, self._plans, self._runner
        self._random = torch.get_rng_state().numpy().tobytes()
        self._state = SharedState(self._models)
        self._copies = [StageModel(model, self._state, k) for k, model in enumerate(self._models)]
        self._plans = CallPlans(
            [copy.model for copy in self._copies], self._spec, deadline_s=self._deadline_s
        )
        stages = self._spec.stages
        pairs = [socket.socketpair() for _ in range(stages - 1)]
        """Between a stage and the one behind it."""
        for stage in range(stages - 1):
            mine = [pairs[stage][0], *([pairs[stage - 1][1]] if stage else [])]
            self._helpers.append(
                HelperProcess(
                    f"stage {stage + 1} of {self._spec}",
                    partial(self._serve_stage, stage, pairs),
                    deadline_s=self._deadline_s,
                    keep=[sock.fileno() for sock in mine],
                )
            )
        for stage, (front, back) in enumerate(pairs):
            front.close()
            if stage < stages - 2:
                back.close()
        self._runner = StageRunner(stages - 1, self._link(pairs[-1][1], stages - 2), None)
        return self._state, self._plans, self._runner

    def _serve_stage(
        self, stage: int, pairs: Sequence[tuple[socket.socket, socket.socket]]
    ) -> Callable[[Any, list[Tensor]], tuple[Any, Sequence[Tensor]]]:
        """In a new process: what answers the worker's messages there."""
        for number, (front, back) in enumerate(pairs):  # closed already: they must not close others
            if number != stage:
                front.detach()
            if number != stage - 1:
                back.detach()
        before = self._link(pairs[stage - 1][1], stage - 1) if stage else None
        behind = self._link(pairs[stage][0], stage + 1)
        option = str(self._spec)
        return StageServer(StageRunner(stage, before, behind), self._copies, option).serve

    def _link(self, sock: socket.socket, neighbour: int) -> StageLink:
        return StageLink(sock, f"stage {neighbour + 1} of {self._spec}", self._deadline_s)


class PipelineCall:
    """A call of a model, as the worker sees it. What `PartsInProgress` is to a batch in parts.

    Args:
        messages: of each process, what its stage must know.
        wanted: places of the tensors for which the script wants a gradient.
    """

    def __init__(
        self,
        stages: PipelineStages,
        option: str,
        model: nn.Module,
        copy: StageModel,
        call: StageCall,
        messages: list[tuple[dict[str, Any], list[Tensor]]],
        wanted: Sequence[int],
    ) -> None:
        self._stages = stages
        self._option = option
        self._model = model
        self._copy = copy
        self.call = call
        self._messages = messages
        self._wanted = wanted
        self._trained = [k for k, p in enumerate(copy.parameters) if p.requires_grad]
        self.outputs: list[list[Any]] = []
        self.spec: Any = None
        self.differentiable: list[bool] = []
        self.gradients: list[list[Tensor | None]] = []
        """See `PartsInProgress.backward`; those of the parameters are with the first part."""

    def backward(self, gradients: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
        """See `PartsInProgress`."""
        return self._stages.backward(self, gradients)

    def take_messages(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """What the stages must know; once."""
        messages, self._messages = self._messages, []
        return messages

    def take_outputs(self) -> None:
        """What the model returned, without its graph."""
        results = [self.call.results[m] for m in sorted(self.call.results)]
        self.call.results = {}
        self.spec = self.call.spec
        self.differentiable = [
            any(isinstance(v, Tensor) and v.requires_grad for v in values)
            for values in zip(*results, strict=False)
        ]
        self.outputs = [[v.detach() if isinstance(v, Tensor) else v for v in values] for values in results]

    @torch.no_grad()
    def take_buffers(self, answers: Sequence[tuple[Any, list[Tensor]]]) -> None:
        """Let the model have the buffers that stages have written to."""
        changed = [*(body["buffers"] for body, _ in answers), self._copy.changed_buffers()]
        places = [k for each in changed for k in each]
        buffers = [*self._model.named_buffers()]
        twice = {k for k in places if places.count(k) > 1}
        if twice:
            names = ", ".join(buffers[k][0] for k in sorted(twice))
            raise UsageError(
                f"{self._option}: two stages write to the same buffer ({names}), because a module is "
                "called in both. Cut the model elsewhere with --split-at, or give each place its own module."
            )
        views = self._copy.buffer_views()
        for k in places:
            buffers[k][1].copy_(views[k])

    def take_gradients(self, answers: Sequence[tuple[Any, list[Tensor]]]) -> None:
        """Put together what the stages found."""
        parts = len(self.call.input_gradients)
        of_inputs: list[dict[int, Tensor]] = [{} for _ in range(parts)]
        of_parameters: dict[int, Tensor] = {}
        for body, tensors in answers:
            given = iter(tensors)
            for k in body["parameters"]:
                _add(of_parameters, k, next(given))
            for m, place in body["inputs"]:
                _add(of_inputs[m], place, next(given))
        own = self.call
        for k, gradient in zip(own.trained, own.sum.total, strict=True):
            if gradient is not None:
                _add(of_parameters, k, gradient)
        for m, gradients in own.input_gradients.items():
            for k, gradient in zip(own.wanted, gradients, strict=True):
                if gradient is not None:
                    _add(of_inputs[m], own.program.inputs[k], gradient)
        none: list[Tensor | None] = [None] * len(self._trained)
        self.gradients = [
            [
                *(of_inputs[m].get(place) for place in self._wanted),
                *(none if m else [of_parameters.get(k) for k in self._trained]),
            ]
            for m in range(parts)
        ]


def _add(total: dict[int, Tensor], key: int, gradient: Tensor) -> None:
    """A copy, or a sum: it may lie in memory that a process writes again."""
    total[key] = total[key] + gradient if key in total else gradient.clone()


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Within, torch's generator may be seeded; the script's random numbers go on behind it as if nothing was
    drawn."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _first(failures: Sequence[BaseException]) -> BaseException:
    """The failure that the others come from."""

    def rank(error: BaseException) -> int:
        if not isinstance(error, Exception):
            return 0  # the script is interrupted
        if isinstance(error, CallAborted):
            return 4
        if isinstance(error, LinkError):
            return 1 if "pid" in str(error) else 3
        return 2 if isinstance(error, PacelineError) or "LinkError" not in str(error) else 3

    return min(failures, key=rank)


def _tensors_of(part: BatchPart) -> list[Tensor]:
    args, kwargs = part.arguments()
    return [x for x in pytree.tree_leaves([list(args), kwargs]) if isinstance(x, Tensor)]


def _wanted_places(part: BatchPart, tensors: Sequence[Tensor]) -> list[int]:
    """The places of the tensors for which a gradient is wanted, in the order of `part.inputs`."""
    places = {id(t): k for k, t in enumerate(tensors)}
    return [places[id(t)] for t in part.inputs]
