"""Training without writing a loop, from a notebook or a script."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from paceline.api import script
from paceline.api.jobs import check_goes_on, execute, latest_checkpoint
from paceline.control import RunDirectory, find_run
from paceline.exceptions import RoleFailed, UsageError
from paceline.observe import Progress, RunStatus
from paceline.observe.analyse import wording
from paceline.observe.show.notebook import in_place, result_page, result_text
from paceline.plan import Job, make_plan
from paceline.ps.saving import model_state

__all__ = ["FitResult", "Task", "fit"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train, on what, how long. Functions are called in the worker processes."""

    model: Callable[[], nn.Module]
    """Makes the model; a class will do."""
    data: Callable[[], Dataset[Any]] | Dataset[Any]
    """The training data, or a function that makes it."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    """Makes the optimizer: `lambda p: torch.optim.SGD(p, lr=0.1)`."""
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    """Of the model's output and the target."""
    epochs: int = 1
    batch_size: int = 32
    """Of each worker."""
    shuffle: bool = True
    test_data: Callable[[], Dataset[Any]] | Dataset[Any] | None = None
    """Worker 0 measures loss and accuracy on it after every epoch."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """Measures the model while it trains, in a process beside the workers: see `paceline.evaluation`."""
    evaluate_every: int = 100
    """Number of updates between two calls of `evaluate`."""
    device: str = "cpu"
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    """Makes the learning-rate schedule: `lambda o: torch.optim.lr_scheduler.StepLR(o, 10)`."""
    scheduler_every: Literal["epoch", "step"] = "epoch"
    """When the schedule goes on."""
    clip_grad_norm: float | None = None
    """Each worker's gradient is scaled down to this norm, as by `torch.nn.utils.clip_grad_norm_`."""
    hyperparameters: Mapping[str, str | float | bool | None] = field(default_factory=dict)
    """What the functions above were made with, to be recorded with the run: `{"lr": 0.1, "width": 64}`."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "evaluate_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"Task({name}={value!r}): must be a whole number of at least 1.")
        if self.scheduler_every not in ("epoch", "step"):
            raise UsageError(f"Task(scheduler_every={self.scheduler_every!r}): must be 'epoch' or 'step'.")
        if self.clip_grad_norm is not None and not 0 < self.clip_grad_norm < math.inf:
            raise UsageError(f"Task(clip_grad_norm={self.clip_grad_norm!r}): must be a number above 0.")
        for key, value in self.hyperparameters.items():
            if not isinstance(value, str | int | float | bool | None):
                raise UsageError(
                    f"Task(hyperparameters={{{key!r}: {value!r:.40}}}): give names, and numbers or texts."
                )

    def described(self) -> dict[str, Any]:
        """For the run's record: settings as they are, functions by their names."""
        settings = ("epochs", "batch_size", "shuffle", "device", "scheduler_every", "clip_grad_norm")
        functions = ("model", "optimizer", "scheduler", "loss")
        return {
            **{name: getattr(self, name) for name in settings},
            **{name: _name(getattr(self, name)) for name in functions},
            "hyperparameters": dict(self.hyperparameters),
        }


@dataclass(frozen=True, repr=False)
class FitResult:
    """What fit() gives back."""

    status: RunStatus
    run_dir: Path
    state_dict: dict[str, Tensor]
    """The trained model: `model.load_state_dict(result.state_dict)`."""

    def __repr__(self) -> str:
        """A short table; the weights are in `state_dict`."""
        status = self.status
        figures = {
            "run": str(self.run_dir),
            "state": wording.state(status),
            "updates": wording.count(status.version),
            "samples a second": wording.count(status.samples_per_s),
            **{name: wording.metric(value) for name, value in self.metrics.items()},
            "parameters": wording.count(sum(each.numel() for each in self.state_dict.values())),
        }
        return f"FitResult\n{result_text(figures)}"

    def _repr_html_(self) -> str:
        """The run's key figures and plots, for notebooks."""
        return result_page(self.run_dir)

    @property
    def diverged(self) -> str | None:
        """That the training diverged, the likely cause and what to change; None if it did not."""
        return self.status.diverged

    @property
    def metrics(self) -> dict[str, float]:
        """The last metrics, `loss` and with test data `test_loss` and `test_accuracy`."""
        return self.status.metrics


def fit(
    task: Task, *, quiet: bool = False, resume: str | None = None, trust: bool = False, **settings: Any
) -> FitResult:
    """Train a task with servers and workers on this machine, and wait for the result.

    Workers are forks of this process, so the task may use functions that exist only here (a notebook's
    cells, lambdas); for the same reason each role uses one CPU thread.

    Args:
        quiet: show no progress.
        resume: a run (id or path) to go on from.
        trust: that run may be another user's.
        settings: fields of `paceline.Job`: workers, servers, mode, seed, run_dir, …

    Raises:
        UsageError, PlanError: refused before anything started.
        RoleFailed: a worker or server failed, with its name and traceback.
    """
    if torch.cuda.is_initialized():
        raise UsageError(
            "fit() forks this process, and CUDA has been used in it already: call fit() before anything "
            "touches the GPU (restart the notebook), or use a script with `paceline run`."
        )
    if resume is not None:
        run = find_run(resume, trust=trust)
        job = Job.from_json({**run.read_job().to_json(), **settings})
        checkpoint = latest_checkpoint(run)
        check_goes_on(job, checkpoint)
        found = checkpoint.path
        plan = make_plan(job, run_id=run.id)
        run.record_resume(job, plan=plan, command=sys.argv)
    else:
        job = Job.from_json(settings)
        plan = make_plan(job)
        run, found = RunDirectory.create(job, plan=plan, command=sys.argv), None
    run.record_task(task.described())
    # On standard output: notebooks show the other one as if something were wrong.
    with Progress(quiet=quiet, stream=sys.stdout, in_place=None if quiet else in_place()) as progress:
        status = execute(
            plan,
            run,
            resume=found,
            progress=progress,
            program=lambda: _train(task),
            command=sys.argv,
        )
    if status.error is not None:
        role, _, message = status.error.partition(": ")
        raise RoleFailed(role, message)
    return FitResult(status, run.path, model_state(latest_checkpoint(run)))


def _train(task: Task) -> None:
    """The loop of a worker."""
    model = task.model().to(task.device)
    optimizer = task.optimizer(model.parameters())
    loader = DataLoader(_made(task.data), batch_size=task.batch_size, shuffle=task.shuffle)
    scheduler = None if task.scheduler is None else task.scheduler(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "Task(scheduler=…): ReduceLROnPlateau follows a metric, which every worker measures on its own "
            "data, so their rates would differ. Use another schedule, or a script with paceline.prepare."
        )
    if task.evaluate is not None:
        script.evaluation(every=task.evaluate_every)(task.evaluate)
    prepared = script.prepare(model, optimizer, loader, *([] if scheduler is None else [scheduler]))
    model, optimizer, loader = prepared[:3]
    test = None if task.test_data is None or not script.is_main() else _made(task.test_data)
    for _ in script.epochs(task.epochs):
        model.train()
        total, batches = 0.0, 0
        for inputs, targets in loader:
            loss = task.loss(model(inputs.to(task.device)), targets.to(task.device))
            loss.backward()
            if task.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), task.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None and task.scheduler_every == "step":
                scheduler.step()
            total, batches = total + loss.item(), batches + 1
            if batches % 10 == 0:
                script.log(loss=total / batches)
        if batches:
            if batches % 10:
                script.log(loss=total / batches)
            if test is not None:
                with script.run_parameters():
                    script.log(**_evaluate(task, model, test))
        if scheduler is not None and task.scheduler_every == "epoch":
            scheduler.step()
        if script.should_stop():  # a limit of the run
            break


@torch.no_grad()
def _evaluate(task: Task, model: nn.Module, test: Dataset[Any]) -> dict[str, float]:
    model.eval()
    loss, right, seen, classes = 0.0, 0, 0, False
    for inputs, targets in DataLoader(test, batch_size=256):
        inputs, targets = inputs.to(task.device), targets.to(task.device)
        output = model(inputs)
        loss += task.loss(output, targets).item() * len(inputs)
        seen += len(inputs)
        if output.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
            classes = True
            right += int((output.argmax(1) == targets).sum())
    found = {"test_loss": loss / max(1, seen)}
    return {**found, "test_accuracy": right / max(1, seen)} if classes else found


def _name(function: Any) -> str | None:
    """As people know it: `Net`, `cross_entropy`; a lambda has none."""
    name = None if function is None else getattr(function, "__qualname__", type(function).__name__)
    return None if name is None or "<lambda>" in name else str(name)


def _made(data: Any) -> Any:
    return data() if callable(data) and not isinstance(data, Dataset) else data
