"""The worker's side: the user's script, its loop, and the links to the servers.

* `alone.py`     Session: what prepare() talks to; of a script that runs alone.
* `prepared.py`  Prepared: the arguments of prepare(), sorted; Models: several models as one.
* `session.py`   RunSession: what prepare() talks to in a worker of a run.
* `sides.py`     OptimizerSide: one optimizer of the script, what it trains and how it steps.
* `collectives.py` gather, mean, broadcast, barrier: values as text, and the way to the others.
* `ending.py`    Ending: where the script ends when the run ends early.
* `account.py`   Account: its batches, until a push covers them or they are skipped.
* `untouched.py` OwnershipGuard: says so when the script changes what the servers own.
* `reporting.py` Reporter: tells the controller how the worker does.
* `links.py`     Links: to all servers, which break, and which of them holds what.
* `client.py`    Client: what is said over them: offer, attach, exchange, leases, state.
* `openmp.py`    lets torch's threads go while a worker waits.
* `pinning.py`   CPU cores that a worker keeps to itself.
* `traffic.py`   Traffic: how many bytes a step moves, whatever carries them.
* `pipeline.py`  PipelinedClient: the same, with payloads that travel while the worker computes.
* `gate.py`      nobody sees a parameter before it has arrived.
* `encoding.py`  Encoders: gradients, compressed; DifferenceReader: replies, compressed.
* `gradients.py` GradientMemory: gradients go into the slot, and are checked there.
* `group.py`     Group: workers that act as one: they meet, average gradients, share parameters.
* `group_stepping.py` GroupStepper: what a worker in a group does at optimizer.step().
* `optimizer.py` makes the user's optimizer exchange instead of update.
* `loader.py`    LeasedLoader and StreamLoader: the user's DataLoader, fed by leases.
* `wrapped.py`   Wrapped: a prepared loader is the user's DataLoader, but for its batches.
* `validation.py` ValidationLoader: a part of the validation data for each worker.
* `orders.py`    EpochOrders: the order of an epoch's samples, the same on every worker.
* `epochs.py`    EpochCounter: which epochs a script has left.
* `run_progress.py` RunProgress: how far the run is. `schedules.py` lets schedulers follow it.
* `script_state.py` ScriptState: what a script keeps beside its model; `plain.py` writes it as JSON.
* `randomness.py` every worker draws random numbers of its own; streams are drawn alike by all.
* `whole_batches.py` WholeBatches: of a data set that is tensors in memory, each read at once.
* `buffers.py`   BufferSchedule: when a worker sends its buffers, for those that join later.
* `state.py`     a worker's part of a checkpoint: buffers, random state, schedulers.
* `copying.py`   copy_plainly: copies of a prepared model know nothing of the run.
* `program.py`   run_program: runs a script or a module, to its very end, as Python itself would.
* `inspect.py`   runs a script up to prepare() and tells what it would train, for `paceline plan`.
* `main.py`      runs the user's program in a worker process.
"""

from paceline.worker.early_end import check_who
from paceline.worker.epochs import RemainingEpochs
from paceline.worker.main import WorkerConfig, run_worker
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
    "run_worker",
]
