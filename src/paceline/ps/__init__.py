"""Parameter servers.

* `server.py`  Server: sockets, and executing the run's one order of instructions on its shard.
* `lead.py`    Lead: the mode machine and the lease book of server 0, which make that order. No sockets.
* `shard.py`   Shard: the slices of one server; averaging, torch's optimizer, finite checks, state.
* `peers.py`   WorkerPeer: a worker as a server sees it, over shared memory or TCP.
* `saving.py`  Saver: one checkpoint in the making, from snapshot to commit; and reading one back.
"""

from paceline.ps.server import ServerConfig, serve

__all__ = ["ServerConfig", "serve"]
