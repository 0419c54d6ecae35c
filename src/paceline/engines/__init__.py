"""Engines provide hosts; the agent of each host starts, watches and ends roles. The data plane is the same
under all of them.

* `base.py`       what every engine and every agent does; RoleSpec: what a process is to be, as plain data.
* `handover.py`   Handover: what a controller that died leaves to the next; Guardian: who has that started.
* `local.py`      LocalEngine: one host, the controller's own.
* `local_agent.py` LocalAgent: roles on this host, from the fork server or by forking this process.
* `forkserver.py` a process with torch loaded that forks roles: torch is imported once, not once a role. It
                  guards the controller, too.
* `forks.py`      Forks: the same by this process, for programs that only it knows.
* `hosts_engine.py` HostsEngine: this host, and others on which `paceline agent` runs.
* `remote_agent.py` RemoteAgent: the agent of another host, as the controller sees it.
* `agent_process.py` HostAgent: what `paceline agent` runs.
* `agent_messages.py` what these two say to each other.
* `join_token.py`, `admission.py` how a host joins: the token, and the checks on both sides.
* `program_files.py`, `role_files.py`, `moved_paths.py` what takes the place of a common disk.
* `outbox.py`     messages to the fork server, sent without blocking.
* `streams.py`    where a role's output goes, and in a worker the script's.
* `role.py`       what a started process does: log, connect to the controller, be a server or a worker.
* `mps.py`        Mps: NVIDIA's service that lets processes use a GPU side by side.
"""

from paceline.engines.base import (
    LOCAL_HOST,
    Agent,
    AgentEvent,
    Engine,
    EngineEvent,
    Exited,
    HostInfo,
    HostJoined,
    HostLost,
    JoinRefused,
    RoleSpec,
    RoleUsage,
    Started,
)
from paceline.engines.handover import Guardian, Handover, Left, Succession
from paceline.engines.local import LocalEngine
from paceline.engines.local_agent import LocalAgent

__all__ = [
    "LOCAL_HOST",
    "Agent",
    "AgentEvent",
    "Engine",
    "EngineEvent",
    "Exited",
    "Guardian",
    "Handover",
    "HostInfo",
    "HostJoined",
    "HostLost",
    "JoinRefused",
    "Left",
    "LocalAgent",
    "LocalEngine",
    "RoleSpec",
    "RoleUsage",
    "Started",
    "Succession",
]
