"""LocalEngine: one host, the controller's own."""

import select
from collections.abc import Callable, Sequence

from paceline.engines.base import LOCAL_HOST, EngineEvent, HostInfo
from paceline.engines.handover import Guardian, Handover
from paceline.engines.local_agent import LocalAgent

__all__ = ["LocalEngine"]


class LocalEngine:
    """Provides this host. Its agent is a part of this process.

    Args:
        program: what workers run instead of a script; given, roles are forks of this process.
        handover: go on with the fork server and the roles of a controller that died.
    """

    def __init__(
        self, program: Callable[[], None] | None = None, *, handover: Handover | None = None
    ) -> None:
        self.local = LocalAgent(program, handover=handover)
        self._guarded = program is None

    @property
    def guardian(self) -> Guardian | None:
        """See Engine. Roles that are forks of this process cannot go on without it: they know no other."""
        return self.local if self._guarded else None

    def hosts(self) -> Sequence[HostInfo]:
        """See Engine."""
        return (HostInfo.own(),)

    def agent(self, host: str) -> LocalAgent:
        """See Engine."""
        assert host == LOCAL_HOST, host
        return self.local

    def events(self) -> Sequence[EngineEvent]:
        """See Engine."""
        return ()

    def fileno(self) -> int:
        """See Engine."""
        return self.local.fileno()

    def wait(self, timeout_s: float) -> None:
        """Block until the agent may have news, at most this long."""
        select.select([self], [], [], timeout_s)

    def pids(self) -> dict[str, int]:
        """Process ids of running roles by name."""
        return self.local.pids()

    def close(self) -> None:
        """See Engine."""
        self.local.close()
