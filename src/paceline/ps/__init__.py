"""Parameter servers. What they decide is in `paceline.core`.

A server is made of layers, each a class of its own that builds on the one before:

* `config.py`    ServerConfig: what it is told when it starts.
* `server.py`    Server: the loop, the controller, and following a lead.
* `ordering.py`  Ordering: making that order, by what the decider decides.
* `placing.py`   Placing: which server holds what; servers that die, come and go.
* `leader.py`    LeadServer: server 0, or who leads in its place.

What they use:

* `executor.py`  Executor: the run's one order of steps, executed on a shard.
* `attachments.py` Attachments: workers that attach, push, and whose links break.
* `checkpoints.py` CheckpointCoordinator: when a checkpoint is cut, and what became of it.
* `parts.py`     ServerParts: what a server has whatever its role is.
* `outcomes.py`  what a leader or follower must do about an executed step.
* `part_writer.py` PartWriter: writes a server's part of a checkpoint.
* `standby.py`  Standby: what a follower keeps so that it can lead.
* `push_record.py` PushRecord: the record of applied pushes.
* `adoption.py` Adoption: how worker 0's offer, or a checkpoint, becomes the run's model.
* `shard.py`    Shard: the slices of one server; averaging, torch's optimizer, finite checks, state.
* `contributions.py` Contribution: gradients that workers pushed, and their weighted mean.
* `slice_state.py` SliceState: one slice of a shard with its optimizer.
* `lanes.py`    Lanes: the threads that share a shard's slices, on cores apart.
* `bare_step.py` a step of torch's optimizers without what stands around it.
* `float_flags.py` the processor's own record of overflows.
* `vectors.py`  what L-BFGS's coordinator has a shard do with named vectors.
* `peers.py`    WorkerPeer: a worker as a server sees it, over shared memory or inline on a socket.
* `replies.py`  Differences: replies that say how the parameters have changed.
* `saving.py`   Saver: one checkpoint in the making, from cut to commit; and reading one back.
"""

from paceline.ps.config import ServerConfig
from paceline.ps.leader import LeadServer, serve
from paceline.ps.server import Server

__all__ = ["LeadServer", "Server", "ServerConfig", "serve"]
