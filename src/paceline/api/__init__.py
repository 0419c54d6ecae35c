"""What users import, and what the command line calls.

* `script.py`  prepare, log, assign, no_sync, rank, world_size, is_main: for scripts with their own loop.
* `fitting.py` fit and Task: for people who want no loop.
* `jobs.py`    run_job, resume_run, export_run, inspect_script: what the commands do.
"""

from paceline.api.fitting import FitResult, Task, fit
from paceline.api.jobs import export_run, inspect_script, resume_run, run_job
from paceline.api.script import assign, is_main, log, no_sync, prepare, rank, world_size

__all__ = [
    "FitResult",
    "Task",
    "assign",
    "export_run",
    "fit",
    "inspect_script",
    "is_main",
    "log",
    "no_sync",
    "prepare",
    "rank",
    "resume_run",
    "run_job",
    "world_size",
]
