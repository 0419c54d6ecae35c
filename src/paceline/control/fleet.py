"""Fleet: the roles of a run on the hosts of its engine, and which of them run where."""

import select
from collections.abc import Iterator, Sequence
from typing import NamedTuple, assert_never

from paceline.engines import (
    LOCAL_HOST,
    Agent,
    AgentEvent,
    Engine,
    EngineEvent,
    Exited,
    RoleSpec,
    RoleUsage,
    Started,
)

__all__ = ["Fleet"]


class _Process(NamedTuple):
    """One process of a role."""

    role: str
    rank: int
    incarnation: int

    @property
    def name(self) -> str:
        return f"{self.role}:{self.rank}"


class Fleet:
    """Starts and ends roles through the agents, and keeps account of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._starting: dict[_Process, str] = {}
        self._running: dict[_Process, str] = {}
        self._pids: dict[_Process, int] = {}
        self._exits: list[Exited] = []
        self._usage: dict[str, RoleUsage] = {}
        self._agents: dict[str, Agent] = {LOCAL_HOST: engine.agent(LOCAL_HOST)}
        """Of all hosts that had roles, also those that were lost: they report the ends of their roles."""
        self._hear()  # a successor finds roles that run

    def start(self, host: str, spec: RoleSpec) -> None:
        """Start a role on a host; returns before it runs."""
        self._starting[_Process(spec.role, spec.rank, spec.incarnation)] = host
        agent = self._agents[host] = self._engine.agent(host)
        agent.start(spec)

    def host_events(self) -> Sequence[EngineEvent]:
        """Hosts that came, were lost or were refused since the last call."""
        return self._engine.events()

    def exits(self) -> list[Exited]:
        """Roles that ended since the last call."""
        self._hear()
        found, self._exits = self._exits, []
        return found

    def running(self) -> set[str]:
        """Names of the roles that run."""
        return {each.name for each in self._running}

    def local_pids(self) -> dict[str, int]:
        """Process ids of the roles that run on this host, by name."""
        return {each.name: self._pids[each] for each, host in self._running.items() if host == LOCAL_HOST}

    def usage_elsewhere(self) -> dict[str, RoleUsage]:
        """What roles on other hosts use, by name."""
        running = self.running()
        return {name: used for name, used in self._usage.items() if name in running}

    def end(self, role: str, rank: int) -> None:
        """Kill a role and its children; nothing if it does not run."""
        for each, host in [*self._running.items(), *self._starting.items()]:
            if each[:2] == (role, rank):
                self._agents[host].end(role, rank)

    def end_all(self, *, starting: bool) -> bool:
        """Kill all roles that run. Returns whether any were left.

        Args:
            starting: those that were asked for and do not run yet, too.
        """
        left = {each[:2] for each in [*self._running, *(self._starting if starting else ())]}
        for role, rank in left:
            self.end(role, rank)
        return bool(left)

    def wait(self, seconds: float) -> None:
        """Block until something may have happened, at most this long."""
        select.select([self._engine], [], [], seconds)

    def close(self) -> None:
        """Kill what still runs and release everything."""
        self._engine.close()

    def _hear(self) -> None:
        for host, event in self._events():
            match event:
                case Started(role, rank, incarnation, pid):
                    process = _Process(role, rank, incarnation)
                    self._starting.pop(process, None)
                    self._running[process] = host
                    self._pids[process] = pid
                case Exited():
                    process = _Process(event.role, event.rank, event.incarnation)
                    for known in (self._starting, self._running, self._pids):
                        known.pop(process, None)
                    self._exits.append(event)
                case RoleUsage(role, rank):
                    self._usage[f"{role}:{rank}"] = event
                case _:
                    assert_never(event)

    def _events(self) -> Iterator[tuple[str, AgentEvent]]:
        for host, agent in self._agents.items():
            for event in agent.poll():
                yield host, event
