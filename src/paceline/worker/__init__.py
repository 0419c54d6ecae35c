"""The worker's side: the user's script, its loop, and its exchange with the servers.

Packages: `steppers/` the workers' side of the modes; `exchange/` links, requests and replies; `parallel/`
batches in parts, side by side, and models in stages.

The session, which `paceline.prepare` and the script's other calls talk to:

* `alone.py`           Session: the interface; AloneSession: of a script that runs alone.
* `session.py`         RunSession: in a worker of a run: prepare, step, finish.
* `joined_run.py`      JoinedRun: the worker's membership in the run; made when it joins.
* `run_settings.py`    RunSettings: what a worker knows before its script begins.
* `prepared.py`        Prepared: the arguments of prepare(), sorted; Models: several models as one.
* `parameter_space.py` ParameterSpace: the trained parameters and their layout.
* `device_placement.py` DevicePlacement: puts models and batches on the device that the job names.
* `model_memory.py`    ModelMemory: where parameters and gradients lie, on the device and on the host.
* `host_mirror.py`     HostMirror: copies slices between a device and the host while the model computes.
* `optimizer_side.py`  OptimizerSide: one optimizer of the script, what it trains and how it steps.
* `script_optimizer.py` makes the user's optimizer exchange instead of update.
* `step_exchange.py`   StepExchange: answers steppers' requests; what a push says.
* `group_member.py`    GroupMember: the run, as a member of a group sees it.
* `gathered_values.py` Collectives: gather, mean, broadcast, barrier.
* `early_end.py`       EarlyEnd: where the script ends when the run ends early.
* `ownership.py`       OwnershipGuard: refuses changes of what the servers own.
* `gate.py`            lets modules wait for parameters that have not arrived.

How far the run is, and checkpoints:

* `training_view.py`   TrainingView: where the script and the run are; `run_counts.py` RunCounts: updates.
* `run_progress.py`    RunProgress: what `paceline.progress` returns.
* `schedules.py`       Schedules: lets learning-rate schedulers follow the run.
* `resumption.py`      Resumption: gets a script that was started again to where the run is.
* `checkpoint_part.py` a worker's part of a checkpoint. `part_saver.py` PartSaver: when it is sent.
* `buffers.py`         BufferSchedule: when a worker sends its buffers, for workers that join later.
* `script_state.py`    ScriptState: what a script keeps beside its model; `plain.py` writes it as JSON.

Data:

* `leased_data.py`     LeasedData: the loader's leases and epochs.
* `loader.py`          LeasedLoader and StreamLoader: the user's DataLoader, fed by leases.
* `wrapped.py`         Wrapped: a prepared loader is the user's DataLoader, but for its batches.
* `validation.py`      ValidationLoader: a part of the validation data for each worker.
* `orders.py`          EpochOrders: the order of an epoch's samples, the same on every worker.
* `epochs.py`          EpochCounter: which epochs a script has left.
* `account.py`         Account: the script's batches, until a push covers them or they are skipped.
* `whole_batches.py`   WholeBatches: reads batches of a data set that is tensors in memory at once.
* `randomness.py`      random numbers that differ by worker; streams that all workers draw alike.

What it records: `telemetry.py` Telemetry, all recorders; `reporter.py` Reporter, reports to the controller;
`traffic.py` Traffic, bytes that a step moves; `phase_hooks.py`, when forward and backward begin and end.

The process: `main.py` runs the user's program in a worker; `program_runner.py` runs a script as Python would;
`inspect.py` runs one up to prepare(), for `paceline plan`; `plain_copies.py` copies prepared models;
`pinning.py` keeps a worker on CPU cores of its own.
"""

from paceline.worker.early_end import check_who
from paceline.worker.epochs import RemainingEpochs
from paceline.worker.main import WorkerConfig, run_worker
from paceline.worker.parallel import loss_of
from paceline.worker.run_progress import RunProgress
from paceline.worker.script_state import ScriptState
from paceline.worker.session import Session, current_session

__all__ = [
    "RemainingEpochs",
    "RunProgress",
    "ScriptState",
    "Session",
    "WorkerConfig",
    "check_who",
    "current_session",
    "loss_of",
    "run_worker",
]
