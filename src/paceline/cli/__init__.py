"""The `paceline` command: one file per subcommand, which parses and then calls `paceline.api`.

* `app.py`         the command itself, and what every error looks like
* `run_command.py`     paceline run [options] script [script's own arguments]
* `plan_command.py`    paceline plan …: what `run` would do, as tables
* `study_command.py`   paceline study --grid mode=bsp,asp --seeds 3 script
* `resume_command.py`  paceline resume RUN [options that change] [-- the script's arguments that change]
* `runs_command.py`    paceline runs: what ran and runs here
* `top_command.py`     paceline top RUN: watch a run from another terminal
* `logs_command.py`    paceline logs RUN [--role worker:1] [--follow]
* `agent_command.py`   paceline agent --join HOST:PORT --token-file FILE
* `nodes_command.py`   paceline nodes RUN: the hosts of a run
* `stop_command.py`    paceline stop RUN [--now]
* `switch_command.py`  paceline switch RUN MODE
* `scale_command.py`   paceline scale RUN --workers N
* `remove_command.py`  paceline rm RUN …, paceline prune --older-than 30d
* `report_command.py`  paceline report RUN: what limited a run, and its page
* `compare_command.py` paceline compare RUN RUN …
* `trace_command.py`   paceline trace RUN FILE: for Perfetto
* `metrics_command.py` paceline metrics RUN: what the script logged, here or in another tool
* `export_command.py`  paceline export RUN FILE: the model for plain PyTorch
* `eval_command.py`    paceline eval RUN [script]: measures a model, later or while it trains
* `bench_command.py`   paceline bench paper1|paper4: repeats a paper's experiments
* `certs_command.py`   paceline certs DIR: certificates made beforehand
* `completion_command.py` paceline completion bash
* `parameters.py`  the options of a job as parameters of commands, and how they become a Job
* `arguments.py`   changed arguments of a script, in `resume`
* `job_file.py`    paceline run job.yaml: options, script and arguments from a file
* `outcome.py`     what stands in the terminal when a run is over
* `printing.py`    what all of them print with: nothing that a file holds steers the terminal

torch takes seconds to import: nothing here imports it, or `paceline.api`, before a command has to.
"""

from paceline.cli.app import main

__all__ = ["main"]
