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
from typing import Any

from paceline.causes import Cause, ending_of, explained
from paceline.comm import Certificate, Connection, Frame, Hub, Kind, Listener, Secret, new_secret
from paceline.comm.faults import Faults
from paceline.comm.frames import field
from paceline.control.configs import server_config, worker_config
from paceline.control.journal import Journal
from paceline.control.machine import (
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
    RunMachine,
    RunState,
    Save,
    WaitForCause,
)
from paceline.control.requests import Requests
from paceline.control.rundir import RunDirectory
from paceline.control.steering import Steering
from paceline.control.tail import Tail
from paceline.control.time_limit import TimeLimit
from paceline.engines import Engine, RoleSpec, Succession
from paceline.exceptions import CheckpointError, FrameError, LinkError, RoleFailed
from paceline.modes import Guard, ModeSpec
from paceline.observe import RunStatus, ServerStatus, WorkerStatus
from paceline.observe.resources import Sampler
from paceline.observe.spans import unix_clock_ns
from paceline.observe.tables import to_parquet
from paceline.observe.thinning import metrics_thinning, pushes_thinning
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
_MAX_STRANGERS = 1_000
_KEPT_STATUS = (
    "mode",
    "messages",
    "lost_updates",
    "samples_before",
    "steps_before",
    "startup_s",
    "takeovers",
    "ended_early",
    "left_out",
)
"""Of the status, what roles cannot tell the next controller."""
_ALONE_S = 30.0
"""How long roles go on without a controller, if somebody is to take over."""


class Controller(Steering):
    """Runs a plan to its end.

    Args:
        resume: path of the checkpoint to go on from.
        watch: called with the status about ten times a second, and with new lines of worker 0's output.
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
        watch: Callable[[RunStatus, list[str]], None] | None = None,
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
        """When the run was asked to stop."""
        self._version_before = 0
        self._started = time.monotonic()
        self._shown = 0.0
        self._written = 0.0
        self._time_limit = TimeLimit(job.max_time_s)
        self._output = Tail(run.log_path("worker", 0))
        self._requests = Requests(run.path)
        self._looked = 0.0
        self._spans_broken = False
        self._push_records = pushes_thinning(job.records_mb)
        self._metric_records = metrics_thinning(job.records_mb)
        self._metrics_heard = run.count_events("metrics")
        self._warnings = Watch()
        self._sampler = Sampler(run.path / "raw", self._clock_ns) if job.spans else None
        self._switching: dict[str, ModeSpec] = {}
        self._guard = Guard() if job.guard else None
        self._set_mode(plan.mode)
        self.status.checkpoints = checkpoint_names(run)
        if resume is not None:
            lead = load(resume).meta["lead"]
            self._version_before = lead["machine"]["version"]
            self.status.samples_before = lead["samples"]
            self.status.steps_before = sum(lead["machine"]["clocks"].values())

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
            if self._sampler is not None:
                self._sampler.close()
            with self._going_on_without_disk():
                to_parquet(self.run_dir.path)
            self._tell(final=True)
            if self._finish is not None:
                self._finish(self.status)
        finally:
            # Only now: until then somebody takes over if this process is killed.
            self._engine.close()
            for link in self._links.values():
                link.close()
            self._hub.close()
            if self._sampler is not None:
                self._sampler.close()
            self.run_dir.lock.give_back()
        if self._machine.error is not None:
            raise RoleFailed(*self._machine.error)
        return self.status

    def _begin(self) -> None:
        self._clean_checkpoints()
        self._do(self._machine.begin())

    def _clean_checkpoints(self) -> None:
        """Remove unfinished checkpoints. Only while no server of this run writes; the lock is ours."""
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
            "switching": sorted(self._switching),
            "status": {name: getattr(self.status, name) for name in _KEPT_STATUS},
        }

    def _turn(self) -> None:
        self._poll()
        for exit_ in self._engine.exits():
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
                    self._engine.start(self._spec(role, rank, incarnation))
                case Kill(role, rank):
                    self._engine.kill(role, rank, signal.SIGKILL)
                case Retire(rank):
                    with contextlib.suppress(LinkError, KeyError):
                        self._links[self._lead].send(Kind.LEAVE, {"worker": rank})
                case RetireServer(rank):
                    with contextlib.suppress(LinkError, KeyError):
                        self._links[self._lead].send(Kind.LEAVE, {"server": rank})
                case Dismiss(rank):
                    self._addresses.pop(rank, None)
                    self._heard.pop(rank, None)
                    self.status.servers.pop(rank, None)
                    self._note(f"server:{rank} has given all it held to the others, and left")
                    with contextlib.suppress(LinkError, KeyError):
                        self._links[f"server:{rank}"].send(Kind.STOP)
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
            "servers": len(self._machine.server_incarnations),
            "workers": len(self._machine.working),
            "clock_ns": self._clock_ns,
            "faults": str(self._faults.of(role, rank, incarnation)),
        }
        if role == "server":
            config = server_config(self.plan, self.run_dir, common, self._machine.lead, self._resume)
        else:
            config = worker_config(self.plan, self.run_dir, common)
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
            self._links[name].send(Kind.START, {"servers": servers, "lead": self._machine.lead})

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
                self._links[self._lead].send(Kind.LEAVE, {"worker": worker})
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
            link.send(Kind.CHECKPOINT, {"all_ended": self._machine.state is RunState.FINISHING})

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
        self._version_before = version
        self.status.version, self.status.samples = version, lead["samples"]
        self.status.ended_early = None
        self.status.samples_before = min(self.status.samples_before, lead["samples"])
        lost = max(0, before - version)
        self.status.lost_updates += lost
        self.status.checkpoints = checkpoint_names(self.run_dir)
        where = f"to checkpoint {found.path.name}" if found is not None else "to its beginning"
        hint = "" if self.plan.job.checkpoint_every else " --checkpoint-every N makes that shorter."
        self._note(
            f"{reason}. The run went back {where}: {lost:,} updates ({max(0, samples - lead['samples']):,} "
            f"samples) are lost, and are computed again.{hint}"
        )
        for name in self._switching.copy():
            self._answer(name, {"refused": f"{reason}, and the run went back {where}: ask again"})
        self._going_back = None
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
                    link.send(Kind.STOP)
        deadline = time.monotonic() + (_EXIT_S if graceful else 0.3)
        while self._engine.pids() and time.monotonic() < deadline:
            self._hub.poll(0.02)
            self._engine.exits()
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
        name = connection.peer
        role, _, number = name.partition(":")
        rank = int(number)
        if self._last_words is not None:
            for known in ("version", "samples"):
                newest = max(getattr(self.status, known), int(frame.body.get(known, 0)))
                setattr(self.status, known, newest)
            if frame.kind in (Kind.ERROR, Kind.BYE):
                self._last_words.discard(name)
        elif frame.kind is Kind.READY:
            self._addresses[rank] = field(frame.body, "address", dict)
            self._do(self._machine.server_ready(rank))
        elif frame.kind is Kind.ERROR:
            body = frame.body
            if self._machine.state not in (RunState.SUCCEEDED, RunState.STOPPED):
                # Else servers end, and one of them has seen the end of another before it was told to.
                self._record({"kind": "error", "role": name, **body})
            if role == "worker":
                self.status.workers[rank].state = "failed"
                self._machine.stepped(rank, int(body.get("clock", 0)))
            self._do(
                self._machine.failed(
                    name,
                    f"{body.get('error')}: {body.get('message')}",
                    str(body.get("traceback", "")),
                    cause=_cause(body),
                    error=str(body.get("error")),
                )
            )
        elif frame.kind is Kind.BYE:
            left = rank in self._machine.retired
            self.status.workers[rank].state = "left" if left else "finished"
            self._do([] if left else self._machine.worker_finished(rank))
        elif frame.kind is Kind.STATS:
            self._on_stats(role, rank, frame.body)
        if self._heir is not None and frame.kind in (Kind.ERROR, Kind.BYE):
            # After `_do`, which keeps it: who said it ends, and could not say it to the next controller.
            with contextlib.suppress(LinkError):
                connection.send(Kind.HEARD)

    def on_end(self, connection: Connection, reason: str) -> None:
        """A role's connection is over; the engine says how its process ended."""
        if self._links.get(connection.peer) is connection:
            del self._links[connection.peer]

    def on_stranger(self, reason: str) -> None:
        """Somebody who does not know the secret, or has no certificate. The first thousand are recorded."""
        self._strangers += 1
        if self._strangers <= _MAX_STRANGERS:
            self._record({"kind": "stranger", "reason": reason})

    def _on_stats(self, role: str, rank: int, body: dict[str, Any]) -> None:
        status = self.status
        if role == "worker":
            worker = status.workers[rank]
            worker.hear(body)
            self._machine.stepped(rank, int(body.get("clock", 0)))
            self._check_spans(body)
            if "note" in body:
                self._note(str(body["note"]))
            if "log" in body:
                values = {str(k): float(v) for k, v in body["log"].items()}
                worker.metrics.update(values)
                event = {"kind": "metrics", "worker": rank, "clock": worker.clock}
                self._record_metrics({**event, "metrics": body["log"]})
                if self._guard is not None and "loss" in values:
                    self._guard.loss(values["loss"])
                    self._consult(self._guard)
            return
        self._heard[rank] = time.monotonic()
        if "server" in body:
            server, told = status.servers.get(rank), body["server"]
            if server is None:  # it has left
                return
            server.updates, server.update_s = int(told["updates"]), float(told["update_s"])
            self._check_spans(told)
            if "saving" in told:
                self._on_saving(rank, *map(int, told["saving"]))
            return
        if "begun" in body:
            if self._save_due is not None:
                self._wait_on_for_save()
            return
        if "cut" in body:
            self._on_cut()
            return
        if "checkpoint" in body:
            self._on_saved(body)
            return
        if "replace" in body:
            self._do(
                self._machine.hung("worker", int(body["replace"]), body["incarnation"], str(body["reason"]))
            )
            return
        if "stranger" in body:
            self.on_stranger(f"{role}:{rank}: {body['stranger']}")
            return
        if "note" in body:
            self._note(str(body["note"]))
            return
        if "ending" in body:
            if self.status.ended_early is None:
                self.status.ended_early = str(body["ending"])
                self._note(f"the run ends early: {self.status.ended_early}")
            return
        if "whole" in body:
            self._do(self._machine.whole(set(body["whole"])))
            return
        if "departed" in body:
            self._do(self._machine.departed(int(body["departed"])))
            return
        if "unreachable" in body:
            self._engine.kill("server", int(body["unreachable"]), signal.SIGKILL)
            return
        if "mode" in body:
            self._on_mode(str(body["mode"]), int(body["version"]), body.get("request"))
            return
        if "refused_switch" in body:
            self._answer(str(body["request"]), {"refused": body["refused_switch"]})
            return
        if self._guard is not None:
            self._feed_guard(self._guard, body)
        status.hear(body)
        if left_out := int(body["pushes"]) - self._push_records.rows_of(int(body["pushes"])):
            status.left_out["pushes"] = left_out
        self._own_faults.reached(status.version)

    def _check_spans(self, body: dict[str, Any]) -> None:
        if "spans_broken" in body and not self._spans_broken:
            self._spans_broken = True
            self._note(
                f"spans cannot be written to {self.run_dir.path}: {body['spans_broken']}. Training goes on, "
                "but the report will lack what follows: make room there, or use --no-spans."
            )

    def _on_saved(self, body: dict[str, Any]) -> None:
        path, reason = body["checkpoint"], body.get("reason")
        if path is not None and path != "kept":
            self.status.checkpoints = checkpoint_names(self.run_dir)
            self._record({"kind": "checkpoint", "version": body["version"]})
        answer = bool(body.get("asked")) and self._save_due is not None  # not one of the periodic ones
        if path is None and not answer:
            self._note(f"a checkpoint failed: {reason}")
        if answer:
            self._save_due = None
            self._do(self._machine.saved(reason))

    # --- telling ----------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self.status.messages.append(text)
        self._record({"kind": "note", "text": text})

    def _record_metrics(self, event: dict[str, Any]) -> None:
        """As `_record`, within the budget for records. The newest values are in the status in any case."""
        if self._metric_records.kept(self._metrics_heard):
            self._record(event)
        else:
            self.status.left_out["metrics"] = self.status.left_out.get("metrics", 0) + 1
        self._metrics_heard += 1

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
        now = time.monotonic()
        changed = self.status.state != self._machine.state.value
        self.status.state = self._machine.state.value
        if not self.status.startup_s and self.status.version > self._version_before:
            self.status.startup_s = now - self._started
        self.status.elapsed_s = now - self._started
        self.status.restarts = sum(self._machine.restarts.values())
        if final and self._machine.error is not None:
            self.status.error = str(RoleFailed(*self._machine.error))
        if changed or final or now - self._written > 1.0:
            self._written = now
            for warning in self._warnings.see(self.status):
                self._note(warning)
            with self._going_on_without_disk():
                self.run_dir.write_status(self.status.to_json())
        if self._watch is not None and (changed or final or now - self._shown >= _TICK_S):
            self._shown = now
            self._watch(self.status, self._output.new_lines(flush=final))


def _cause(body: dict[str, Any]) -> Cause:
    """Of a role's report of an error. A server's refusal of a connection says only which error it was."""
    if "cause" in body:
        return Cause(field(body, "cause", str))
    return Cause.LOST_LINK if body.get("error") in ("LinkError", "AuthError") else Cause.USER_ERROR


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
