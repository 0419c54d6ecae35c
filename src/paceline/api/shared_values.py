"""Small collectives for metrics and decisions: every worker's value, their mean, worker 0's.

In every mode, also between workers that come and go; and alone, in one process.
"""

import inspect
import math
from pathlib import Path
from typing import Any

from paceline.exceptions import UsageError
from paceline.worker import current_session
from paceline.worker.gathered_values import from_text, mean_of, to_text

__all__ = ["barrier", "broadcast", "gather", "mean", "prepare_validation"]


def gather(value: Any) -> list[Any]:
    """Every worker's value, by rank. Call it on every worker at the same place, best between two epochs:

        scores = paceline.gather(score)

    A call waits for the other workers, in every mode, also in asynchronous ones. A worker is not waited for
    if it has ended, is being replaced, or waits for something that needs the callers (a step of theirs, an
    epoch's end, another call): then the list is without its value, and the run says so. A worker that
    replaces another one takes part from its first step on.

    Args:
        value: numbers, text, None, tensors, and lists, tuples and dicts of these; at most 64 KiB.

    Returns:
        The values of the workers that took part; alone (`python train.py`) its own. Tensors are on the CPU.
    """
    return list(_values("gather", value).values())


def mean(value: Any, *, weight: float = 1.0) -> Any:
    """The mean of every worker's value, the same on all of them; see `gather`.

        accuracy = paceline.mean(correct / count, weight=count)

    Args:
        value: a number, a tensor, or lists, tuples and dicts of these, of the same shape on every worker.
        weight: how much this worker's value counts, for example its number of samples. With 0 the value is
            not looked at.
    """
    if not 0 <= weight < math.inf:
        raise UsageError(f"paceline.mean(weight={weight!r}): give a finite number, 0 or more.")
    pairs = [pair for pair in _values("mean", [value, float(weight)]).values() if pair[1]]
    if not pairs:
        raise UsageError("paceline.mean(): the weights of all workers are 0, so there is nothing to average.")
    return mean_of([each for each, _ in pairs], [share for _, share in pairs])


def broadcast(value: Any, *, source: int = 0) -> Any:
    """One worker's value, on every worker; see `gather`.

        name = paceline.broadcast(f"run-{time.time():.0f}")

    Args:
        source: the rank of the worker whose value it is. Without that worker (it has ended, or is being
            replaced) it is the value of the lowest rank that takes part.
    """
    values = _values("broadcast", value)
    return values[source if source in values else min(values)]


def barrier() -> None:
    """Wait until every worker is here; see `gather` for those that are not waited for."""
    _values("barrier", None)


def prepare_validation(*loaders: Any) -> Any:
    """Divide validation data among the workers: each iterates over a part, in order, as often as it likes.

        validation = paceline.prepare_validation(DataLoader(held_out, batch_size=64))
        for epoch in paceline.epochs(10):
            ...
            correct, count = count_correct(model, validation)
            accuracy = paceline.mean(correct / max(1, count), weight=count)

    Every pass is divided among the workers that begin it together, so begin it on every worker (see
    `gather`). The parts are disjoint and make up the whole; the lowest rank has the first one. The data is in
    one order on all workers: the loader's, or the run's if the loader shuffles. Nothing of this has an effect
    on the training samples. To evaluate on worker 0 alone, iterate over a loader that is not prepared.

    Args:
        loaders: DataLoaders.

    Returns:
        A DataLoader for each. Alone (`python train.py`): the very same objects.
    """
    line = _caller(1)
    prepared = [
        current_session().prepare_validation(loader, f"prepare_validation() at {line} (loader {i})")
        for i, loader in enumerate(loaders, 1)
    ]
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


def _caller(depth: int) -> str:
    """File and line of the script, `depth` frames above the function that asks."""
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = frame.f_back if frame is not None else None
    assert frame is not None, "CPython has frames"
    return f"{Path(frame.f_code.co_filename).name[-80:]}:{frame.f_lineno}"


def _values(call: str, value: Any) -> dict[int, Any]:
    """What the workers brought that call at the same place, by rank."""
    found = current_session().gather(f"{call}() at {_caller(2)}", to_text(value, call))
    return {rank: from_text(text) for rank, text in found.items()}
