"""The controller of a run: one object that owns its parts.

* `controller.py`  Controller: events in, decisions, carried out by one exhaustive match.
* `run_events.py`  what can happen to a run: one class for each event.
* `beginning.py`   Beginning: what a controller starts from: a new run, a checkpoint, or a dead one's journal.
* `succession.py`  Takeover: what a successor decides first, and until all servers have reconnected.
* `hearing.py`     Hearing: what follows from a role's messages and from the guard's verdicts.
* `role_links.py`  RoleLinks: the connections to the roles, and an inbox of what they say.
* `role_reports.py` RoleReports: enters the roles' progress into the status.
* `processes.py`   RoleProcesses: starts and kills roles; Origin: their checkpoint.
* `host_choice.py` HostChoice: which host a role runs on.
* `fleet.py`       Fleet: the roles on the engine's hosts, and which of them run where.
* `configs.py`     the configuration that roles are started with.
* `awaited_save.py` AwaitedSave: the checkpoint that a run waits for when it ends.
* `training_guard.py` TrainingGuard: notices divergence, and with --guard decides what to do.
* `request_desk.py` RequestDesk: requests of users: another mode, more or fewer roles, an end.
* `mode_switches.py` ModeSwitches: the run's mode, and switches that the lead has not answered.
* `scaling.py`     whether a run can have other numbers of roles.
* `evaluations.py` Evaluations: the process that evaluates beside the workers, and the snapshots it reads.
* `time_limit.py`  TimeLimit: ends a run when its time is up.
* `interrupts.py`  Ctrl-C, SIGTERM and SIGHUP as requests to stop.
* `run_record.py`  RunRecord: the status, messages for the user, and events.
* `publishing.py`  StatusPublisher: writes and shows the status, samples what roles use.
* `journal.py`     Journal, Knowledge: what a successor must know.
* `attempts.py`    Attempts: how often each worker was started.
* `tail.py`        Tail: what is new in a role's log; Outputs: in those of scripts.
* `lock.py`        RunLock: the process that owns a run directory.
* `rundir.py`      RunDirectory: the files of a run.
* `known_runs.py`  list_runs, find_run: the runs of this user, and the one that is meant.
* `run_owner.py`   whose a run directory is, and that nothing in it leads elsewhere.
* `removing.py`    which runs to remove, and removing one.
* `kept_record.py` KeptRecord: a finished run's record, kept aside while the run is resumed.
* `rendezvous.py`  ReservedPort: where processes of a script's own torch.distributed meet.
"""

from paceline.control.beginning import taken_over
from paceline.control.controller import Controller
from paceline.control.known_runs import find_run, list_runs
from paceline.control.rundir import RunDirectory
from paceline.core.run_decisions import RunState
from paceline.core.run_machine import RunMachine
from paceline.storage.requests import Requests

__all__ = [
    "Controller",
    "Requests",
    "RunDirectory",
    "RunMachine",
    "RunState",
    "find_run",
    "list_runs",
    "taken_over",
]
