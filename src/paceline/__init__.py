"""Paceline: train any PyTorch model on one machine or many, at the consistency you choose.

In a script:   model, optimizer, loader = paceline.prepare(model, optimizer, loader)
In a notebook: result = paceline.fit(paceline.Task(…), workers=4, mode="ssp:2")
Afterwards:    paceline.load_run("last").spans
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
        fit,
        gather,
        is_main,
        load_run,
        load_study,
        log,
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
    "exceptions",
    "fit",
    "gather",
    "is_main",
    "load_run",
    "load_study",
    "log",
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
