"""What users import, and what the command line calls.

* `script.py`  prepare, log, should_stop, assign, run_parameters, rank, …: for scripts with their own loop.
* `fitting.py` fit and Task: for people who want no loop.
* `runs.py`    load_run: a run's tables as data frames.
* `jobs.py`    run_job, resume_run, export_run, inspect_script: what the commands do.
* `successor.py` take_over: go on with a run whose controller was killed.

Loaded when used: the commands need no torch, and must not wait for it.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from paceline.api.fitting import FitResult, Task, fit
    from paceline.api.jobs import export_run, inspect_script, resume_run, run_job
    from paceline.api.runs import load_run
    from paceline.api.script import (
        assign,
        is_main,
        log,
        mode,
        no_sync,
        prepare,
        rank,
        run_parameters,
        should_stop,
        world_size,
    )

__all__ = [
    "FitResult",
    "Task",
    "assign",
    "export_run",
    "fit",
    "inspect_script",
    "is_main",
    "load_run",
    "log",
    "mode",
    "no_sync",
    "prepare",
    "rank",
    "resume_run",
    "run_job",
    "run_parameters",
    "should_stop",
    "world_size",
]

_HOMES = {
    "fitting": ("FitResult", "Task", "fit"),
    "runs": ("load_run",),
    "jobs": ("export_run", "inspect_script", "resume_run", "run_job"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'paceline.api' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "script")
    value: object = getattr(importlib.import_module(f"paceline.api.{home}"), name)
    return value
