"""Paceline: train any PyTorch model on one machine or many, at the consistency you choose.

In a script:   model, optimizer, loader = paceline.prepare(model, optimizer, loader)
In a notebook: result = paceline.fit(paceline.Task(…), workers=4, mode="ssp:2")
Afterwards:    paceline.load_run("last").spans

From the top down; a package imports only from those below it:

* `cli/`, `__main__.py`  the commands.
* `integrations/` PyTorch Lightning's and transformers' Trainer in a run.
* `papers/`      `paceline bench`: the experiments of the papers that Paceline is built from, repeated.
* `api/`         everything that commands, scripts and notebooks call.
* `control/`     the controller: starts, watches and replaces processes, writes the run directory.
* `engines/`     hosts, and an agent on each that runs processes.
* `reading/`     processes that evaluate a run's model beside its workers.
* `ps/`          parameter servers: order the run, apply gradients, hold replicas, write checkpoints.
* `worker/`      the worker's side: what `prepare()` does to a script.
* `collective/`  all-reduce among workers: groups, reducers, the ring.
* `plan/`        Job and Plan: what the user wants, checked, and where every process goes.
* `params/`      parameters as one flat vector, and optimizers as data.
* `comm/`        messages, connections, shared memory, compression.
* `observe/`     what a run records, what follows from it, and how people see it.
* `data/`        data sets.
* `storage/`     checkpoints.
* `core/`        every decision of a run, without torch, sockets, clocks or threads.
* `causes.py`    why a process ended. `exceptions.py`: the tree of errors.
* `testing/`     for tests: fakes, injected faults, slow links, a simulated run.
"""

import importlib
import typing

from paceline import exceptions
from paceline.exceptions import PacelineError

if typing.TYPE_CHECKING:
    from paceline.api import (
        FitResult,
        Task,
        assign,
        barrier,
        broadcast,
        epochs,
        evaluation,
        fit,
        gather,
        is_main,
        load_run,
        load_study,
        log,
        loss_of,
        mean,
        mode,
        no_sync,
        prepare,
        prepare_validation,
        progress,
        rank,
        run_job,
        run_parameters,
        should_stop,
        state,
        study,
        world_size,
    )
    from paceline.plan import Job

__version__ = "0.1.0"

__all__ = [
    "FitResult",
    "Job",
    "PacelineError",
    "Task",
    "__version__",
    "assign",
    "barrier",
    "broadcast",
    "epochs",
    "evaluation",
    "exceptions",
    "fit",
    "gather",
    "is_main",
    "load_run",
    "load_study",
    "log",
    "loss_of",
    "mean",
    "mode",
    "no_sync",
    "prepare",
    "prepare_validation",
    "progress",
    "rank",
    "run_job",
    "run_parameters",
    "should_stop",
    "state",
    "study",
    "world_size",
]


def __getattr__(name: str) -> object:
    """Load the rest when it is used: the command line must not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    home = "paceline.plan" if name == "Job" else "paceline.api"
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value  # the next time it is found here: a call of log() would cost three times as much
    return value


def __dir__() -> list[str]:
    return __all__
