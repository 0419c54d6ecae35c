"""The life of a run as a pure state machine: events in, decisions out.

    pending → starting → running ⇄ recovering → finishing → succeeded
                 any of them → stopping → stopped        any of them → failed

No processes, sockets or time. It decides by the cause of a failure (`paceline.causes`), never by a signal
number. The controller carries its decisions out.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from paceline.causes import Cause, ProcessEnd
from paceline.core.run_decisions import (
    Announce,
    Decision,
    DismissServer,
    End,
    GoBack,
    Introduce,
    Kill,
    Launch,
    LostServer,
    Note,
    Retire,
    RetireServer,
    RunState,
    Save,
    WaitForCause,
)
from paceline.core.run_machine_state import RunMachineState

__all__ = ["RunMachine"]

_STOPPING = "stopping: a checkpoint is written first (Ctrl-C again to stop without it)"
_STOPPED_ON_THE_WAY = "stopped on the way back to the last checkpoint: `paceline resume` goes on from there"
_FINISHING = "the run ends already: its last checkpoint is being written"
_PROGRESS = 10
"""Steps after which a restarted worker counts as recovered."""
_LONG = 300
"""Maximum number of characters of an error message that a note repeats."""


class RunMachine:
    """Decides what a run does next. Each method takes one event and returns the decisions, in order.

    Args:
        max_restarts: restarts of roles before the run fails; going back to a checkpoint counts as one.
        groups: ranks of workers that can only be restarted together.
        replicas: number of replicas of every slice.
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
        """Incarnations of servers that have left."""
        self.server_restarts = 0
        """Restarts of single servers, plus the times that the run went back to a checkpoint."""
        self.lead = 0
        """Rank of the lead server."""
        self.finished: set[int] = set()
        self._trained = False
        """Whether any finished worker had reached `prepare()`."""
        self.retired: set[int] = set()
        """Workers that were asked to leave or have left."""
        self._replicas = replicas
        self._covered = False
        """Whether every slice has had all its replicas."""
        self._missing: set[int] = set()
        """Servers that died since then."""
        self._going_back = False
        """The run went back and its new servers are not ready: only the checkpoint holds parameters."""
        self._coming: set[int] = set()
        """Servers added by scaling that hold no slices yet."""
        self.leaving: set[int] = set()
        """Servers that are handing over their slices in order to leave."""
        self._max_restarts = max_restarts
        self._groups = groups
        self._ready: set[int] = set()
        self._suspects: dict[str, tuple[str, str]] = {}
        """Errors that the death of another role has probably caused: message and traceback, by role."""
        self._broken: set[str] = set()
        """Suspects that reported a lost link."""
        self._ended: dict[str, str] = {}
        """Hung roles that the machine had killed, and the reason."""
        self._errors: dict[str, str] = {}
        """Class of the last transient error of each role that has made no progress since."""

    def snapshot(self) -> RunMachineState:
        """The whole state as plain JSON, for `restore`."""
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

    def restore(self, snapshot: RunMachineState) -> None:
        """Take over the state of another machine of the same plan."""
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
        """A new controller took over. Servers will report again that they are ready."""
        self._ready.clear()
        return [WaitForCause()] if self._suspects and not self._closing else []

    def seen(self, role: str, rank: int, incarnation: int) -> None:
        """This process exists, even if the snapshot does not know it (the disk may have been full)."""
        if role == "server":
            self.server_incarnations[rank] = max(self.server_incarnations.get(rank, 0), incarnation)
        else:
            self.incarnations[rank] = max(self.incarnations.get(rank, 0), incarnation)
            self.restarts.setdefault(rank, 0)

    def outdated(self, role: str, rank: int, incarnation: int) -> bool:
        """Whether a newer incarnation has replaced this process."""
        numbers = self.server_incarnations if role == "server" else self.incarnations
        return incarnation < numbers.get(rank, 0)

    def knows(self, role: str, rank: int, incarnation: int) -> bool:
        """Whether this process was ever started."""
        numbers = self.server_incarnations if role == "server" else self.incarnations
        return 0 <= incarnation <= numbers.get(rank, -1)

    @property
    def wanted(self) -> list[Launch]:
        """The processes that should be running, without finished workers."""
        if self.state is RunState.PENDING or self.state.over:
            return []
        launches = [each for each in self._launch_all() if isinstance(each, Launch)]
        return [each for each in launches if each.role == "server" or each.rank not in self.finished]

    def begin(self) -> list[Decision]:
        """Start all roles."""
        self.state = RunState.STARTING
        return self._launch_all()

    def _launch_all(self) -> list[Decision]:
        servers = [Launch("server", rank, number) for rank, number in self.server_incarnations.items()]
        return [*servers, *(Launch("worker", rank, self.incarnations[rank]) for rank in self.working)]

    def server_ready(self, rank: int) -> list[Decision]:
        """A server is ready for connections."""
        if rank in self._ready:
            return []
        self._ready.add(rank)
        if self._closing:
            return []
        if rank in self._missing | self._coming:
            return [Introduce(rank)]
        # Do not wait for dead servers: the others may need to learn that one of them leads now.
        if self._ready < self.server_incarnations.keys() - self._missing - self._coming:
            return []
        self.state, self._going_back = RunState.RUNNING, False
        return [Announce()]

    def worker_back(self, rank: int) -> list[Decision]:
        """The replacement of a worker has connected."""
        if self.state is RunState.RECOVERING and len(self._ready | self._missing) == self._num_servers:
            self.state = RunState.RUNNING
        return []

    def worker_finished(self, rank: int, *, trained: bool = True) -> list[Decision]:
        """A worker's script ended in order.

        Args:
            trained: whether the script reached `prepare()`.
        """
        self.finished.add(rank)
        self._trained |= trained
        self._suspects.pop(f"worker:{rank}", None)  # its exit came before its BYE was read
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
        """Ranks of workers that were not asked to leave."""
        return [rank for rank in self.incarnations if rank not in self.retired]

    def scale(self, workers: int) -> list[Decision]:
        """Change the number of workers, at least one. The highest ranks leave first, the lowest come back."""
        decisions: list[Decision] = []
        while len(self.working) > max(1, workers):
            rank = max(self.working)
            self.retired.add(rank)
            decisions.append(Retire(rank))
        while len(self.working) < workers:
            rank = min(self.retired, default=len(self.incarnations))
            self.retired.discard(rank)
            self.finished.discard(rank)
            # A new incarnation: like a replacement, it joins a run in progress.
            self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
            self.restarts.setdefault(rank, 0)
            decisions.append(Launch("worker", rank, self.incarnations[rank]))
        return decisions

    @property
    def serving(self) -> set[int]:
        """Ranks of servers that were not asked to leave."""
        return self.server_incarnations.keys() - self.leaving

    def scale_servers(self, servers: int) -> list[Decision]:
        """Change the number of servers, at least one. The highest ranks leave first; the lead stays."""
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
        """A server that was asked to leave has handed over its slices."""
        return [DismissServer(rank)] if rank in self.leaving else []

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
        if not present:  # it has been replaced
            return []
        if (why := self._ended.pop(f"{role}:{rank}", None)) is not None and ending.cause is Cause.CRASHED:
            ending = ProcessEnd(Cause.CRASHED, "was ended", f"{why}.")
        awaited = rank not in self._coming if role == "server" else not self._is_done(rank)
        if by_itself and awaited and not self._closing:
            # A role reports its error before it exits. The report decides, and may still be on its way.
            text = f"{ending.how} without saying why; look at its log."
            self._suspects.setdefault(f"{role}:{rank}", (text, ""))
            return [WaitForCause()]
        return self._gone(role, rank, ending)

    def _is_done(self, rank: int) -> bool:
        """Whether a worker finished or was asked to leave."""
        return rank in self.finished or rank in self.retired

    def _gone(self, role: str, rank: int, ending: ProcessEnd, traceback: str = "") -> list[Decision]:
        """A role died: restart it, alone or together with the roles that depend on it."""
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
        """Message that a role ended and no restarts are left."""
        used = self._used
        before = f" after {used} restart{'s' * (used > 1)}" if used else ""
        hint = f" {ending.hint}" if ending.hint else ""
        return f"{ending.how}{before}, and --max-restarts is {self._max_restarts}.{hint}"

    def _come_again(self, rank: int, how: str) -> list[Decision]:
        """A server died before it held any slice: restart it if restarts are left."""
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
        """The lead reports that every slice has all its replicas, on these servers."""
        back = sorted(self._missing & servers)
        self._covered = True
        self._missing -= servers
        self._coming -= servers
        return [Note(f"server:{rank} holds copies again, as the one before it did") for rank in back]

    @property
    def _num_servers(self) -> int:
        return len(self.server_incarnations)

    def _can_lose(self, rank: int) -> bool:
        """Whether replicas of all slices of this server remain, whichever slices it held."""
        going_on = self.state in (
            RunState.RUNNING,
            RunState.RECOVERING,
            RunState.FINISHING,
            RunState.STOPPING,
        )
        # A server that hands over its slices may hold none of them any more.
        copies = min(self._replicas, len(self.serving) - 1)
        enough = self._covered and len(self._missing | {rank}) <= copies
        return going_on and enough and self._used < self._max_restarts

    def _lose(self, rank: int, how: str) -> list[Decision]:
        """Restart a server while the others continue from their replicas."""
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
        """Restart a worker."""
        used = self._used
        self.restarts[rank] += 1
        self.incarnations[rank] += 1
        self._broken.discard(f"worker:{rank}")
        if self.state is RunState.RUNNING:  # while starting, the run still waits for the servers
            self.state = RunState.RECOVERING
        note = Note(
            f"worker:{rank} {how}; replaced (restart {used + 1} of at most {self._max_restarts}). "
            "Its unfinished leases went back to the pool."
        )
        return [note, Launch("worker", rank, self.incarnations[rank])]

    def hung(self, role: str, rank: int, incarnation: int | None, reason: str) -> list[Decision]:
        """A role makes no progress, or pushes only invalid gradients: kill it, so that it is restarted."""
        name = f"{role}:{rank}"
        present = (self.server_incarnations if role == "server" else self.incarnations).get(rank)
        if self._closing or incarnation not in (None, present) or self.state is RunState.RECOVERING:
            return []
        if role == "worker" and rank in self.finished:  # only its BYE to the servers was lost
            return []
        if self._used >= self._max_restarts:
            return self._fail(
                f"server:{self.lead}" if role == "worker" else name, reason, ""
            )  # the role that noticed
        self._ended[name] = reason
        return [Note(f"{reason}. {name} is ended and replaced."), Kill(role, rank)]

    def diverged(self, reason: str) -> list[Decision]:
        """The training diverged: go back to a good checkpoint. This uses up no restart."""
        return [] if self._closing else self._restart_all(reason)

    def give_up(self, message: str) -> list[Decision]:
        """The run cannot go on, and no role is to blame: it diverged, or no checkpoint can be read."""
        return [] if self._closing else self._fail("run", message, "")

    @property
    def _used(self) -> int:
        """Restarts so far. Going back to a checkpoint counts as one."""
        return sum(self.restarts.values()) + self.server_restarts

    def _go_back(self, name: str, ending: ProcessEnd, traceback: str = "") -> list[Decision]:
        """Parameters died with a server, or a group lost a worker: go back to the last checkpoint."""
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
        return self._restart_all(f"{name} {ending.how} (restart {used + 1} of at most {self._max_restarts})")

    def _restart_all(self, reason: str) -> list[Decision]:
        """Restart all roles from a checkpoint."""
        for rank in self.incarnations:
            self.incarnations[rank] += 1
        # As many servers as were wanted, numbered from 0.
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
        """A role reports the error that ends it.

        After a lost link the machine waits for the cause. A role with a transient error is restarted as if
        it had crashed, unless the same error repeats. Any other error fails the run at once.

        Args:
            error: class of the error, to recognise a repetition.
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
        """Restart a role after a transient error, unless the error repeats."""
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
        """Why a restart would fail with the same error; empty if it may help."""
        if self._errors.get(role) == error:
            return f"it was replaced, and failed like this again before {_PROGRESS} steps were made"
        workers = {f"worker:{rank}" for rank in self.working if rank not in self.finished}
        failed = {name for name in workers if self._errors.get(name) == error} | {role}
        if len(workers) > 1 and workers <= failed:
            return "every worker failed like this"
        return ""

    def stepped(self, rank: int, steps: int) -> None:
        """A worker's process has made this many steps. After ten, forget its earlier errors."""
        if steps < _PROGRESS:
            return
        for name in [name for name in self._errors if name.startswith("server:")]:
            del self._errors[name]
        self._errors.pop(f"worker:{rank}", None)

    def patience_over(self) -> list[Decision]:
        """The wait for another cause is over, and none was reported."""
        if self._closing or not self._suspects:
            return []
        # Blame a role that exited without a report rather than one that lost its link to it.
        role = next((name for name in self._suspects if name not in self._broken), next(iter(self._suspects)))
        message, traceback = self._suspects[role]
        links = {name for name in self._suspects if name in self._broken and name.startswith("worker:")}
        if role.startswith("server:") and self._suspects.keys() <= self._broken and not self._closing:
            # It lost a server that had no other copies, although the servers seemed to have them.
            return self._go_back(role, ProcessEnd(Cause.CRASHED, f"cannot go on: {message}"), traceback)
        if links != set(self._suspects) or self._groups or self._used + len(links) > self._max_restarts:
            return self._fail(role, message, traceback)
        # Only links of workers broke and no process died: restart those workers.
        suspects, self._suspects = self._suspects, {}
        decisions: list[Decision] = []
        for name, (message, _) in suspects.items():
            decisions += self._replace(int(name.partition(":")[2]), f"lost its link ({message})")
        return decisions

    def stop_requested(self, *, now: bool = False) -> list[Decision]:
        """The user asks the run to stop. The second request, or `now`, does not wait for the checkpoint."""
        if self.state is RunState.STOPPING or (now and self.state in (RunState.RUNNING, RunState.RECOVERING)):
            self.state = RunState.STOPPED
            return [Note("stopped without waiting for the checkpoint"), End()]
        if self.state is RunState.FINISHING:
            return [Note(_FINISHING)]
        if self._closing:
            return []
        if self._going_back:  # the servers hold nothing newer than the checkpoint
            self.state = RunState.STOPPED
            return [Note(_STOPPED_ON_THE_WAY), End()]
        early = self.state in (RunState.PENDING, RunState.STARTING)
        self.state = RunState.STOPPED if early else RunState.STOPPING
        return [End()] if early else [Note(_STOPPING), Save()]

    def saved(self, problem: str | None) -> list[Decision]:
        """The requested checkpoint was written, or failed because of `problem`."""
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
        """A role died during the last checkpoint, which only needs the servers."""
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
