"""Carries out what the RunMachine decides: one process, one thread, one loop.

It starts roles with an engine, tells them where the servers are, hears how they do, writes that into the
run directory, and ends the run. It holds no parameters and no leases: training does not pass through it.
"""

import contextlib
import errno
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, assert_never

from paceline.causes import Cause, ending_of, explained
from paceline.comm import Certificate, Connection, Frame, Hub, Listener, Secret, new_secret
from paceline.comm.faults import Faults
from paceline.comm.frames import field
from paceline.comm.message_codec import body_of
from paceline.comm.messages import (
    TO_CONTROLLER,
    FullyReplicated,
    LastWordsKept,
    LeadReport,
    LetServerGo,
    LetWorkerGo,
    LoggedMetrics,
    ModeEntered,
    ReplaceWorker,
    RoleError,
    RoleFinished,
    RunEndsEarly,
    SaveBegun,
    SaveCut,
    SaveEnded,
    SaveNow,
    ServerAddresses,
    ServerEmptied,
    ServerListening,
    ServerReport,
    ServerUnreachable,
    StopServing,
    StrangerSeen,
    SwitchRefused,
    ToController,
    UserNote,
    WorkerReport,
)
from paceline.control.attempts import Attempts
from paceline.control.configs import server_config, worker_config
from paceline.control.guarding import Guarding
from paceline.control.journal import Journal
from paceline.control.rendezvous import ReservedPort
from paceline.control.requests import Requests
from paceline.control.rundir import RunDirectory
from paceline.control.tail import Outputs
from paceline.control.time_limit import TimeLimit
from paceline.core.modes import ModeSpec
from paceline.core.run_decisions import (
    Announce,
    Decision,
    Dismiss,
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
from paceline.core.run_machine import RunMachine
from paceline.engines import Engine, RoleSpec, Succession
from paceline.exceptions import CheckpointError, FrameError, LinkError, RoleFailed, UpdateOverflow
from paceline.observe import RunStatus, ServerStatus, WorkerStatus
from paceline.observe.counting import enter_ledgers, go_on_from
from paceline.observe.ledger import Ledgers
from paceline.observe.output import Piece
from paceline.observe.resources import Sampler
from paceline.observe.spans import unix_clock_ns
from paceline.observe.tables import cut_torn, to_parquet
from paceline.observe.thinning import pushes_thinning
from paceline.observe.values import values_left_out
from paceline.observe.watch import Watch
from paceline.plan import Plan, certificates_of
from paceline.storage.checkpoint import clean_temporary, latest, load

__all__ = ["Controller"]

_TICK_S = 0.1
_CAUSE_S = 1.0
_ANSWER_S = 30.0
"""How long the lead server may take to begin with a checkpoint when the run is stopped. It may be in the
middle of an update."""
_SAME_REQUEST_S = 3.0
"""Signals other than Ctrl-C that follow one another sooner mean the same: they were sent to a whole group."""
_EXIT_S = 1.5
_END_S = 5.0
_LAST_WORDS_S = 0.5
_LEAST_SILENCE_S = 2.0
_LOOK_S = 0.2
_LEDGERS_S = 0.5
_MAX_STRANGERS = 1_000
_KEPT_STATUS = (
    "mode",
    "messages",
    "lost_updates",
    "samples_before",
    "steps_before",
    "takeovers",
    "ended_early",
    "left_out",
    "diverged",
    "first_losses",
)
"""Of the status, what roles cannot tell the next controller."""
_ALONE_S = 30.0
"""How long roles go on without a controller, if somebody is to take over."""


class Controller(Guarding):
    """Runs a plan to its end.

    Args:
        resume: path of the checkpoint to go on from.
        watch: called with the status about ten times a second, and with what scripts have written since.
        shown: the worker whose output that is; None: all.
        finish: called with the last status, when the run is over and all is written but what this writes.
        heir: who takes over if this process is killed, see `Succession.call`; None: everything ends with it.
        secret, listener, certificates: of the run, if it has them already.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        run: RunDirectory,
        *,
        resume: Path | None = None,
        watch: Callable[[RunStatus, list[Piece]], None] | None = None,
        shown: int | None = 0,
        finish: Callable[[RunStatus], None] | None = None,
        heir: str | None = None,
        secret: bytes | None = None,
        listener: Listener | None = None,
        certificates: dict[str, Certificate] | None = None,
    ) -> None:
        job = plan.job
        self.plan = plan
        self.run_dir = run
        self.status = RunStatus(run_dir=str(run.path), run_id=run.id)
        self.status.workers = {r: WorkerStatus(rank=r) for r in range(job.workers)}
        self.status.servers = {r: ServerStatus(rank=r) for r in range(len(plan.servers))}
        self._clock_ns = unix_clock_ns()
        self._faults = Faults.from_environment()
        self._own_faults = self._faults.of("controller", 0, 0)
        self._engine = engine
        self._resume = resume
        self._watch = watch
        self._finish = finish
        self._heir = heir
        self._journal = Journal(run.path)
        self._going_back: str | None = None
        """Why the run goes back, until it has."""
        self._secret = secret or new_secret()
        self._certificates = certificates or certificates_of(plan, run.id)
        self._hub = Hub(
            self,
            listener or Listener(tcp=False),
            Secret(self._secret, self._certificates.get("controller")),
            patience_s=job.deadline_s,
            clock_ns=self._clock_ns,
        )
        self._machine = RunMachine(
            servers=len(plan.servers),
            workers=job.workers,
            max_restarts=job.max_restarts,
            groups=plan.groups,
            replicas=job.replicas,
        )
        self._meeting_port = ReservedPort()
        self._links: dict[str, Connection] = {}
        self._heard: dict[int, float] = {}
        """When each server said something last."""
        self._last_words: set[str] | None = None
        """While the run goes back: workers that have not said yet how far they had come."""
        self._addresses: dict[int, dict[str, Any]] = {}
        self._announced = False
        self._led_by = 0
        self._strangers = 0
        self._cause_due: float | None = None
        self._save_due: float | None = None
        self._save_patience = 0.0
        self._saving: dict[int, tuple[int, int]] = {}
        """Of the checkpoint that the run waits for: bytes written and bytes to write, by server."""
        self._stopped_at: float | None = None
        self._version_before = 0
        self._codes: dict[str, int] = {}
        """What roles exited with, or say that they will."""
        self._started = time.monotonic()
        self._shown = 0.0
        self._written = 0.0
        self._time_limit = TimeLimit(job.max_time_s)
        self._output = Outputs(run.logs_path, shown)
        self._requests = Requests(run.path)
        self._looked = 0.0
        self._spans_broken = self._values_broken = False
        self._push_records = pushes_thinning(job.records_mb)
        self._attempts = Attempts(run.path, len(run.record().get("resumes", ())))
        self._steps_before: dict[str, Any] = {}
        """The modes' machine at the checkpoint that the run goes on from: it knows the workers' steps."""
        self._warnings = Watch()
        self._ledgers = Ledgers(run.path / "raw")
        self._ledgers_read = 0.0
        self._sampler = Sampler(run.path / "raw", self._clock_ns) if job.spans else None
        self._switching: dict[str, ModeSpec] = {}
        self._set_mode(plan.mode)
        self.status.checkpoints = checkpoint_names(run)
        if resume is not None:
            lead = load(resume).meta["lead"]
            self._version_before = lead["machine"]["version"]
            self._steps_before = lead["machine"]
            self.status.samples = self.status.samples_before = lead["samples"]
            go_on_from(self.status, run.known_status())
        self.status.first_losses = run.read_status().get("first_losses") or {}
        self._begin_guarding(self._version_before)

    def run(self) -> RunStatus:
        """Run to the end and return the final status. Ctrl-C, SIGTERM and SIGHUP stop the run in order.

        Raises:
            RoleFailed: a role ended in error; all processes are gone, the status is written.
        """
        try:
            with _interrupts(self._stop):
                self.run_dir.own()
                self._be_guarded()
                self._begin()
                while not self._machine.state.over:
                    self._turn()
                self._end()
                self._clean_checkpoints()
                self._judge()
                if self._sampler is not None:
                    self._sampler.close()
                with self._going_on_without_disk():
                    to_parquet(self.run_dir.path, self._note)
                    self._count_left_out()
                self._tell(final=True)
                if self.run_dir.read_status().get("state") == self.status.state:  # else the disk is full
                    self._ledgers.remove()
                if self._finish is not None:
                    self._finish(self.status)
        finally:
            # Only now: until then somebody takes over if this process is killed.
            self._engine.close()
            for link in self._links.values():
                link.close()
            self._hub.close()
            self._meeting_port.close()
            if self._sampler is not None:
                self._sampler.close()
            self.run_dir.lock.give_back()
        if self._machine.error is not None:
            raise RoleFailed(*self._machine.error)
        return self.status

    def _begin(self) -> None:
        self._clean_checkpoints()
        for text in [*self.run_dir.cut_torn_event(), *cut_torn(self.run_dir.path / "raw")]:
            self._note(text)
        self._attempts.begin_anew()
        self._do(self._machine.begin())

    def _clean_checkpoints(self) -> None:
        """Remove unfinished checkpoints. Only while no server of this run writes; the lock is ours."""
        self._discard_bad()
        with contextlib.suppress(CheckpointError):
            clean_temporary(self.run_dir.checkpoints_path)

    def _be_guarded(self) -> None:
        """Have somebody take over if this process is killed."""
        lock = self.run_dir.lock.descriptor
        if self._heir is None or lock is None:
            return
        self._remember()
        self._engine.guard(
            Succession(
                call=self._heir,
                run=str(self.run_dir.path),
                log=str(self.run_dir.log_path("controller")),
                secret=self._secret.hex(),
                listener=self._hub.listener.sockets[0].fileno(),
                lock=lock,
                certificates={role: shown.to_json() for role, shown in self._certificates.items()},
            )
        )

    def _remember(self) -> None:
        """Keep what the next controller could not find out."""
        if self._heir is not None:
            with self._going_on_without_disk():
                self._journal.write(self._knowledge())

    def _knowledge(self) -> dict[str, Any]:
        return {
            "machine": self._machine.snapshot(),
            "pid": os.getpid(),
            "started": self._started,
            "clock_ns": self._clock_ns,
            "resume": None if self._resume is None else str(self._resume),
            "version_before": self._version_before,
            "going_back": self._going_back,
            "meeting_port": self._meeting_port.number,
            "bad_after": self._bad_after,
            "switching": sorted(self._switching),
            "status": {name: getattr(self.status, name) for name in _KEPT_STATUS},
        }

    def _turn(self) -> None:
        self._poll()
        for exit_ in self._engine.exits():
            self._codes.setdefault(f"{exit_.role}:{exit_.rank}", exit_.code or 0)
            ending = ending_of(exit_.code, exit_.signal)
            self._do(self._machine.exited(exit_.role, exit_.rank, exit_.incarnation, ending))
        now = time.monotonic()
        if self._cause_due is not None and now > self._cause_due:
            self._cause_due = None
            self._do(self._machine.patience_over())
        if self._save_due is not None and now > self._save_due:
            self._save_due = None
            self._do(
                self._machine.saved(f"the servers have not got on with it for {self._save_patience:g} s")
            )
        self._look_at_requests(now)
        self._check_servers(now)
        self._consult()
        self._keep_if_due(now)
        if self._machine.state in (RunState.RUNNING, RunState.RECOVERING):
            self._time_limit.check(now - self._started, self._links.get(self._lead))
        if self._sampler is not None and self._sampler.due(now):
            self._sample(self._sampler)
        self._tell()
        self._remember()

    def _poll(self) -> None:
        """Hear the roles. Without descriptors for more of them, those that are connected go on."""
        try:
            self._hub.poll(_TICK_S)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            text = f"the controller cannot accept a role's connection: {explained(error)}"
            if text not in self.status.messages:
                self._note(text)
            time.sleep(_TICK_S)

    def _look_at_requests(self, now: float) -> None:
        if now - self._looked > _LOOK_S:
            self._looked = now
            for name, body in self._requests.pending().items():
                self._on_request(name, body)

    def _check_servers(self, now: float) -> None:
        """Servers tell how they do twice a second, whatever they are at: one that is silent hangs."""
        limit = max(_LEAST_SILENCE_S, self.plan.job.deadline_s / 2)
        for rank, heard in list(self._heard.items()):
            if now - heard > limit and self._machine.state is RunState.RUNNING:
                del self._heard[rank]
                reason = (
                    f"server:{rank} has said nothing for {now - heard:.0f} s (half of --deadline): it hangs"
                )
                incarnation = self._machine.server_incarnations[rank]
                self._do(self._machine.hung("server", rank, incarnation, reason))

    def _sample(self, sampler: Sampler) -> None:
        """What the roles use now."""
        used = sampler.sample({**self._engine.pids(), "controller": os.getpid()})
        self.status.memory_kind = sampler.memory_kind
        roles: list[WorkerStatus | ServerStatus] = [*self.status.workers.values()]
        for role in [*roles, *self.status.servers.values()]:
            usage = used.get(role.name)
            role.cpu, role.memory = (usage.cpu, usage.memory) if usage is not None else (0.0, role.memory)

    # --- decisions --------------------------------------------------------------------------------

    def _do(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, GoBack):
                self._going_back = decision.reason
        self._remember()
        for decision in decisions:
            match decision:
                case Launch(role, rank, incarnation):
                    if not self._machine.state.over:  # else it was stopped while it went back
                        self._engine.start(self._spec(role, rank, incarnation))
                case Kill(role, rank):
                    self._engine.kill(role, rank, signal.SIGKILL)
                case Retire(rank):
                    with contextlib.suppress(LinkError, KeyError):
                        self._links[self._lead].tell(LetWorkerGo(rank))
                case RetireServer(rank):
                    with contextlib.suppress(LinkError, KeyError):
                        self._links[self._lead].tell(LetServerGo(rank))
                case Dismiss(rank):
                    self._addresses.pop(rank, None)
                    self._heard.pop(rank, None)
                    self.status.servers.pop(rank, None)
                    self._note(f"server:{rank} has given all it held to the others, and left")
                    with contextlib.suppress(LinkError, KeyError):
                        self._links[f"server:{rank}"].tell(StopServing())
                case Announce():
                    self._announce()
                case Save():
                    self._save()
                case GoBack(reason):
                    self._go_back(reason)
                case LostServer(rank, lead):
                    self._go_on_without(rank, lead)
                case Introduce(rank):
                    self._start(f"server:{rank}")
                case WaitForCause():
                    self._cause_due = self._cause_due or time.monotonic() + _CAUSE_S
                case Note(text):
                    self._note(text)
                case End():
                    pass  # the loop sees that the machine is over

    def _spec(self, role: str, rank: int, incarnation: int) -> RoleSpec:
        shown = self._certificates.get(role)
        common = {
            "rank": rank,
            "incarnation": incarnation,
            "mode": self.status.mode,
            "servers": len(self._machine.server_incarnations),
            "workers": len(self._machine.working),
            "clock_ns": self._clock_ns,
            "faults": str(self._faults.of(role, rank, incarnation)),
        }
        if role == "server":
            config = server_config(self.plan, self.run_dir, common, self._machine.lead, self._resume)
        else:
            config = worker_config(
                self.plan,
                self.run_dir,
                common,
                self._meeting_port.number,
                self._attempts.start(rank),
                self._steps_before.get("clocks", {}).get(str(rank), self._steps_before.get("floor", 0)),
            )
            self.status.workers.setdefault(rank, WorkerStatus(rank=rank))
            self.status.workers[rank].restarts = self._machine.restarts[rank]
            self.status.workers[rank].state = "starting"
        return RoleSpec(
            role=role,
            rank=rank,
            incarnation=incarnation,
            log=str(self.run_dir.log_path(role, rank)),
            secret=self._secret.hex(),
            controller=self._hub.listener.address.to_json(),
            certificate=None if shown is None else shown.to_json(),
            patience_s=0.0 if self._heir is None else _ALONE_S,
            config=config,
        )

    def _announce(self) -> None:
        self._announced = True
        for name in list(self._links):
            self._start(name)

    def _start(self, name: str) -> None:
        if self._machine.lead not in self._addresses:
            return  # after a takeover the lead has yet to say where it is; all are told then
        servers = {str(rank): address for rank, address in sorted(self._addresses.items())}
        with contextlib.suppress(LinkError):
            self._links[name].tell(ServerAddresses(servers, self._machine.lead))

    def _go_on_without(self, rank: int, lead: int) -> None:
        """A server is gone; if it led, another one does now."""
        self._addresses.pop(rank, None)
        self._heard.pop(rank, None)
        if self._led_by == lead:
            return
        self._led_by = lead
        for name in [name for name in self._links if name.startswith("server:")]:
            if name != f"server:{rank}":
                self._start(name)
        # What the one before was asked for it may not have done.
        for worker in self._machine.retired:
            with contextlib.suppress(LinkError, KeyError):
                self._links[self._lead].tell(LetWorkerGo(worker))
        for name in self._switching.copy():
            self._answer(name, {"refused": f"server:{rank}, which led the run, is gone: ask again"})

    def _save(self) -> None:
        link = self._links.get(self._lead)
        if link is None:
            self._do(self._machine.saved(f"{self._lead} is gone"))
            return
        stopping, deadline = self._machine.state is RunState.STOPPING, self.plan.job.deadline_s
        self._save_patience = min(_ANSWER_S, deadline) if stopping else deadline
        self._save_due = time.monotonic() + self._save_patience
        self._saving.clear()
        with contextlib.suppress(LinkError):
            link.tell(SaveNow(self._machine.state is RunState.FINISHING))

    def _go_back(self, reason: str) -> None:
        """End all processes, and choose the checkpoint that those launched next begin from."""
        self._hear_last_words()
        for link in self._links.values():
            self._hub.release(link)
            link.close()
        self._links.clear()
        self._addresses.clear()
        self._heard.clear()
        self._announced = False
        self._led_by = 0
        self._cause_due = self._save_due = None
        patience = time.monotonic() + _END_S
        servers = [("server", rank) for rank in self.status.servers]
        # With those that joined since: all whom the run has had.
        for role, rank in [*servers, *(("worker", rank) for rank in self.status.workers)]:
            self._engine.kill(role, rank, signal.SIGKILL)
        while self._engine.pids() and time.monotonic() < patience:
            select.select([self._engine], [], [], 0.1)
            self._engine.exits()  # of no interest: they were meant
        self._clean_checkpoints()
        found = latest(self.run_dir.checkpoints_path)
        before, samples = self.status.version, self.status.samples
        lead: dict[str, Any] = (
            found.meta["lead"] if found is not None else {"machine": {"version": 0}, "samples": 0}
        )
        version = lead["machine"]["version"]
        self._resume = None if found is None else found.path
        self._attempts.begin_anew()
        self._steps_before = lead["machine"]
        self._version_before = version
        self.status.version, self.status.samples = version, lead["samples"]
        self.status.ended_early = None
        self.status.samples_before = min(self.status.samples_before, lead["samples"])
        lost = max(0, before - version)
        self.status.lost_updates += lost
        self.status.checkpoints = checkpoint_names(self.run_dir)
        where = f"to checkpoint {found.path.name}" if found is not None else "to its beginning"
        job = self.plan.job
        hint = "" if job.checkpoint_every or job.guard else " --checkpoint-every N makes that shorter."
        again = "`paceline resume` computes them again" if self._machine.state.over else "are computed again"
        self._note(
            f"{reason}. The run went back {where}: {lost:,} updates ({max(0, samples - lead['samples']):,} "
            f"samples) are lost, and {again}.{hint}"
        )
        for name in self._switching.copy():
            self._answer(name, {"refused": f"{reason}, and the run went back {where}: ask again"})
        self._going_back = None
        self._went_back(version)
        self._remember()

    def _hear_last_words(self) -> None:
        """Roles that lost a server say how far they had come: then what is lost is known, not guessed."""
        self._last_words, patience = self._awaited()
        until = time.monotonic() + patience
        while self._last_words and time.monotonic() < until:
            self._hub.poll(0.05)
        self._last_words = None

    def _awaited(self) -> tuple[set[str], float]:
        """Whose last words can be heard, and how long to wait for them."""
        return {name for name in self._links if name.startswith("worker:")}, _LAST_WORDS_S

    def _stop(self, number: int) -> None:
        """A signal asks the run to stop. A second one means: now. It may be sent to all processes at once."""
        now, before = time.monotonic(), self._stopped_at
        if before is None:
            self._stopped_at, self.status.stopped_by = now, number
        elif number != signal.SIGINT and now - before < _SAME_REQUEST_S:
            return
        elif self._machine.state.over and self.status.ended:
            raise KeyboardInterrupt  # who asks again does not wait for the report, either
        self._hub.post(lambda: self._do(self._machine.stop_requested()))

    def _on_saving(self, server: int, done: int, total: int) -> None:
        """A server writes its part of a checkpoint. While the run waits for that, it may take its time."""
        if self._save_due is None or self._saving.get(server) == (done, total):
            return
        self._saving[server] = (done, total)
        written, whole = zip(*self._saving.values(), strict=True)
        self.status.saving = (sum(written), sum(whole))
        self._wait_on_for_save()

    def _wait_on_for_save(self) -> None:
        self._save_patience = self.plan.job.deadline_s
        self._save_due = time.monotonic() + self._save_patience

    def _on_cut(self) -> None:
        """The checkpoint needs no worker any more, and what workers compute from here on is not in it."""
        if self._save_due is None or self._machine.state is not RunState.STOPPING:
            return
        self._wait_on_for_save()
        for rank in self.status.workers:
            self._engine.kill("worker", rank, signal.SIGKILL)

    def _end(self) -> None:
        """All processes end: workers at once, servers by themselves if they can."""
        running = self._engine.pids()
        graceful = self._machine.state is not RunState.FAILED
        for name in running:
            role, _, rank = name.partition(":")
            if role == "worker":
                self._engine.kill(role, int(rank), signal.SIGKILL)
        for name, link in self._links.items():
            if name.startswith("server:") and graceful:
                with contextlib.suppress(LinkError):
                    link.tell(StopServing())
        deadline = time.monotonic() + (_EXIT_S if graceful else 0.3)
        while self._engine.pids() and time.monotonic() < deadline:
            self._hub.poll(0.02)
            self._engine.exits()
        while any(name.startswith("server:") for name in self._links) and time.monotonic() < deadline:
            self._hub.poll(0.02)  # they have ended, and what they said last is still to be read
        patience = time.monotonic() + _END_S
        while (left := self._engine.pids()) and time.monotonic() < patience:
            for name in left:
                role, _, rank = name.partition(":")
                self._engine.kill(role, int(rank), signal.SIGKILL)
            select.select([self._engine], [], [], 0.1)
            self._engine.exits()

    # --- what roles say ---------------------------------------------------------------------------

    def on_hello(self, connection: Connection, body: dict[str, Any]) -> None:
        """A role is up."""
        name = connection.peer
        role, rank = field(body, "role", str), field(body, "rank", int)
        if role not in ("server", "worker"):
            raise FrameError(f"an unknown role {role!r}")
        if self._last_words is None and self._machine.outdated(role, rank, field(body, "incarnation", int)):
            raise FrameError(f"{name} was replaced")
        older = self._links.get(name)
        if older is not None:
            self._hub.release(older)
            older.close()
        self._links[name] = connection
        if role == "worker":
            self.status.workers[rank].state = "running"
            pid = field(body, "pid", int)
            if self.status.workers[rank].pid != pid:  # else it has lost a controller, and goes on
                self.status.workers[rank].phases = {}
            self.status.workers[rank].pid = pid
            self._do(self._machine.worker_back(rank))
            if self._announced:
                self._start(name)
        else:
            # A server that joined shortly before a takeover is not in the status that was written last.
            known = self.status.servers.setdefault(rank, ServerStatus(rank=rank))
            known.pid = field(body, "pid", int)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """News from a role."""
        said = TO_CONTROLLER.read(frame.kind, frame.body)
        if self._last_words is not None:
            self._hear_last(connection.peer, said)
        else:
            self._on_message(connection.peer, said)
        if self._heir is not None and isinstance(said, RoleError | RoleFinished):
            # After `_do`, which keeps it: who said it ends, and could not say it to the next controller.
            with contextlib.suppress(LinkError):
                connection.tell(LastWordsKept())

    def _hear_last(self, name: str, said: ToController) -> None:
        """While the run goes back: how far it had come."""
        assert self._last_words is not None
        for known in ("version", "samples"):
            newest = max(getattr(self.status, known), getattr(said, known, None) or 0)
            setattr(self.status, known, newest)
        if isinstance(said, RoleError | RoleFinished):
            self._last_words.discard(name)

    def _on_message(self, name: str, said: ToController) -> None:
        role, _, number = name.partition(":")
        rank, status = int(number), self.status
        if role == "server" and not isinstance(said, RoleError | ServerListening):
            self._heard[rank] = time.monotonic()
        match said:
            case RoleError():
                self._on_error(name, said)
            case RoleFinished(untrained):
                left = rank in self._machine.retired
                status.workers[rank].state = "left" if left else "finished"
                self._do([] if left else self._machine.worker_finished(rank, trained=not untrained))
            case UserNote(text):
                self._note(text)
            case WorkerReport():
                status.workers[rank].hear(said._asdict())
                self._ledgers.hear(rank, said.ledger)
                self._machine.stepped(rank, said.clock)
                self._check_spans(said.spans_broken)
                self._check_values(said.values_broken)
            case LoggedMetrics():
                self._machine.stepped(rank, said.clock)
                status.workers[rank].metrics.update(said.log)
                status.workers[rank].logged_at = said.log_at
                self._hear_metrics(rank, said)
            case ServerListening(address):
                self._addresses[rank] = address
                self._do(self._machine.server_ready(rank))
            case ServerReport():
                if (server := status.servers.get(rank)) is None:  # it has left
                    return
                server.updates, server.update_s = said.updates, said.update_s
                self._check_spans(said.spans_broken)
                if said.saving is not None:
                    self._on_saving(rank, *said.saving)
            case StrangerSeen(reason):
                self.on_stranger(f"{name}: {reason}")
            case LeadReport():
                self._on_lead_report(said)
            case SaveBegun():
                if self._save_due is not None:
                    self._wait_on_for_save()
            case SaveCut():
                self._on_cut()
            case SaveEnded():
                self._on_saved(said)
            case ReplaceWorker(worker, incarnation, reason):
                self._do(self._machine.hung("worker", worker, incarnation, reason))
            case RunEndsEarly(reason):
                if status.ended_early is None:
                    status.ended_early = reason
                    self._note(f"the run ends early: {reason}")
            case FullyReplicated(servers):
                self._do(self._machine.whole(set(servers)))
            case ServerEmptied(server_rank):
                self._do(self._machine.departed(server_rank))
            case ServerUnreachable(server_rank):
                self._engine.kill("server", server_rank, signal.SIGKILL)
            case ModeEntered(mode, version, request):
                self._on_mode(mode, version, request)
            case SwitchRefused(request, reason):
                self._answer(request, {"refused": reason})
            case _:
                assert_never(said)

    def _on_error(self, name: str, said: RoleError) -> None:
        role, _, number = name.partition(":")
        self._codes[name] = 1 if said.code is None else said.code
        if self._machine.state not in (RunState.SUCCEEDED, RunState.STOPPED):
            # Else servers end, and one of them has seen the end of another before it was told to.
            self._record({"kind": "error", "role": name, **body_of(said)[1]})
        if role == "worker":
            self.status.workers[int(number)].state = "failed"
            self._machine.stepped(int(number), said.clock or 0)
        message = f"{said.error}: {said.message}"
        if said.error == UpdateOverflow.__name__:
            if self._overflowed():
                return
            message += f" {self.status.diverged or ''}"
        self._do(
            self._machine.failed(name, message, said.traceback, cause=_cause(said), error=said.error),
        )

    def _on_lead_report(self, said: LeadReport) -> None:
        status = self.status
        self._hear_pushes(said)
        if said.samples > status.samples:
            status.progressed_s = time.monotonic() - self._started
        status.hear({**said._asdict(), "leases": list(said.leases)})
        if left_out := said.pushes - self._push_records.rows_of(said.pushes):
            status.left_out["pushes"] = left_out
        self._own_faults.reached(status.version)

    def on_end(self, connection: Connection, reason: str) -> None:
        """A role's connection is over; the engine says how its process ended."""
        if self._links.get(connection.peer) is connection:
            del self._links[connection.peer]

    def on_stranger(self, reason: str) -> None:
        """Somebody who does not know the secret, or has no certificate. The first thousand are recorded."""
        self._strangers += 1
        if self._strangers <= _MAX_STRANGERS:
            self._record({"kind": "stranger", "reason": reason})

    def _check_spans(self, problem: str | None) -> None:
        if problem is not None and not self._spans_broken:
            self._spans_broken = True
            self._note(
                f"spans cannot be written to {self.run_dir.path}: {problem}. Training goes on, "
                "but the report will lack what follows: make room there, or use --no-spans."
            )

    def _check_values(self, problem: str | None) -> None:
        if problem is not None and not self._values_broken:
            self._values_broken = True
            self._note(
                f"logged values cannot be written to {self.run_dir.path}: {problem}. Training "
                "goes on, and each worker keeps its last 20,000 until there is room: make some there."
            )

    def _count_left_out(self) -> None:
        """Say how many logged values are not in the records."""
        if left_out := values_left_out(self.run_dir.path):
            self.status.left_out["metrics"] = left_out
            self._note(
                f"{left_out:,} logged values are not in the records: these have a budget (--records-mb "
                f"{self.plan.job.records_mb}), of which a quarter is for values, or the disk was full."
            )

    def _on_saved(self, said: SaveEnded) -> None:
        if said.checkpoint is not None and said.checkpoint != "kept":
            self.status.checkpoints = checkpoint_names(self.run_dir)
            self._was_kept()
            self._record({"kind": "checkpoint", "version": said.version})
        answer = said.asked and self._save_due is not None  # not one of the periodic ones
        if said.checkpoint is None and not answer:
            self._note(f"a checkpoint failed: {said.reason}")
        if answer:
            self._save_due = None
            self._do(self._machine.saved(said.reason))

    # --- telling ----------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self.status.messages.append(text)
        self._record({"kind": "note", "text": text})

    def _record(self, event: dict[str, Any]) -> None:
        with self._going_on_without_disk():
            self.run_dir.append_event(event)

    @contextlib.contextmanager
    def _going_on_without_disk(self) -> Iterator[None]:
        """What is written here is for looking at: a full disk is no reason to lose a training."""
        try:
            yield
        except OSError as error:
            text = (
                f"the run directory {self.run_dir.path} cannot be written: {error.strerror or error}. "
                "Training goes on, but its status and events are not kept: make room there."
            )
            if text not in self.status.messages:
                self.status.messages.append(text)

    def _tell(self, *, final: bool = False) -> None:
        if self._machine.state.over and not final:
            return  # the last figures are still to come, with the servers' ends
        now = time.monotonic()
        changed = self.status.state != self._machine.state.value
        self.status.state = self._machine.state.value
        self.status.elapsed_s = now - self._started
        if final or now - self._ledgers_read > _LEDGERS_S:
            self._ledgers_read = now
            self._ledgers.read()
            enter_ledgers(self.status, self._ledgers, round(self._started * 1e9) + self._clock_ns)
        self.status.restarts = sum(self._machine.restarts.values())
        if final and self._machine.error is not None:
            self.status.error = str(RoleFailed(*self._machine.error))
            self.status.exit_code = self._codes.get(self._machine.error[0], 0)
        if changed or final or now - self._written > 1.0:
            self._written = now
            self.status.first_losses = self._divergence.first
            for warning in self._warnings.see(self.status):
                self._note(warning)
            with self._going_on_without_disk():
                self.run_dir.write_status(self.status.to_json())
        if self._watch is not None and (changed or final or now - self._shown >= _TICK_S):
            self._shown = now
            self._watch(self.status, self._output.new(self.status.workers, final=final))


def _cause(said: RoleError) -> Cause:
    """Of a role's report of an error. A server's refusal of a connection says only which error it was."""
    if said.cause is not None:
        return Cause(said.cause)
    return Cause.LOST_LINK if said.error in ("LinkError", "AuthError") else Cause.USER_ERROR


def checkpoint_names(run: RunDirectory) -> list[str]:
    """Those that are there, oldest first."""
    return sorted(p.name for p in run.checkpoints_path.glob("version-*") if not p.suffix)


@contextlib.contextmanager
def _interrupts(stop: Callable[[int], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP (the terminal is gone) call `stop` with their number meanwhile. Elsewhere
    than in the main thread they cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else somebody wants it to go on: nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda which, _: stop(which)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
