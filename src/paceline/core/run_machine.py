"""The life of a run as a pure state machine: what happened in, decisions out.

    pending → starting → running ⇄ recovering → finishing → succeeded
                 any of them → stopping → stopped        any of them → failed

No processes, sockets or time: the controller carries out what is decided here.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from paceline.causes import Cause, ProcessEnd

__all__ = [
    "Announce",
    "Decision",
    "Dismiss",
    "End",
    "GoBack",
    "Introduce",
    "Kill",
    "Launch",
    "LostServer",
    "Note",
    "Retire",
    "RetireServer",
    "RunMachine",
    "RunState",
    "Save",
    "WaitForCause",
]

_STOPPING = "stopping: a checkpoint is written first (Ctrl-C again to stop without it)"
_STOPPED_ON_THE_WAY = "stopped on the way back to the last checkpoint: `paceline resume` goes on from there"
_FINISHING = "the run ends already: its last checkpoint is being written"
_PROGRESS = 10
"""Steps after which a replaced worker is taken to do better than the one before."""
_LONG = 300
"""Longest part of an error's message that a note repeats."""


class RunState(Enum):
    """Where a run is in its life."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED)


@dataclass(frozen=True)
class Launch:
    """Start a process."""

    role: str
    rank: int
    incarnation: int


@dataclass(frozen=True)
class Kill:
    """End a process that would not end by itself. Its exit is an event of its own."""

    role: str
    rank: int


@dataclass(frozen=True)
class Retire:
    """Ask a worker to leave after the step that it is at."""

    rank: int


@dataclass(frozen=True)
class RetireServer:
    """Have a server give what it holds to the others."""

    rank: int


@dataclass(frozen=True)
class Dismiss:
    """A server holds nothing any more: it may end."""

    rank: int


@dataclass(frozen=True)
class Announce:
    """Tell everybody where the servers are."""


@dataclass(frozen=True)
class Save:
    """Have the servers write a checkpoint of this moment."""


@dataclass(frozen=True)
class WaitForCause:
    """A role lost a link: somebody else's end is probably the cause. Ask again with `patience_over`."""


@dataclass(frozen=True)
class GoBack:
    """Parameters are lost: end all processes, and go on from the last checkpoint with those launched next."""

    reason: str


@dataclass(frozen=True)
class LostServer:
    """A server is gone, and others hold copies of all it held. They go on, led by `lead`."""

    rank: int
    lead: int


@dataclass(frozen=True)
class Introduce:
    """A server has come to a run that goes on: tell it who leads."""

    rank: int


@dataclass(frozen=True)
class Note:
    """Something the user should read."""

    text: str


@dataclass(frozen=True)
class End:
    """Stop all processes: the run is over."""


Decision = (
    Launch
    | Kill
    | Retire
    | RetireServer
    | Dismiss
    | Announce
    | Save
    | WaitForCause
    | GoBack
    | LostServer
    | Introduce
    | Note
    | End
)


class RunMachine:
    """Decides what a run does next. Each event returns the decisions it causes, in order.

    Args:
        replicas: so many other servers hold a copy of each slice.
    """

    def __init__(
        self,
        *,
        servers: int,
        workers: int,
        max_restarts: int,
        groups: Sequence[Sequence[int]] = (),
        replicas: int = 0,
    ) -> None:
        self.state = RunState.PENDING
        self.error: tuple[str, str, str] | None = None
        """Role, message, traceback of the first error."""
        self.incarnations = dict.fromkeys(range(workers), 0)
        self.restarts = dict.fromkeys(range(workers), 0)
        self.server_incarnations = dict.fromkeys(range(servers), 0)
        self._gone_servers: dict[int, int] = {}
        """Of those that have left: their incarnations."""
        self.server_restarts = 0
        """How often servers were replaced, alone or, when the run went back, all together."""
        self.lead = 0
        """The server that leads."""
        self.finished: set[int] = set()
        self._trained = False
        """Whether a worker that finished had come as far as `prepare()`."""
        self.retired: set[int] = set()
        """Workers that were asked to leave, whether they have or not yet."""
        self._replicas = replicas
        self._covered = False
        """Whether all slices have had all their copies."""
        self._missing: set[int] = set()
        """Servers that are gone since that was so last."""
        self._going_back = False
        """The run went back and its new servers do not listen yet: only the checkpoint holds parameters."""
        self._coming: set[int] = set()
        """Servers that do not hold anything yet: more than there were."""
        self.leaving: set[int] = set()
        """Servers that are to hold nothing any more, whether they do yet or not."""
        self._max_restarts = max_restarts
        self._groups = groups
        self._ready: set[int] = set()
        # Errors that are probably not the first: message and traceback by role, in order.
        self._suspects: dict[str, tuple[str, str]] = {}
        self._broken: set[str] = set()
        """Those of them that lost a link."""
        self._ended: dict[str, str] = {}
        """Roles that we end, since they are of no use any more, and why."""
        self._errors: dict[str, str] = {}
        """Roles that failed of an error that may pass, and made no progress since: the kind of error."""

    def snapshot(self) -> dict[str, Any]:
        """All that has happened, as plain JSON: a machine for the same plan goes on there (`restore`)."""
        return {
            "state": self.state.value,
            "error": None if self.error is None else list(self.error),
            "incarnations": {str(rank): n for rank, n in self.incarnations.items()},
            "restarts": {str(rank): n for rank, n in self.restarts.items()},
            "server_incarnations": {str(rank): n for rank, n in self.server_incarnations.items()},
            "gone_servers": {str(rank): n for rank, n in self._gone_servers.items()},
            "server_restarts": self.server_restarts,
            "lead": self.lead,
            "covered": self._covered,
            "missing": sorted(self._missing),
            "going_back": self._going_back,
            "coming": sorted(self._coming),
            "leaving": sorted(self.leaving),
            "finished": sorted(self.finished),
            "trained": self._trained,
            "retired": sorted(self.retired),
            "ready": sorted(self._ready),
            "suspects": {role: list(said) for role, said in self._suspects.items()},
            "broken": sorted(self._broken),
            "errors": dict(self._errors),
            "ended": dict(self._ended),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Be where another machine was."""
        self.state = RunState(snapshot["state"])
        error = snapshot["error"]
        self.error = None if error is None else (error[0], error[1], error[2])
        self.incarnations = {int(rank): n for rank, n in snapshot["incarnations"].items()}
        self.restarts = {int(rank): n for rank, n in snapshot["restarts"].items()}
        self.server_incarnations = {int(rank): n for rank, n in snapshot["server_incarnations"].items()}
        self._gone_servers = {int(rank): n for rank, n in snapshot["gone_servers"].items()}
        self.server_restarts = snapshot["server_restarts"]
        self.lead = snapshot["lead"]
        self._covered = snapshot["covered"]
        self._missing = set(snapshot["missing"])
        self._going_back = snapshot["going_back"]
        self._coming = set(snapshot["coming"])
        self.leaving = set(snapshot["leaving"])
        self.finished = set(snapshot["finished"])
        self._trained = snapshot["trained"]
        self.retired = set(snapshot["retired"])
        self._ready = set(snapshot["ready"])
        self._suspects = {role: (said[0], said[1]) for role, said in snapshot["suspects"].items()}
        self._broken = set(snapshot["broken"])
        self._errors = dict(snapshot["errors"])
        self._ended = dict(snapshot.get("ended", {}))

    def taken_over(self) -> list[Decision]:
        """Another controller carries out what is decided here: servers will say again that they listen."""
        self._ready.clear()
        return [WaitForCause()] if self._suspects and not self._closing else []

    def seen(self, role: str, rank: int, incarnation: int) -> None:
        """This one was started, whatever the snapshot says (its disk may have been full)."""
        if role == "server":
            self.server_incarnations[rank] = max(self.server_incarnations.get(rank, 0), incarnation)
        else:
            self.incarnations[rank] = max(self.incarnations.get(rank, 0), incarnation)
            self.restarts.setdefault(rank, 0)

    def outdated(self, role: str, rank: int, incarnation: int) -> bool:
        """Whether another process has, or is to have, the place of this one."""
        numbers = self.server_incarnations if role == "server" else self.incarnations
        return incarnation < numbers.get(rank, 0)

    @property
    def wanted(self) -> list[Launch]:
        """The processes that there should be, but for those that have only to end."""
        if self.state is RunState.PENDING or self.state.over:
            return []
        launches = [each for each in self._launch_all() if isinstance(each, Launch)]
        return [each for each in launches if each.role == "server" or each.rank not in self.finished]

    def begin(self) -> list[Decision]:
        """Start everything."""
        self.state = RunState.STARTING
        return self._launch_all()

    def _launch_all(self) -> list[Decision]:
        servers = [Launch("server", rank, number) for rank, number in self.server_incarnations.items()]
        return [*servers, *(Launch("worker", rank, self.incarnations[rank]) for rank in self.working)]

    def server_ready(self, rank: int) -> list[Decision]:
        """A server listens."""
        if rank in self._ready:
            return []
        self._ready.add(rank)
        if self._closing:
            return []
        if rank in self._missing | self._coming:
            return [Introduce(rank)]
        # Servers that died are not waited for: the others may need to hear that one of them leads now.
        if self._ready < self.server_incarnations.keys() - self._missing - self._coming:
            return []
        self.state, self._going_back = RunState.RUNNING, False
        return [Announce()]

    def worker_back(self, rank: int) -> list[Decision]:
        """A replaced worker is here again."""
        if self.state is RunState.RECOVERING and len(self._ready | self._missing) == self._num_servers:
            self.state = RunState.RUNNING
        return []

    def worker_finished(self, rank: int, *, trained: bool = True) -> list[Decision]:
        """A worker's script ended in order.

        Args:
            trained: whether it came as far as `prepare()`.
        """
        self.finished.add(rank)
        self._trained |= trained
        self._suspects.pop(f"worker:{rank}", None)  # its exit was noticed before its goodbye was read
        return self._finish_if_all_have()

    def _finish_if_all_have(self) -> list[Decision]:
        if self._closing or self.finished | self.retired != set(self.incarnations):
            return []
        if not self._trained:
            self.state = RunState.SUCCEEDED
            return [Note("every script exited before paceline.prepare(): nothing was trained"), End()]
        self.state = RunState.FINISHING
        return [Save()]

    @property
    def working(self) -> list[int]:
        """Workers that are to compute."""
        return [rank for rank in self.incarnations if rank not in self.retired]

    def scale(self, workers: int) -> list[Decision]:
        """Have so many workers, at least one. Who came last goes first; who left may come again."""
        decisions: list[Decision] = []
        while len(self.working) > max(1, workers):
            rank = max(self.working)
            self.retired.add(rank)
            decisions.append(Retire(rank))
        while len(self.working) < workers:
            rank = min(self.retired, default=len(self.incarnations))
            self.retired.discard(rank)
            self.finished.discard(rank)
            # As one that replaces another: it joins a run that goes on.
            self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
            self.restarts.setdefault(rank, 0)
            decisions.append(Launch("worker", rank, self.incarnations[rank]))
        return decisions

    @property
    def serving(self) -> set[int]:
        """Servers that are to hold parameters."""
        return self.server_incarnations.keys() - self.leaving

    def scale_servers(self, servers: int) -> list[Decision]:
        """Have so many servers, at least one. The highest ranks go first; the lead stays."""
        decisions: list[Decision] = []
        while len(self.serving) > max(1, servers):
            rank = max(self.serving - {self.lead})
            self.leaving.add(rank)
            decisions.append(RetireServer(rank))
        while len(self.serving) < servers:
            rank = next(r for r in itertools.count() if r not in self.server_incarnations)
            self.server_incarnations[rank] = self._gone_servers.pop(rank, -1) + 1
            self._coming.add(rank)
            decisions.append(Launch("server", rank, self.server_incarnations[rank]))
        return decisions

    def departed(self, rank: int) -> list[Decision]:
        """A server that was to leave holds nothing any more."""
        return [Dismiss(rank)] if rank in self.leaving else []

    def exited(self, role: str, rank: int, incarnation: int, ending: ProcessEnd) -> list[Decision]:
        """A process ended."""
        numbers = self.server_incarnations if role == "server" else self.incarnations
        present = incarnation == numbers.get(rank)
        by_itself = ending.cause is Cause.EXITED
        if role == "server" and present and rank in self.leaving and by_itself:
            self._gone_servers[rank] = self.server_incarnations.pop(rank)
            self.leaving.discard(rank)
            self._ready.discard(rank)
            return []
        if not present:  # another one has its place
            return []
        if (why := self._ended.pop(f"{role}:{rank}", None)) is not None and ending.cause is Cause.CRASHED:
            ending = ProcessEnd(Cause.CRASHED, "was ended", f"{why}.")
        awaited = rank not in self._coming if role == "server" else not self._is_done(rank)
        if by_itself and awaited and not self._closing:
            # It says what went wrong before it exits; that report counts, and may be on its way.
            text = f"{ending.how} without saying why; look at its log."
            self._suspects.setdefault(f"{role}:{rank}", (text, ""))
            return [WaitForCause()]
        return self._gone(role, rank, ending)

    def _is_done(self, rank: int) -> bool:
        """Whether a worker has only to end."""
        return rank in self.finished or rank in self.retired

    def _gone(self, role: str, rank: int, ending: ProcessEnd, traceback: str = "") -> list[Decision]:
        """A role ended: replace it, alone or with all that depended on it."""
        name = f"{role}:{rank}"
        server, may_pass = role == "server", ending.cause.may_pass
        if server and rank in self._coming and not self._closing:
            return self._come_again(rank, ending.how)
        if server and may_pass and self._can_lose(rank):
            return self._lose(rank, ending.how)
        if server and may_pass and self.state is RunState.FINISHING and self._used < self._max_restarts:
            how = f"{ending.how} while the final checkpoint was written"
            return self._go_back(name, replace(ending, how=how))
        if self._closing:
            return self._lost_while_saving(name, ending.how, traceback)
        if server:
            return self._go_back(name, ending, traceback)
        if self._is_done(rank):
            return self._finish_if_all_have()
        if self._groups:
            mates = next(group for group in self._groups if rank in group)
            group = ", ".join(f"worker:{mate}" for mate in mates)
            how = f"{ending.how}, and its group ({group}) cannot go on without it"
            return self._go_back(name, replace(ending, how=how), traceback)
        if self._used >= self._max_restarts:
            return self._fail(
                name,
                f"{self._used_up(ending)} Its log and the system's may say more; raise --max-restarts to go "
                "on after deaths.",
                traceback,
            )
        return self._replace(rank, ending.how)

    def _used_up(self, ending: ProcessEnd) -> str:
        """How a role ended, and that none may be replaced any more."""
        used = self._used
        before = f" after {used} restart{'s' * (used > 1)}" if used else ""
        hint = f" {ending.hint}" if ending.hint else ""
        return f"{ending.how}{before}, and --max-restarts is {self._max_restarts}.{hint}"

    def _come_again(self, rank: int, how: str) -> list[Decision]:
        """A server has gone before it held anything: nothing is lost."""
        self._ready.discard(rank)
        if self._used >= self._max_restarts:
            self._coming.discard(rank)
            self._gone_servers[rank] = self.server_incarnations.pop(rank)
            return [Note(f"server:{rank} {how} before it held anything; the run goes on without it.")]
        self.server_restarts += 1
        self.server_incarnations[rank] += 1
        note = Note(f"server:{rank} {how} before it held anything; another one is started.")
        return [note, Launch("server", rank, self.server_incarnations[rank])]

    def whole(self, servers: set[int]) -> list[Decision]:
        """The lead says that all slices have all their copies, on these servers."""
        back = sorted(self._missing & servers)
        self._covered = True
        self._missing -= servers
        self._coming -= servers
        return [Note(f"server:{rank} holds copies again, as the one before it did") for rank in back]

    @property
    def _num_servers(self) -> int:
        return len(self.server_incarnations)

    def _can_lose(self, rank: int) -> bool:
        """Whether others hold all that this server held, however slices were dealt."""
        going_on = self.state in (
            RunState.RUNNING,
            RunState.RECOVERING,
            RunState.FINISHING,
            RunState.STOPPING,
        )
        copies = min(self._replicas, self._num_servers - 1)
        enough = self._covered and len(self._missing | {rank}) <= copies
        return going_on and enough and self._used < self._max_restarts

    def _lose(self, rank: int, how: str) -> list[Decision]:
        """A server is gone, and another process will take its place while the rest go on."""
        used = self._used
        self.server_restarts += 1
        self.server_incarnations[rank] += 1
        self._ready.discard(rank)
        self._missing.add(rank)
        led = rank == self.lead
        if led:
            self.lead = min(self.server_incarnations.keys() - self._missing - self._coming)
        text = f"server:{rank} {how}; others hold copies of all it held, and go on"
        led_by = f", led by server:{self.lead}" if led else ""
        count = f"(restart {used + 1} of at most {self._max_restarts})"
        if self._closing:
            return [Note(f"{text}{led_by}."), LostServer(rank, self.lead), Save()]
        return [
            Note(f"{text}{led_by}. It is replaced {count}."),
            LostServer(rank, self.lead),
            Launch("server", rank, self.server_incarnations[rank]),
        ]

    def _replace(self, rank: int, how: str) -> list[Decision]:
        """Another process takes a worker's place."""
        used = self._used
        self.restarts[rank] += 1
        self.incarnations[rank] += 1
        self._broken.discard(f"worker:{rank}")
        if self.state is RunState.RUNNING:  # while starting, the servers are still waited for
            self.state = RunState.RECOVERING
        note = Note(
            f"worker:{rank} {how}; replaced (restart {used + 1} of at most {self._max_restarts}). "
            "Its unfinished leases went back to the pool."
        )
        return [note, Launch("worker", rank, self.incarnations[rank])]

    def hung(self, role: str, rank: int, incarnation: int | None, reason: str) -> list[Decision]:
        """A role makes no progress, or nothing but nonsense: another process is to take its place."""
        name = f"{role}:{rank}"
        present = (self.server_incarnations if role == "server" else self.incarnations).get(rank)
        if self._closing or incarnation not in (None, present) or self.state is RunState.RECOVERING:
            return []
        if role == "worker" and rank in self.finished:  # only its goodbye to the servers was lost
            return []
        if self._used >= self._max_restarts:
            return self._fail(f"server:{self.lead}" if role == "worker" else name, reason, "")  # who noticed
        self._ended[name] = reason
        return [Note(f"{reason}. {name} is ended and replaced."), Kill(role, rank)]

    def diverged(self, reason: str) -> list[Decision]:
        """The training ran away: all go on from what is kept of it and good. That is no restart."""
        return [] if self._closing else self._begin_again(reason)

    def give_up(self, message: str) -> list[Decision]:
        """The training ran away, and nothing can be done about it."""
        return [] if self._closing else self._fail("run", message, "")

    @property
    def _used(self) -> int:
        """Restarts so far; going back counts as one."""
        return sum(self.restarts.values()) + self.server_restarts

    def _go_back(self, name: str, ending: ProcessEnd, traceback: str = "") -> list[Decision]:
        """Parameters died with a server, or a group with its member: all go on from the last checkpoint."""
        if not ending.cause.may_pass:
            return self._fail(
                name,
                f"{ending.how}. What was trained since the last checkpoint is lost; `paceline resume` goes "
                "on from there if there is one (--checkpoint-every writes them).",
                traceback,
            )
        used = self._used
        if used >= self._max_restarts:
            return self._fail(
                name,
                f"{self._used_up(ending)} `paceline resume` goes on from the last checkpoint if there is one "
                "(--checkpoint-every writes them).",
                traceback,
            )
        self.server_restarts += 1
        return self._begin_again(f"{name} {ending.how} (restart {used + 1} of at most {self._max_restarts})")

    def _begin_again(self, reason: str) -> list[Decision]:
        """All go on from a checkpoint."""
        for rank in self.incarnations:
            self.incarnations[rank] += 1
        # As many servers as there were to be, numbered from 0.
        latest = max([*self.server_incarnations.values(), *self._gone_servers.values()])
        self.server_incarnations = dict.fromkeys(range(len(self.serving)), latest + 1)
        self.lead, self._covered = 0, False
        for servers in (self._missing, self._coming, self.leaving):
            servers.clear()
        self.state, self._going_back = RunState.RECOVERING, True
        self._ready.clear()
        self.finished.clear()
        self._suspects.clear()
        self._broken.clear()
        self._ended.clear()
        return [GoBack(reason), *self._launch_all()]

    def failed(
        self, role: str, message: str, traceback: str, *, cause: Cause, error: str = ""
    ) -> list[Decision]:
        """A role reports what ended it.

        A lost link waits for its cause to show. What may pass is replaced as if it had crashed, unless the
        same error comes again and again. Anything else fails the run at once.

        Args:
            error: names the kind of error, to tell whether it is the same as before.
        """
        if cause is Cause.LOST_LINK:
            if self._closing:
                return []
            self._suspects[role] = (message, traceback)
            self._broken.add(role)
            return [WaitForCause()]
        if cause.may_pass and not self.state.over:
            return self._retry(role, message, traceback, cause, error)
        if self._closing:
            return self._lost_while_saving(role, message, traceback)
        return self._fail(role, message, traceback)

    def _retry(self, role: str, message: str, traceback: str, cause: Cause, error: str) -> list[Decision]:
        """Replace a role that failed of something that may pass, unless it evidently does not."""
        kind, _, number = role.partition(":")
        self._suspects.pop(role, None)
        self._broken.discard(role)
        if not self._closing and (hopeless := self._hopeless(role, error)):
            return self._fail(role, f"{message} ({hopeless})", traceback)
        self._errors[role] = error
        summary = message.partition("\n")[0].rstrip(".")
        short = summary if len(summary) <= _LONG else f"{summary[:_LONG]} …"
        return self._gone(kind, int(number), ProcessEnd(cause, f"failed: {short}"), traceback)

    def _hopeless(self, role: str, error: str) -> str:
        """Why another process would fail of the same error, too; empty if it may do better."""
        if self._errors.get(role) == error:
            return f"it was replaced, and failed like this again before {_PROGRESS} steps were made"
        workers = {f"worker:{rank}" for rank in self.working if rank not in self.finished}
        failed = {name for name in workers if self._errors.get(name) == error} | {role}
        if len(workers) > 1 and workers <= failed:
            return "every worker failed like this"
        return ""

    def stepped(self, rank: int, steps: int) -> None:
        """A worker's process has made this many steps. After ten, earlier failures have passed."""
        if steps < _PROGRESS:
            return
        for name in [name for name in self._errors if name.startswith("server:")]:
            del self._errors[name]
        self._errors.pop(f"worker:{rank}", None)

    def patience_over(self) -> list[Decision]:
        """No other cause showed up."""
        if self._closing or not self._suspects:
            return []
        # A role that exited without a word, rather than one that lost its link to it.
        role = next((name for name in self._suspects if name not in self._broken), next(iter(self._suspects)))
        message, traceback = self._suspects[role]
        links = {name for name in self._suspects if name in self._broken and name.startswith("worker:")}
        if links != set(self._suspects) or self._groups or self._used + len(links) > self._max_restarts:
            return self._fail(role, message, traceback)
        # Only workers' links broke, and nobody died: as good as dead are those workers.
        suspects, self._suspects = self._suspects, {}
        decisions: list[Decision] = []
        for name, (message, _) in suspects.items():
            decisions += self._replace(int(name.partition(":")[2]), f"lost its link ({message})")
        return decisions

    def stop_requested(self, *, now: bool = False) -> list[Decision]:
        """Ctrl-C, SIGTERM, `paceline stop`. The second one, or `now`, does not wait for the checkpoint."""
        if self.state is RunState.STOPPING or (now and self.state in (RunState.RUNNING, RunState.RECOVERING)):
            self.state = RunState.STOPPED
            return [Note("stopped without waiting for the checkpoint"), End()]
        if self.state is RunState.FINISHING:
            return [Note(_FINISHING)]
        if self._closing:
            return []
        if self._going_back:  # no server has anything to save that the checkpoint does not hold
            self.state = RunState.STOPPED
            return [Note(_STOPPED_ON_THE_WAY), End()]
        early = self.state in (RunState.PENDING, RunState.STARTING)
        self.state = RunState.STOPPED if early else RunState.STOPPING
        return [End()] if early else [Note(_STOPPING), Save()]

    def saved(self, problem: str | None) -> list[Decision]:
        """The checkpoint that was asked for is written, or could not be."""
        if self.state is RunState.FINISHING:
            if problem is not None:
                return self._fail(
                    f"server:{self.lead}", f"the final checkpoint could not be written: {problem}", ""
                )
            self.state = RunState.SUCCEEDED
            return [End()]
        if self.state is RunState.STOPPING:
            self.state = RunState.STOPPED
            return [*([Note(f"no checkpoint: {problem}")] if problem else []), End()]
        return []

    def _lost_while_saving(self, role: str, message: str, traceback: str) -> list[Decision]:
        """Only servers matter any more: the last checkpoint will not come without them."""
        if self.state.over or not role.startswith("server:"):
            return []
        if self.state is RunState.STOPPING:
            return self.saved(f"{role}: {message}")
        return self._fail(role, f"{message}, while the final checkpoint was written", traceback)

    @property
    def _closing(self) -> bool:
        return self.state.over or self.state in (RunState.FINISHING, RunState.STOPPING)

    def _fail(self, role: str, message: str, traceback: str) -> list[Decision]:
        self.error = (role, message, traceback)
        self.state = RunState.FAILED
        return [End()]
