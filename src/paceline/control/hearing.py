"""What follows from a role's messages and from the guard's verdicts: decisions, and entries in the status."""

import time
from collections.abc import Sequence
from typing import assert_never

from paceline.causes import Cause
from paceline.comm.message_codec import body_of
from paceline.comm.messages import (
    FullyReplicated,
    LeadReport,
    LoggedMetrics,
    ModeEntered,
    ReplaceWorker,
    RoleError,
    RoleFinished,
    RolesExpected,
    RunEndsEarly,
    SaveBegun,
    SaveCut,
    SaveEnded,
    ServerEmptied,
    ServerListening,
    ServerReport,
    ServerUnreachable,
    StrangerSeen,
    SwitchRefused,
    UserNote,
    WorkerReport,
)
from paceline.control.awaited_save import AwaitedSave
from paceline.control.mode_switches import GUARD, ModeSwitches
from paceline.control.processes import RoleProcesses
from paceline.control.request_desk import RequestDesk
from paceline.control.role_links import Joined, RoleLinks, Said
from paceline.control.role_reports import RoleReports
from paceline.control.run_record import RunRecord
from paceline.control.run_requests import Refused
from paceline.control.succession import Takeover
from paceline.control.training_guard import GiveUp, Rewind, Tighten, TrainingGuard, Verdict
from paceline.core.run_decisions import Decision, RunState
from paceline.core.run_machine import RunMachine
from paceline.exceptions import FrameError, ScriptExit, UpdateOverflow, UsageError
from paceline.observe import ServerStatus, WorkerStatus

__all__ = ["Hearing", "expected_roles"]


class Hearing:
    """Turns messages of roles into decisions. Its parts are the controller's."""

    def __init__(
        self,
        *,
        record: RunRecord,
        machine: RunMachine,
        links: RoleLinks,
        processes: RoleProcesses,
        guard: TrainingGuard,
        save: AwaitedSave,
        switches: ModeSwitches,
        desk: RequestDesk,
        reports: RoleReports,
        takeover: Takeover,
    ) -> None:
        self._record = record
        self._machine = machine
        self._links = links
        self._processes = processes
        self._guard = guard
        self._save = save
        self._switches = switches
        self._desk = desk
        self._reports = reports
        self._takeover = takeover
        self.codes: dict[str, int] = {}
        """Exit codes of roles, as they ended or say that they will."""
        self.script_exited = False
        """Whether the run failed because a script ended with an exit code of its own."""

    def joined(self, event: Joined) -> Sequence[Decision]:
        """A role has connected."""
        rank, pid = event.rank, event.pid
        if event.role == "server":
            # A server that joined shortly before a takeover is not in the status that was written last.
            self._record.status.servers.setdefault(rank, ServerStatus(rank=rank)).pid = pid
            return []
        worker = self._record.status.workers.setdefault(rank, WorkerStatus(rank=rank))
        worker.state = "running"
        if worker.pid != pid:  # else the same process has lost a controller, and goes on
            worker.phases = {}
        worker.pid = pid
        decisions = self._machine.worker_back(rank)
        self._links.introduce_newcomer(worker.name, self._machine.lead)
        return decisions

    def message(self, said: Said) -> Sequence[Decision]:
        """A role sent a message."""
        rank, message, status = said.rank, said.message, self._record.status
        if said.role == "server" and not isinstance(message, RoleError | ServerListening):
            self._links.heard(rank)
        match message:
            case RoleError():
                return self._on_error(said, message)
            case RoleFinished(untrained):
                left = rank in self._machine.retired
                status.workers[rank].state = "left" if left else "finished"
                return [] if left else self._machine.worker_finished(rank, trained=not untrained)
            case UserNote(text):
                self._record.note(text)
            case WorkerReport():
                self._machine.stepped(rank, message.clock)
                self._reports.worker(rank, message)
            case LoggedMetrics():
                self._machine.stepped(rank, message.clock)
                self._reports.metrics(rank, message)
            case ServerListening(address):
                self._links.locate(rank, address)
                self._links.tell(said.name, expected_roles(self._machine))
                return [*self._machine.server_ready(rank), *self._takeover.decisions_if_rebuilt()]
            case ServerReport():
                self._reports.server(rank, message)
                if message.saving is not None and rank in status.servers:
                    progress = self._save.progress(rank, message.saving, time.monotonic())
                    status.saving = progress or status.saving
            case StrangerSeen(reason):
                self._record.stranger(f"{said.name}: {reason}")
            case LeadReport():
                self._reports.lead(message)
            case SaveBegun():
                if self._save.awaited:
                    self._save.extend(time.monotonic())
            case SaveCut():
                # What workers compute from here on is not in the checkpoint.
                if self._save.awaited and self._machine.state is RunState.STOPPING:
                    self._save.extend(time.monotonic())
                    for worker in status.workers:
                        self._processes.kill("worker", worker)
            case SaveEnded():
                return self._on_saved(message)
            case ReplaceWorker(worker, incarnation, reason):
                return self._machine.hung("worker", worker, incarnation, reason)
            case RunEndsEarly(reason):
                if status.ended_early is None:
                    status.ended_early = reason
                    self._record.note(f"the run ends early: {reason}")
            case FullyReplicated(servers):
                return self._machine.whole(set(servers))
            case ServerEmptied(server):
                return self._machine.departed(server)
            case ServerUnreachable(server):
                self._processes.kill("server", server)
            case ModeEntered():
                self._switches.entered(message)
            case SwitchRefused(request, reason):
                self._switches.answer(request, Refused(reason))
            case _:
                assert_never(message)
        return []

    def _on_error(self, said: Said, report: RoleError) -> Sequence[Decision]:
        self.codes[said.name] = 1 if report.code is None else report.code
        if self._machine.state not in (RunState.SUCCEEDED, RunState.STOPPED):
            # Then servers end, and one of them may see the end of another before its own order to stop.
            self._record.event("error", role=said.name, **body_of(report)[1])
        if said.role == "worker":
            self._record.status.workers[said.rank].state = "failed"
            self._machine.stepped(said.rank, report.clock or 0)
        self.script_exited |= report.error == ScriptExit.__name__ and not self._machine.state.over
        text = f"{report.error}: {report.message}"
        if report.error == UpdateOverflow.__name__:
            if self._machine.state in (RunState.RUNNING, RunState.RECOVERING) and (
                verdict := self._guard.overflowed()
            ):
                return self.follow(verdict)
            text += f" {self._record.status.diverged or ''}"
        return self._machine.failed(
            said.name, text, report.traceback, cause=_cause(report), error=report.error
        )

    def _on_saved(self, ended: SaveEnded) -> Sequence[Decision]:
        if ended.checkpoint is not None and ended.checkpoint != "kept":
            self._record.list_checkpoints()
            self._guard.checkpoint_written()
            self._record.event("checkpoint", version=ended.version)
        if ended.asked and self._save.awaited:
            self._save.end()
            return self._machine.saved(ended.reason)
        if ended.checkpoint is None:
            self._record.note(f"a checkpoint failed: {ended.reason}")
        return []

    def follow(self, verdict: Verdict) -> Sequence[Decision]:
        """What follows from a verdict of the guard."""
        match verdict:
            case Tighten(mode):
                try:
                    self._desk.switch(GUARD, mode)
                except UsageError as error:
                    self._record.note(f"guard: the run cannot be switched to {mode}: {error}")
                return []
            case Rewind(mode, reason):
                self._switches.force(mode)
                return self._machine.diverged(reason)
            case GiveUp(message):
                return self._machine.give_up(message)
            case _:
                assert_never(verdict)


def expected_roles(machine: RunMachine) -> RolesExpected:
    """What servers must know of the run's processes."""
    return RolesExpected({**machine.incarnations}, {**machine.server_incarnations})


def _cause(report: RoleError) -> Cause:
    """The cause that a role reports. A server's refusal of a connection has only the class of the error."""
    if report.cause is None:
        return Cause.LOST_LINK if report.error in ("LinkError", "AuthError") else Cause.USER_ERROR
    try:
        return Cause(report.cause)
    except ValueError:
        raise FrameError(f"an unknown cause {report.cause!r:.40}") from None
