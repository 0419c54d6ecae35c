"""Carries out what the RunMachine decides: one process, one thread, one loop.

    events (messages, exits, deadlines, requests)  →  decisions (the machine, the guard)  →  actions

It starts roles with an engine, tells them where the servers are, writes the run's status, and ends the run.
It holds no parameters and no leases: training does not pass through it.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import assert_never

from paceline.causes import explained
from paceline.comm import Secret
from paceline.comm.messages import (
    LastWordsKept,
    LetServerGo,
    LetWorkerGo,
    RoleError,
    RoleFinished,
    SaveNow,
    SaveSoon,
    StopServing,
)
from paceline.control.awaited_save import AwaitedSave
from paceline.control.beginning import Beginning, new_run
from paceline.control.evaluations import Evaluations
from paceline.control.hearing import Hearing, expected_roles
from paceline.control.interrupts import interrupts
from paceline.control.journal import Journal, Knowledge, kept_status
from paceline.control.mode_switches import GUARD, ModeSwitches
from paceline.control.processes import Origin, RoleProcesses, Surroundings
from paceline.control.publishing import StatusPublisher, WatchCall
from paceline.control.request_desk import RequestDesk, UserRequest
from paceline.control.role_links import Joined, RoleLinks, Said, StopSignal, TurnedAway
from paceline.control.role_reports import RoleReports
from paceline.control.run_events import CauseOverdue, RunEvent, SaveOverdue, ServerSilent, Tick
from paceline.control.run_record import RunRecord
from paceline.control.rundir import RunDirectory
from paceline.control.succession import Takeover
from paceline.control.time_limit import TimeLimit
from paceline.control.training_guard import TrainingGuard
from paceline.core.modes import parse_mode
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
from paceline.engines import Engine, Exited, HostJoined, HostLost, JoinRefused
from paceline.exceptions import CheckpointError, PacelineError, RoleFailed
from paceline.observe import RunStatus, WorkerStatus
from paceline.observe.record.tables import cut_torn
from paceline.plan import Plan
from paceline.storage.requests import Requests

__all__ = ["Controller"]

_TICK_S = 0.1
_CAUSE_S = 1.0
"""How long the machine waits for the cause of a lost link."""
_ANSWER_S = 30.0
"""How long the lead may take to begin the checkpoint of a run that is stopped: it may be amid an update."""
_EXIT_S = 1.5
_SCRIPTS_EXIT_S = 2.0
"""How long other workers may take to end by themselves after a script has ended with a code of its own."""
_LAST_WORDS_S = 0.5
_LAST_WORDS_AFTER_TAKEOVER_S = 2.0
_LEAST_SILENCE_S = 2.0


class Controller:
    """Runs a plan to its end.

    Args:
        resume: path of the checkpoint to start from.
        watch: called with the status about ten times a second, and with new output of scripts.
        shown: rank of the worker whose output that is; None: all.
        finish: called with the final status after everything else is written.
        heir: what takes over if this process is killed, see `Succession.call`; None: the run ends with it.
        beginning: what to start from, in place of a new run: see `taken_over`.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        run: RunDirectory,
        *,
        resume: Path | None = None,
        watch: WatchCall | None = None,
        shown: int | None = 0,
        finish: Callable[[RunStatus], None] | None = None,
        heir: str | None = None,
        beginning: Beginning | None = None,
    ) -> None:
        job = plan.job
        begin = beginning or new_run(plan, run, resume, address=engine.hosts()[0].address)
        self._beginning = begin
        self._job = job
        self._finish = finish
        self._machine = machine = begin.machine
        self._record = RunRecord(run, begin.status)
        self._links = RoleLinks(
            begin.listener,
            Secret(begin.credentials.secret, begin.credentials.certificates.get("controller")),
            patience_s=job.deadline_s,
            clock_ns=begin.clock_ns,
            replaced=machine.outdated,
            known=machine.knows,
        )
        self._processes = RoleProcesses(
            plan,
            engine,
            run,
            credentials=begin.credentials,
            controller=self._links.address,
            clock_ns=begin.clock_ns,
            heir=heir,
            origin=begin.origin,
            meeting_port=begin.meeting_port,
            refused=lambda reason: self._links.post(TurnedAway(reason)),
        )
        requests = Requests(run.path)
        self._switches = ModeSwitches(plan, self._record, requests, num_workers=lambda: len(machine.working))
        self._evaluations = Evaluations(self._record, machine, self._links, self._processes, requests)
        self._desk = RequestDesk(
            plan, self._record, machine, self._links, self._switches, requests, self._evaluations
        )
        self._guard = TrainingGuard(
            self._record,
            version=begin.origin.version,
            guarded=job.guard,
            periodic=bool(job.checkpoint_every),
            bad_after=begin.bad_after,
            num_workers=lambda: len(machine.working),
            check_mode=self._switches.check,
        )
        self._publisher = StatusPublisher(
            self._record,
            started=begin.started,
            clock_ns=begin.clock_ns,
            watch=watch,
            shown=shown,
            samples=job.spans,
        )
        self._takeover = Takeover(
            begin.predecessor,
            record=self._record,
            machine=machine,
            links=self._links,
            processes=self._processes,
            switches=self._switches,
        )
        self._journal = Journal(run.path)
        self._save = AwaitedSave(job.deadline_s)
        self._time_limit = TimeLimit(job.max_time_s)
        self._going_back = None if begin.predecessor is None else begin.predecessor.going_back
        """Why the run goes back to a checkpoint, until it has."""
        self._led_by = machine.lead
        self._cause_due: float | None = None
        self._hearing = Hearing(
            record=self._record,
            machine=machine,
            links=self._links,
            processes=self._processes,
            guard=self._guard,
            save=self._save,
            switches=self._switches,
            desk=self._desk,
            reports=RoleReports(
                self._record,
                self._guard,
                self._publisher,
                records_mb=job.records_mb,
                own_faults=begin.own_faults,
            ),
            takeover=self._takeover,
            evaluations=self._evaluations,
        )
        self._switches.show(parse_mode(begin.status.mode))

    @property
    def status(self) -> RunStatus:
        """The run's status now."""
        return self._record.status

    @property
    def _lead(self) -> str:
        return f"server:{self._machine.lead}"

    def run(self) -> RunStatus:
        """Run to the end and return the final status. Ctrl-C, SIGTERM and SIGHUP stop the run in order.

        Raises:
            RoleFailed: a role ended in error; all processes are gone, the status is written.
        """
        directory = self._record.directory
        try:
            with interrupts(self._on_signal):
                directory.own()
                self._write_journal()
                self._processes.be_guarded(self._links.listener.sockets[0].fileno())
                self._carry_out(self._first_decisions())
                while not self._machine.state.over:
                    for event in self._events():
                        self._handle(event)
                    self._show()
                    self._write_journal()
                self._end_roles()
                self._write_results()
        finally:
            # The engine first: until then a successor takes over if this process is killed.
            self._processes.close()
            self._links.close()
            self._publisher.close()
            directory.lock.give_back()
        if self._machine.error is not None:
            raise RoleFailed(*self._machine.error)
        return self.status

    # --- events → decisions → actions ---------------------------------------------------------------

    def _events(self) -> Iterator[RunEvent]:
        """What has happened since the last turn. Waits up to 0.1 s for a message."""
        self._poll()
        yield from self._links.events()
        yield from self._processes.exits()
        yield from self._processes.host_events()
        now = time.monotonic()
        if self._cause_due is not None and now > self._cause_due:
            yield CauseOverdue()
        if self._save.overdue(now):
            yield SaveOverdue()
        if not self._takeover.rebuilding:
            yield from self._desk.new(now)
        limit = max(_LEAST_SILENCE_S, self._job.deadline_s / 2)
        for rank, seconds in self._links.silent(now, limit):
            if self._machine.state is RunState.RUNNING:
                yield ServerSilent(rank, seconds)
        yield Tick(now)

    def _handle(self, event: RunEvent) -> None:
        """One event in; all that follows from it is decided, journaled, and carried out."""
        try:
            self._carry_out(self._decide(event))
        except PacelineError as error:
            if not isinstance(event, Said):
                raise
            self._links.refuse(event.link, error)
            return
        if isinstance(event, Said):
            self._acknowledge(event)

    def _decide(self, event: RunEvent) -> Sequence[Decision]:
        match event:
            case Joined():
                return self._hearing.joined(event)
            case Said():
                return self._hearing.message(event)
            case TurnedAway(reason):
                self._record.stranger(reason)
                return []
            case Exited("reader"):
                self._evaluations.exited(event)
                return []
            case Exited(role, rank, incarnation):
                self._hearing.codes.setdefault(f"{role}:{rank}", event.code or 0)
                return self._machine.exited(role, rank, incarnation, event.end)
            case HostJoined() | HostLost() | JoinRefused():
                self._record.host_event(event)
                return []
            case UserRequest():
                return self._desk.decide(event)
            case StopSignal():
                return self._machine.stop_requested()
            case CauseOverdue():
                self._cause_due = None
                return self._machine.patience_over()
            case SaveOverdue():
                self._save.end()
                problem = f"the servers have not got on with it for {self._save.patience_s:g} s"
                return self._machine.saved(problem)
            case ServerSilent(rank, seconds):
                self._links.stop_watching(rank)
                silence = f"server:{rank} has said nothing for {seconds:.0f} s (half of --deadline): it hangs"
                incarnation = self._machine.server_incarnations[rank]
                return self._machine.hung("server", rank, incarnation, silence)
            case Tick(now):
                return self._on_tick(now)
            case _:
                assert_never(event)

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        """Journal the decisions, so that a successor can carry them out, and carry them out."""
        if not decisions:
            return
        for decision in decisions:
            if isinstance(decision, GoBack):
                self._going_back = decision.reason
        self._write_journal()
        for decision in decisions:
            match decision:
                case Launch():
                    self._launch(decision)
                case Kill(role, rank):
                    self._processes.kill(role, rank)
                case Retire(rank):
                    self._links.tell(self._lead, LetWorkerGo(rank))
                case RetireServer(rank):
                    self._links.tell(self._lead, LetServerGo(rank))
                case DismissServer(rank):
                    self._dismiss(rank)
                case Announce():
                    self._links.announce(self._machine.lead)
                case Save():
                    self._ask_for_checkpoint()
                case GoBack(reason):
                    try:
                        self._go_back(reason)
                    except CheckpointError as error:
                        text = f"{reason}, and the run cannot go back to a checkpoint: {error}"
                        self._carry_out(self._machine.give_up(text))
                case LostServer(rank, lead):
                    self._go_on_without(rank, lead)
                case Introduce(rank):
                    self._links.introduce(f"server:{rank}", self._machine.lead)
                case WaitForCause():
                    self._cause_due = self._cause_due or time.monotonic() + _CAUSE_S
                case Note(text):
                    self._record.note(text)
                case End():
                    pass  # `run` sees that the machine is over
                case _:
                    assert_never(decision)

    # --- deciding -----------------------------------------------------------------------------------

    def _acknowledge(self, said: Said) -> None:
        """A role ends after this message and cannot repeat it to a successor: journal it, then let it end."""
        if self._processes.heir is not None and isinstance(said.message, RoleError | RoleFinished):
            self._write_journal()
            self._links.answer(said.link, LastWordsKept())

    def _on_tick(self, now: float) -> Sequence[Decision]:
        """Ask the guard, and the time limit."""
        self._evaluations.tick(now)
        state, is_free = self._machine.state, GUARD not in self._switches.pending
        if state is RunState.RUNNING and is_free and (verdict := self._guard.consult()) is not None:
            return self._hearing.follow(verdict)
        if self._guard.wants_snapshot(now, running=state is RunState.RUNNING):
            self._links.tell(self._lead, SaveSoon())
        if state in (RunState.RUNNING, RunState.RECOVERING):
            self._time_limit.check(self._publisher.elapsed_s, self._links.get(self._lead))
        return []

    def _first_decisions(self) -> Sequence[Decision]:
        """Start the run, or take over a run in progress."""
        self._takeover.announce()
        if self._machine.state.over:
            return []
        if self._machine.state is not RunState.PENDING:
            return self._takeover.decisions_left()
        self._clean_checkpoints()
        directory = self._record.directory
        for text in [*directory.cut_torn_event(), *cut_torn(directory.path / "raw")]:
            self._record.note(text)
        self._processes.start_from(self._processes.origin)
        self._record.show_hosts(self._processes.hosts())
        return self._machine.begin()

    # --- actions ------------------------------------------------------------------------------------

    def _launch(self, launch: Launch) -> None:
        machine, rank = self._machine, launch.rank
        if machine.state.over:  # the run was stopped while it went back
            return
        around = Surroundings(
            mode=self.status.mode,
            lead=machine.lead,
            servers=len(machine.server_incarnations),
            workers=len(machine.working),
        )
        if launch.role == "worker":
            worker = self.status.workers.setdefault(rank, WorkerStatus(rank=rank))
            worker.restarts = machine.restarts[rank]
            worker.state = "starting"
        for server in self._links.connected("server"):  # before it can come to them
            self._links.tell(server, expected_roles(machine))
        host = self._processes.start(launch, around)
        if self.status.hosts:
            self._record.role_on_host(launch.role, rank, host)

    def _dismiss(self, rank: int) -> None:
        self._links.server_gone(rank)
        self.status.servers.pop(rank, None)
        self._record.note(f"server:{rank} has given all it held to the others, and left")
        self._links.tell(f"server:{rank}", StopServing())

    def _go_on_without(self, rank: int, lead: int) -> None:
        """A server is gone. If it was the lead, tell the others which server leads now."""
        self._links.server_gone(rank)
        if self._led_by == lead:
            return
        self._led_by = lead
        for name in self._links.connected("server"):
            if name != f"server:{rank}":
                self._links.introduce(name, lead)
        # The dead lead may not have done what it was asked.
        for worker in self._machine.retired:
            self._links.tell(self._lead, LetWorkerGo(worker))
        for server in self._machine.leaving:
            self._links.tell(self._lead, LetServerGo(server))
        self._switches.refuse_all(f"server:{rank}, which led the run, is gone: ask again")

    def _ask_for_checkpoint(self) -> None:
        """Ask the lead for the checkpoint that the run waits for."""
        now = time.monotonic()
        if self._takeover.rebuilding:  # the lead is asked when all servers are back
            self._save.extend(now)
        elif self._links.get(self._lead) is None:
            self._carry_out(self._machine.saved(f"{self._lead} is gone"))
        else:
            stopping = self._machine.state is RunState.STOPPING
            self._save.ask(now, min(_ANSWER_S, self._job.deadline_s) if stopping else self._job.deadline_s)
            self._links.tell(self._lead, SaveNow(self._machine.state is RunState.FINISHING))

    def _go_back(self, reason: str) -> None:
        """End all processes, and choose the checkpoint that those launched next begin from."""
        self._hear_last_words()
        self._links.drop_all()
        self._led_by, self._cause_due = 0, None
        self._save.end()
        status, directory = self.status, self._record.directory
        self._processes.kill_all(starting=True)
        self._clean_checkpoints()
        origin = Origin.newest(directory.checkpoints_path, self._record.note)
        self._processes.start_from(origin)
        lost, samples = max(0, status.version - origin.version), max(0, status.samples - origin.samples)
        status.version, status.samples = origin.version, origin.samples
        status.ended_early = None
        status.samples_before = min(status.samples_before, origin.samples)
        status.lost_updates += lost
        self._record.list_checkpoints()
        rare = not self._job.checkpoint_every and not self._job.guard
        hint = " --checkpoint-every N makes that shorter." if rare else ""
        where = "to its beginning" if origin.checkpoint is None else f"to checkpoint {origin.checkpoint.name}"
        again = "`paceline resume` computes them again" if self._machine.state.over else "are computed again"
        self._record.note(
            f"{reason}. The run went back {where}: {lost:,} updates ({samples:,} "
            f"samples) are lost, and {again}.{hint}"
        )
        self._switches.refuse_all(f"{reason}, and the run went back {where}: ask again")
        self._going_back = None
        self._guard.went_back(origin.version)
        self._write_journal()

    def _hear_last_words(self) -> None:
        """Roles that lost a server say how far they had come: then what is lost is known, not guessed."""
        awaited, patience = set(self._links.connected("worker")), _LAST_WORDS_S
        if self._takeover.rebuilding:  # workers are on their way here
            awaited = {name for name in self._processes.running() if name.startswith("worker:")}
            patience = _LAST_WORDS_AFTER_TAKEOVER_S
        until = time.monotonic() + patience
        self._links.admits_replaced = True
        while awaited and time.monotonic() < until:
            self._links.poll(0.05)
            for event in self._links.events():
                if not isinstance(event, Said):
                    self._handle(event)
                    continue
                for known in ("version", "samples"):
                    told = getattr(event.message, known, None) or 0
                    setattr(self.status, known, max(getattr(self.status, known), told))
                if isinstance(event.message, RoleError | RoleFinished):
                    awaited.discard(event.name)
                self._acknowledge(event)
        self._links.admits_replaced = False

    def _on_signal(self, number: int) -> None:
        """A signal asks the run to stop. A second one means: now."""
        again = self._desk.stopping
        if not self._desk.may_stop(number):
            return
        if again and self._machine.state.over and self.status.ended:
            raise KeyboardInterrupt  # the user does not wait for the report, either
        self._links.post(StopSignal())

    # --- the loop's chores --------------------------------------------------------------------------

    def _poll(self) -> None:
        """Receive messages. Without a file descriptor for a new connection, serve the others."""
        try:
            self._links.poll(_TICK_S)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._record.note_once(f"the controller cannot accept a role's connection: {explained(error)}")
            time.sleep(_TICK_S)

    def _show(self) -> None:
        """Publish the status, unless the run is over: then the last figures are still to come."""
        processes = self._processes
        self._publisher.sample(processes.local_pids(), processes.usage_elsewhere(), time.monotonic())
        self.status.restarts = sum(self._machine.restarts.values())
        if not self._machine.state.over:
            self._publisher.publish(self._machine.state)

    def _write_journal(self) -> None:
        """Write down what a successor could not find out."""
        if self._processes.heir is None:
            return
        knowledge = Knowledge(
            machine=self._machine.snapshot(),
            pid=os.getpid(),
            started=self._beginning.started,
            clock_ns=self._beginning.clock_ns,
            origin=self._processes.origin.to_json(),
            going_back=self._going_back,
            meeting_port=self._processes.meeting_port,
            bad_after=self._guard.bad_after,
            switching=self._switches.pending,
            status=kept_status(self.status),
        )
        with self._record.tolerating_full_disk():
            self._journal.write(knowledge)

    def _clean_checkpoints(self) -> None:
        """Remove bad and unfinished checkpoints. Only while no server of this run writes."""
        self._guard.discard_bad()
        self._record.remove_unfinished_checkpoints()
        self._evaluations.remove_snapshots()

    # --- the end ------------------------------------------------------------------------------------

    def _end_roles(self) -> None:
        """End all processes: workers at once, servers in order if the run has not failed."""
        graceful = self._machine.state is not RunState.FAILED
        for now in self._evaluations.finishing(self._job.deadline_s, lambda: self._desk.stopping):
            self._hear_until_the_end()
            for event in chain[RunEvent](self._desk.new(now), self._processes.exits()):
                self._handle(event)
        if self._hearing.script_exited:
            self._let_scripts_exit()
        self._processes.kill_workers()
        if graceful:
            for name in self._links.connected("server"):
                self._links.tell(name, StopServing())
        deadline = time.monotonic() + (_EXIT_S if graceful else 0.3)
        while self._processes.running() and time.monotonic() < deadline:
            self._hear_until_the_end()
            self._processes.exits()
        while self._links.connected("server") and time.monotonic() < deadline:
            self._hear_until_the_end()  # the servers have ended, and their last reports are still to be read
        self._processes.kill_all()

    def _let_scripts_exit(self) -> None:
        """The scripts of the other workers probably end in the same way. What they still say is shown."""
        until = time.monotonic() + _SCRIPTS_EXIT_S
        while self._processes.num_workers and time.monotonic() < until:
            self._hear_until_the_end()
            self._processes.exits()

    def _hear_until_the_end(self) -> None:
        self._links.poll(0.02)
        for event in self._links.events():
            self._handle(event)

    def _write_results(self) -> None:
        """Write the tables and the final status."""
        self._clean_checkpoints()
        machine, _directory = self._machine, self._record.directory
        if machine.state is not RunState.FAILED:
            self._guard.judge()
        self._publisher.close()
        self._record.write_tables(self._job.records_mb)
        self.status.restarts = sum(machine.restarts.values())
        if machine.error is not None:
            self.status.error = str(RoleFailed(*machine.error))
            self.status.exit_code = self._hearing.codes.get(machine.error[0], 0)
        self._publisher.publish(machine.state, final=True)
        self._publisher.remove_ledgers()
        if self._finish is not None:
            self._finish(self.status)
