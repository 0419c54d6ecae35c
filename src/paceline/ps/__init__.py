"""Parameter servers: processes, sockets, memory and files. What they decide is in `paceline.core.server`.

A server's process has parts, and one of two roles, which use them:

* `config.py`    ServerConfig: what a server is told when it starts.
* `server_process.py` ServerProcess: the loop; promotes a follower.
* `parts.py`     ServerParts: what a server has whatever its role is.
* `leader.py`    Leader: makes the run's order, replicates it, executes it and answers workers.
* `follower.py`  Follower: executes the order of another server.

Parts of both roles:

* `executor.py`  Executor: the run's one order of steps, executed on a shard.
* `outcomes.py`  what a leader or follower must do about an executed step.
* `attachments.py` Attachments: workers that attach, push, and whose links break.
* `expected_roles.py` ExpectedRoles: which processes may take which place.
* `worker_frames.py` reads frames of workers into requests.
* `controller_line.py` ControllerLine: what a server says to the controller.
* `parameter_copy.py` parameters_of: a shard without its optimizer's state, for snapshots.
* `part_writer.py` PartWriter: writes a server's part of a checkpoint.
* `run_store.py`  where parts of checkpoints are: on this disk, or in the store of the controller's host.

Parts of the leader:

* `replicator.py` Replicator: links to the other servers; the order, and slices that change hands.
* `model_desk.py` ModelDesk: takes the model that worker 0 offers, and hands it to all servers.
* `adoption.py`  Adoption: how worker 0's offer, or a checkpoint, becomes the run's model.
* `checkpoints.py` CheckpointFiles: the files of the checkpoint in the making.
* `saving.py`    reads a checkpoint back.
* `push_record.py` PushRecord: the record of applied pushes.
* `run_errors.py` EndsRun: errors in one worker's message that concern the whole run.
* `lead_progress.py` the leader's report of how far the run is.

The shard, and workers as a server sees them:

* `shard.py`     Shard: the slices of one server; averaging, torch's optimizer, finite checks, state.
* `contributions.py` Contribution: gradients that workers pushed, and their weighted mean.
* `slice_state.py` SliceState: one slice of a shard with its optimizer.
* `lanes.py`     Lanes: the threads that share a shard's slices, on cores apart.
* `bare_step.py` calls torch's optimizer kernels directly, without hooks and profiling.
* `float_flags.py` the processor's own record of overflows.
* `device_parameters.py` DeviceParameters: parameters, gradients and copies on a device.
* `device_shard.py` DeviceShard: a shard there.
* `flat_step.py` FlatStep: an optimizer's step on a whole slice at once.
* `device_reader.py` DeviceReader: what the server reads of values that a device computes.
* `vectors.py`   operations of L-BFGS on named vectors of a shard.
* `peers.py`     WorkerPeer: a worker as a server sees it.
* `carriers/`    Carrier: how a worker's gradients come here, and how it gets parameters.
* `replies.py`   Differences: replies that say how the parameters have changed.
"""

from paceline.ps.config import ServerConfig
from paceline.ps.follower import Follower
from paceline.ps.leader import Leader
from paceline.ps.server_process import serve

__all__ = ["Follower", "Leader", "ServerConfig", "serve"]
