"""The controller of a run.

* `controller.py` Controller: carries the decisions out, with an engine and the run's connections.
* `configs.py`    what roles are told when they are started.
* `time_limit.py` TimeLimit: ends a run when its time is up.
* `tail.py`       Tail: what is new in a role's log; Outputs: in those of scripts.
* `steering.py`   Steering: its part that answers requests: another mode, more or fewer roles, an end.
* `successor.py`  Successor: the controller that takes over when one dies.
* `journal.py`    Journal: what it has to know.
* `attempts.py`   Attempts: how often each worker was started.
* `lock.py`       RunLock: whose run it is.
* `rundir.py`     RunDirectory: where a run keeps what it is and what it did.
* `removing.py`   which runs to remove, and removing one.
* `kept_record.py` KeptRecord: a finished run's record, kept aside while the run is resumed.
* `rendezvous.py` ReservedPort: where processes of a script's own torch.distributed meet.
* `requests.py`   Requests: what a command asks of a run that is going on, and the answer.
"""

from paceline.control.controller import Controller
from paceline.control.requests import Requests
from paceline.control.rundir import RunDirectory, find_run, list_runs
from paceline.control.successor import Successor
from paceline.core.run_decisions import RunState
from paceline.core.run_machine import RunMachine

__all__ = [
    "Controller",
    "Requests",
    "RunDirectory",
    "RunMachine",
    "RunState",
    "Successor",
    "find_run",
    "list_runs",
]
