"""PaperEngine: an engine that starts nothing, notes what it is asked for, and reports what a test plans."""

import contextlib
import itertools
import socket
from collections.abc import Callable, Sequence

from paceline.causes import Cause
from paceline.engines import (
    LOCAL_HOST,
    AgentEvent,
    EngineEvent,
    Exited,
    Guardian,
    HostInfo,
    HostJoined,
    HostLost,
    RoleSpec,
    Started,
    Succession,
)

__all__ = ["PaperAgent", "PaperEngine", "PaperGuardian"]

_Who = tuple[str, int, int]
_FIRST_PID = 1 << 22
"""No process has this number or a higher one."""


class PaperAgent:
    """An agent whose roles exist on paper: each runs until it is ended.

    Args:
        turns: number of polls between the start of a role and its running.
    """

    def __init__(self, turns: int = 0) -> None:
        self.specs: list[RoleSpec] = []
        """All roles that it was told to start."""
        self.killed: list[str] = []
        """Names of the roles that it was told to end."""
        self.log: list[tuple[str, str, int]] = []
        """What became of each process, in order: `asked`, `runs` or `ended`, name, incarnation."""
        self.closed = False
        self._turns = turns
        self._polls = 0
        self._waiting: dict[_Who, int] = {}
        """Roles that do not run yet, and the poll at which they do."""
        self._doomed: set[_Who] = set()
        self._running: set[_Who] = set()
        self._due: list[AgentEvent] = []
        self._pids = itertools.count(_FIRST_PID)
        self._news, self._waker = socket.socketpair()
        self._waker.setblocking(False)

    def start(self, spec: RoleSpec) -> None:
        """See Agent."""
        self.specs.append(spec)
        who = (spec.role, spec.rank, spec.incarnation)
        self._note("asked", who)
        self._waiting[who] = self._polls + self._turns
        self._wake()

    def adopt(self, running: Sequence[_Who]) -> None:
        """These run already."""
        self._waiting.update(dict.fromkeys(running, -1))

    def end(self, role: str, rank: int) -> None:
        """See Agent."""
        self.killed.append(f"{role}:{rank}")
        self._doomed |= {each for each in self._waiting if each[:2] == (role, rank)}
        for who in sorted(each for each in self._running if each[:2] == (role, rank)):
            self.report(Exited(*who, Cause.CRASHED, "was killed by SIGKILL"))

    def report(self, exited: Exited) -> bool:
        """A role ends like this, if it runs. Returns whether it did."""
        who = exited[:3]
        if who not in self._running:
            return False
        self._running.discard(who)
        self._note("ended", who)
        self._due.append(exited)
        self._wake()
        return True

    def lose(self) -> None:
        """The host is lost, with all roles that run there or were about to."""
        self._running |= self._waiting.keys()
        self._waiting.clear()
        for who in sorted(self._running):
            self.report(Exited(*who, Cause.LOST_HOST, "was lost with its host"))

    def poll(self) -> Sequence[AgentEvent]:
        """See Agent."""
        self._polls += 1
        with contextlib.suppress(BlockingIOError):
            self._news.recv(1 << 16, socket.MSG_DONTWAIT)
        for who in [who for who, poll in self._waiting.items() if poll < self._polls]:
            del self._waiting[who]
            self._running.add(who)
            self._note("runs", who)
            self._due.append(Started(*who, next(self._pids)))
            if who in self._doomed:
                self.report(Exited(*who, Cause.CRASHED, "was killed by SIGKILL"))
        if self._waiting:
            self._wake()
        found, self._due = self._due, []
        return found

    def fileno(self) -> int:
        """See Agent."""
        return self._news.fileno()

    def close(self) -> None:
        """See Agent."""
        self.closed = True
        self._news.close()
        self._waker.close()

    def _note(self, what: str, who: _Who) -> None:
        role, rank, incarnation = who
        self.log.append((what, f"{role}:{rank}", incarnation))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full socket shows already that there is news
            self._waker.send(b".")


class PaperGuardian:
    """Writes down which successors were named."""

    def __init__(self) -> None:
        self.guarded: list[Succession | None] = []

    def guard(self, succession: Succession | None) -> None:
        """See Guardian."""
        self.guarded.append(succession)


class PaperEngine:
    """An engine with hosts on paper.

    Args:
        exits: ends of roles, in this order: each comes as soon as its role runs, one in every poll.
        hosts: names of hosts beside the controller's own.
        first: called with the first role that is started.
        turns: see PaperAgent.
        running: role, rank and incarnation of roles that run already, of a controller that died.
    """

    def __init__(
        self,
        exits: Sequence[Exited] = (),
        *,
        hosts: Sequence[str] = (),
        turns: int = 0,
        running: Sequence[_Who] = (),
        first: Callable[[RoleSpec], object] = lambda spec: None,
    ) -> None:
        self.guardian: Guardian | None = PaperGuardian()
        self._hosts = {
            name: HostInfo(name, name, None, cores=2, memory=1 << 30) for name in (LOCAL_HOST, *hosts)
        }
        self._planned = _Planned([*exits], first)
        self._agents = {name: _PlannedAgent(self._planned, turns) for name in self._hosts}
        self._events: list[EngineEvent] = []
        self._agents[LOCAL_HOST].adopt(running)

    @property
    def started(self) -> list[RoleSpec]:
        """All roles that were started, in this order."""
        return self._planned.started

    @property
    def guarded(self) -> list[Succession | None]:
        """The successors that were named."""
        return self.guardian.guarded if isinstance(self.guardian, PaperGuardian) else []

    @property
    def killed(self) -> list[str]:
        """Names of the roles that were ended."""
        return [name for agent in self._agents.values() for name in agent.killed]

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return all(agent.closed for agent in self._agents.values())

    def hosts(self) -> Sequence[HostInfo]:
        """See Engine."""
        return [*self._hosts.values()]

    def agent(self, host: str) -> PaperAgent:
        """See Engine."""
        return self._agents[host]

    def events(self) -> Sequence[EngineEvent]:
        """See Engine."""
        found, self._events = self._events, []
        return found

    def join(self, name: str) -> None:
        """A host comes."""
        self._hosts[name] = HostInfo(name, name, None, cores=2, memory=1 << 30)
        self._agents[name] = _PlannedAgent(self._planned, turns=0)
        self._events.append(HostJoined(self._hosts[name]))

    def lose(self, name: str, reason: str = "its agent went silent") -> None:
        """A host is lost, with its roles."""
        self._events.append(HostLost(self._hosts.pop(name), reason))
        self._agents[name].lose()

    def fileno(self) -> int:
        """See Engine."""
        return self._agents[LOCAL_HOST].fileno()

    def close(self) -> None:
        """See Engine."""
        for agent in self._agents.values():
            agent.close()


class _Planned:
    """The exits that a test plans."""

    def __init__(self, exits: list[Exited], first: Callable[[RoleSpec], object]) -> None:
        self.exits = exits
        self.first = first
        self.started: list[RoleSpec] = []


class _PlannedAgent(PaperAgent):
    def __init__(self, planned: _Planned, turns: int) -> None:
        super().__init__(turns)
        self._planned = planned

    def start(self, spec: RoleSpec) -> None:
        super().start(spec)
        self._planned.started.append(spec)
        if len(self._planned.started) == 1:
            self._planned.first(spec)

    def poll(self) -> Sequence[AgentEvent]:
        found = super().poll()
        if self._planned.exits and self.report(self._planned.exits[0]):
            self._planned.exits.pop(0)
        return found
