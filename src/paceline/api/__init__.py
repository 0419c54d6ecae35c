"""What users import, and what the command line calls.

* `script.py`  prepare, log, evaluation, should_stop, run_parameters, rank, …: for scripts with a loop.
* `shared_values.py`  gather, mean, broadcast, barrier: for metrics and decisions.
* `fitting.py` fit and Task: for people who want no loop.
* `runs.py`    which runs there are, how each does; load_run: a run's tables as data frames.
* `jobs.py`    run_job, resume_run, inspect_script: what the commands do.
* `host_runs.py` runs on several hosts: the engine of one, and what an agent does to join.
* `going_on.py` stop_run, switch_run, scale_run: what a run that is going on is asked for.
* `logs.py`    read_logs: what a run's roles wrote.
* `reports.py` write_report, compared_runs, write_run_trace.
* `removal.py` removes runs that are over.
* `certifying.py` make_certificates: for a run, beforehand.
* `studies.py` study, load_study: many runs of one script, compared.
* `evaluating.py` evaluate_run: measures a run's model with the script's evaluation.
* `exporting.py` export_run: a run's model as a file.
* `successor_process.py` take_over: go on with a run whose controller was killed.

Loaded when used: the commands need no torch, and must not wait for it.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from paceline.api.exporting import export_run
    from paceline.api.fitting import FitResult, Task, fit
    from paceline.api.jobs import inspect_script, resume_run, run_job
    from paceline.api.runs import load_run
    from paceline.api.script import (
        assign,
        epochs,
        evaluation,
        is_main,
        log,
        loss_of,
        mode,
        no_sync,
        prepare,
        progress,
        rank,
        run_parameters,
        should_stop,
        state,
        world_size,
    )
    from paceline.api.shared_values import barrier, broadcast, gather, mean, prepare_validation
    from paceline.api.studies import load_study, study

__all__ = [
    "FitResult",
    "Task",
    "assign",
    "barrier",
    "broadcast",
    "epochs",
    "evaluation",
    "export_run",
    "fit",
    "gather",
    "inspect_script",
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
    "resume_run",
    "run_job",
    "run_parameters",
    "should_stop",
    "state",
    "study",
    "world_size",
]

_HOMES = {
    "shared_values": ("barrier", "broadcast", "gather", "mean", "prepare_validation"),
    "fitting": ("FitResult", "Task", "fit"),
    "runs": ("load_run",),
    "exporting": ("export_run",),
    "jobs": ("inspect_script", "resume_run", "run_job"),
    "studies": ("load_study", "study"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'paceline.api' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "script")
    value: object = getattr(importlib.import_module(f"paceline.api.{home}"), name)
    return value
