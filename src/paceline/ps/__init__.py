"""Parameter servers.

* `server.py`   Server: sockets, and executing the run's one order of instructions on its shard.
* `leader.py`   LeadServer: server 0, which also makes that order and gathers checkpoints.
* `lead.py`     Lead: the mode machine and the lease book, as the lead server uses them. No sockets.
* `norms.py`    NormBound: which gradients are absurd, though finite.
* `descent.py`  Descent: sandblaster's part of it, the sum of an epoch and the iteration at its end.
* `rows.py`     Rows: the leases of a group of workers, which every member reads its part of.
* `adoption.py` Adoption: how worker 0's offer, or a checkpoint, becomes the run's model.
* `shard.py`    Shard: the slices of one server; averaging, torch's optimizer, finite checks, state.
* `vectors.py`  what L-BFGS's coordinator has a shard do with named vectors.
* `peers.py`    WorkerPeer: a worker as a server sees it, over shared memory or inline on a socket.
* `replies.py`  Differences: replies that say how the parameters have changed.
* `saving.py`   Saver: one checkpoint in the making, from cut to commit; and reading one back.
"""

from paceline.ps.leader import LeadServer, serve
from paceline.ps.server import Server, ServerConfig

__all__ = ["LeadServer", "Server", "ServerConfig", "serve"]
