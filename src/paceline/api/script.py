"""For scripts with their own training loop."""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.exceptions import UsageError
from paceline.worker import RemainingEpochs, RunProgress, ScriptState, check_who, current_session
from paceline.worker import loss_of as worker_loss_of

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "assign",
    "epochs",
    "is_main",
    "log",
    "loss_of",
    "mode",
    "no_sync",
    "prepare",
    "progress",
    "rank",
    "run_parameters",
    "should_stop",
    "state",
    "world_size",
]


def prepare(*objects: Any) -> Any:
    """Make a training loop distributed. Call it before the loop:

        model, optimizer, loader = paceline.prepare(model, optimizer, loader)

    The loop stays as it is. Under `paceline run` the servers then hold the parameters, `optimizer.step()`
    exchanges with them, and `loader` gives this worker its part of every epoch. As plain `python train.py`
    the same script trains alone.

    Args:
        objects: a model and its optimizer, or several of each; optionally the training DataLoader, and
            learning-rate schedulers (prepared ones are put back where they were on a resume). What belongs
            to another pair may come in another call, before the first batch.

    Returns:
        The same objects in the same order; model, optimizer and schedulers are the very same objects.

    Raises:
        UsageError: something that cannot be trained this way; the message says what and why.
        LayoutMismatch: this worker's model is not the model of the run.
    """
    prepared = current_session().prepare(objects)
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


def log(**metrics: float) -> None:
    """Show metrics (`paceline.log(loss=0.3)`) in the progress display and keep them with the run.

    Every value is kept, with the time, the worker and its attempt, and where it was: its finished steps, the
    run's version, epoch and samples (`paceline metrics RUN --csv FILE`, `paceline.load_run(RUN).metrics`). A
    call takes 2 to 5 µs, and what it has taken survives whatever ends the process. A value is one number, or
    a tensor with one element. Alone (`python train.py`) nothing is kept.

    In a script without a prepared loader the name `samples` is reserved: `paceline.log(samples=32)` says how
    many samples this worker has trained on since it logged last. They are added up, and shown as samples a
    second. With a prepared loader samples are counted already, and `samples` is a metric like any other.
    """
    current_session().log(metrics)


def loss_of(model: "nn.Module", loss: "Callable[[Any, Any], Tensor]", *inputs: Any, target: Any) -> "Tensor":
    """The loss of a batch, `loss(model(*inputs), target)`:

        loss = paceline.loss_of(model, criterion, x, target=y)
        loss.backward()

    It is the same everywhere but in a run with `--pipeline`: there the loss of each micro-batch is computed
    as soon as it can be, and its backward pass begins before the forward passes of all are over (1F1B), so
    that activations of few micro-batches are held at a time. The gradients are computed in this call, and
    `loss.backward()` adds them to the parameters.

    Args:
        loss: of the model's output and the target, one number: a mean or a sum over samples. One that is
            neither (a mean over tokens of which some are padding) is computed from the whole batch, with all
            forward passes first.
        inputs: of the model.
        target: with a row for every sample, as the inputs have.

    Raises:
        UsageError: with `--pipeline-schedule 1f1b`, a loss that is neither.
    """
    return worker_loss_of(model, loss, inputs, target)


def epochs(count: int) -> RemainingEpochs:
    """The epochs that are left of so many, as numbers from 0:

        for epoch in paceline.epochs(10):
            for inputs, targets in loader:
                ...

    In a new run, and alone, that is `range(10)`. A script that was started again, by `paceline resume` or in
    a dead worker's place, gets those that the run has not finished. When the run ends early
    (`should_stop`, `--max-time`, …) no further one comes. Each epoch is one pass over the prepared loader.
    Call it after prepare().
    """
    if operator.index(count) < 0:
        raise UsageError(f"epochs({count!r}): how many? Give a whole number, 0 or more.")
    return current_session().epochs(operator.index(count))


def progress() -> RunProgress:
    """How far the run is, of all workers together: updates, samples, epoch, and the fraction that is done.

        factor = 1 - paceline.progress().fraction

    It is what this worker was told with its last exchange, and asks nobody. Alone it counts the script's own
    steps, samples and epochs.
    """
    return current_session().run_progress()


def state(**first: Any) -> ScriptState:
    """What the script wants to keep beside its model, in every checkpoint:

        state = paceline.state(best=0.0, patience=0)
        ...
        state.best = max(state.best, score)

    After `paceline resume`, and when the run goes back to a checkpoint, every worker has the values that it
    had then. A worker that replaces another one, or joins later, has worker 0's newest. Alone nothing is
    written: values are what the script made them.

    Args:
        first: first values, for a script that starts anew. Numbers, text, None, dense tensors, and lists,
            tuples and dicts of these.

    Returns:
        The same object whenever it is called.

    Raises:
        UsageError: a value that cannot be kept.
    """
    return current_session().kept.ask(first)


def should_stop(condition: Any = False, *, who: str = "any") -> bool:
    """Whether the run ends early. Call it on every worker at the same place, usually once an epoch:

        for epoch in range(100):
            for inputs, targets in loader:
                ...
            if paceline.should_stop(validation_loss > 1.1 * best):
                break

    In modes with rounds (bsp, backup, local, diloco, allreduce, hybrid, sandblaster) a call waits until the
    other workers call it, too, and all get the same answer at the same step. In the others (asp, ssp,
    downpour, easgd, hogwild, dogwild) nobody waits: once it is decided, each worker's next call returns True.

    A decision is final. It also ends the loops over the prepared loader before their next batch, on every
    worker; a script that begins another one after that ends there, as by `sys.exit(0)`. Limits
    (`--max-time`, `--max-updates`) end a run in the same way, so a bare `should_stop()` asks for those.

    Args:
        condition: what this worker wants. Workers may disagree. (A worker that was started again, by a resume
            or in a dead one's place, has no say before its first step.)
        who: whose condition counts. "any": one worker's is enough. "all": every worker's last one must be
            true. "main": worker 0's alone.

    Returns:
        True if this worker's script should leave its training loop. Alone (`python train.py`): the condition.
    """
    check_who(who)
    return current_session().should_stop(bool(condition), who)


def assign() -> None:
    """Make the servers take over the model's present parameters, after changing them in place.

    Call it on every worker at the same point. `model.load_state_dict()` does it by itself.
    """
    current_session().assign()


@contextlib.contextmanager
def run_parameters() -> Iterator[None]:
    """Within, the model has the run's parameters, as the servers hold them: to evaluate, not to train.

    In modes where workers step by themselves (local, easgd, downpour, …) the model's own are this worker's;
    in the others nothing changes.
    """
    with current_session().run_parameters():
        yield


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """For loops written for DDP. An exchange happens at `optimizer.step()` only, so nothing is skipped."""
    yield


def rank() -> int:
    """This worker's rank; 0 in a script that runs alone."""
    return current_session().rank


def world_size() -> int:
    """How many workers the run was planned with; 1 in a script that runs alone."""
    return current_session().world_size


def mode() -> str:
    """The mode that the run is in now, as in `ssp:2`; `alone` in a script that runs alone.

    For the few settings that should depend on it: in sandblaster, for example, an epoch is a single step.
    """
    return current_session().mode_text


def is_main() -> bool:
    """Whether this is worker 0: the one to print and to evaluate."""
    return rank() == 0
