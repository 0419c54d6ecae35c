"""Engines start, watch and kill processes in places. The data plane is the same under all of them.

* `base.py`       RoleSpec: what a process is to be, as plain data; Engine: what every engine can do;
                  Handover: what a controller that died leaves to the next.
* `streams.py`    where a role's output goes, and in a worker the script's.
* `role.py`       what a started process does: log, connect to the controller, be a server or a worker.
* `forkserver.py` a process with torch loaded that forks roles: torch is imported once, not once a role. It
                  guards the controller, too.
* `mps.py`        Mps: NVIDIA's service that lets processes use a GPU side by side.
* `outbox.py`     messages to the fork server, sent without blocking.
* `local.py`      LocalEngine: roles on this machine, from the fork server or by forking this process.
"""

from paceline.engines.base import Engine, Exit, Handover, Left, RoleSpec, Succession
from paceline.engines.local import LocalEngine

__all__ = ["Engine", "Exit", "Handover", "Left", "LocalEngine", "RoleSpec", "Succession"]
