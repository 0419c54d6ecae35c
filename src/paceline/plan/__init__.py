"""Planning: what a user asks for, and what it becomes before anything starts.

* `job.py`       Job: a program, its resources and a mode. Declares every option, once.
* `option.py`    Option: what a declaration says, and all that follows from it.
* `job_name.py`     name_of: the short name of a job.
* `job_settings.py` what commands and roles take of a job.
* `knobs.py`     options of the command line that are parts of `mode`.
* `checks.py`    what a setting must be by itself.
* `rules.py`     which settings do not go together, and which do not go with a mode.
* `host_settings.py` what the settings of a run on several hosts mean.
* `devices.py`   where models and servers go: host memory or a GPU. Pure.
* `amounts.py`   durations and sizes as people type them.
* `plan.py`      make_plan: Job to Plan, the roles and their places; refuses what cannot be had.
                 ModelFacts: what `paceline plan` learns from the script's model.
* `grid.py`      StudyPlan: the runs of a study, each with its job; which are left. Pure.
* `program_check.py`  check_program: is the script or module there?
* `capacity.py`  check_capacity: refuses what the host cannot carry. Pure.
* `host.py`      read_limits: what this host has left: processes, open files, memory.
* `security.py`  TLS: refuses what cannot be had; makes or reads the run's certificates.

Importing this package does not import torch: `paceline plan` refuses a wrong job at once.
"""

from paceline.plan.job import Job
from paceline.plan.plan import LOCAL_HOST, ModelFacts, Plan, RolePlan, make_plan
from paceline.plan.security import certificates_of

__all__ = ["LOCAL_HOST", "Job", "ModelFacts", "Plan", "RolePlan", "certificates_of", "make_plan"]
