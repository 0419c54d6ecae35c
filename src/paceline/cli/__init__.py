"""The `paceline` command: one file per subcommand, which parses and then calls `paceline.api`.

* `run.py`      paceline run [options] script [script's own arguments]
* `plan.py`     paceline plan …: what `run` would do, as tables
* `study.py`    paceline study --grid mode=bsp,asp --seeds 3 script
* `runs.py`     paceline runs: what ran and runs here
* `logs.py`     paceline logs RUN [--role worker:1] [--follow]
* `stop.py`     paceline stop RUN [--now]
* `remove.py`   paceline rm RUN …, paceline prune --older-than 30d
* `resume.py`   paceline resume RUN [options that change] [-- the script's arguments that change]
* `arguments.py` how those are put together
* `export.py`   paceline export RUN FILE
* `app.py`      the command itself, and what every error looks like
* `options.py`  the options of a job as parameters of run, plan, study and resume, and how they become a Job
* `job_file.py` paceline run job.yaml: options, script and arguments from a file
* `completion.py` paceline completion bash
* `outcome.py`  what stands in the terminal when a run is over

torch takes seconds to import: nothing here imports it, or `paceline.api`, before a command has to.
"""

from paceline.cli.app import main

__all__ = ["main"]
