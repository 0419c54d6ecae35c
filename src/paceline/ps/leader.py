"""Leader: the server that makes the run's order. Server 0, or the server that was promoted in its place.

What it decides is in the core (LeadMachine). This class has the sockets, the memory and the files: it reads
messages, tells the machine what they mean, and performs the actions that the machine returns.

With replicas it sends followers every event before it acts on what follows from it, so that each of them
could lead. A promoted server begins by placing the slices of the leader that is gone.
"""

import collections
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from paceline.comm import Connection, Frame, Kind, messages
from paceline.comm import server_messages as between_servers
from paceline.comm import worker_messages as sent
from paceline.comm.frames import Body, field
from paceline.comm.hub import refuse
from paceline.core.events import Event, Rate
from paceline.core.json_types import JsonObject
from paceline.core.sequencer import OrderLog
from paceline.core.server import lead_actions as actions
from paceline.core.server.lead_actions import Action, Actions
from paceline.core.server.lead_machine import LeadMachine
from paceline.core.server.lead_reports import LeaderReport
from paceline.core.server.present import Present
from paceline.core.server.start_gate import StartGate
from paceline.exceptions import CheckpointError, FrameError, LinkError, PacelineError
from paceline.observe.record.thinning import pushes_thinning
from paceline.ps import outcomes
from paceline.ps.adoption import Adoption, Offer
from paceline.ps.attachments import rank_of, saved_part
from paceline.ps.checkpoints import CheckpointFiles, directories_in
from paceline.ps.config import lead_settings, new_decider
from paceline.ps.follower import Follower
from paceline.ps.lead_progress import progress_of
from paceline.ps.model_desk import ModelDesk
from paceline.ps.outcomes import Outcome
from paceline.ps.parts import LOG_STEPS, ServerParts
from paceline.ps.peers import WorkerPeer
from paceline.ps.push_record import PushRecord
from paceline.ps.replicator import Replicator, server_rank
from paceline.ps.run_errors import EndsRun, blaming
from paceline.ps.saving import read_blob
from paceline.ps.worker_frames import account_events, push_request, read_request
from paceline.storage.checkpoint import FileInfo, load

__all__ = ["Leader"]

log = logging.getLogger("paceline.server")

_TICK_S = 0.25
"""Time between two looks at deadlines and checkpoints, and between two reports of progress."""
_MOST_NORMS = 64
"""Maximum number of norms of gradients in one report of progress."""


class Leader:
    """A hub's handler; the main thread only.

    Args:
        machine: makes the decisions; its applied pushes are pending in the record.
        adoption: of the model; empty in a run that begins.
        record: of applied pushes.
    """

    def __init__(
        self, parts: ServerParts, machine: LeadMachine, adoption: Adoption, record: PushRecord
    ) -> None:
        self.running = True
        self.parts = parts
        self.config = parts.config
        self._controller = parts.controller
        self._hub = parts.hub
        self._executor = parts.executor
        self._attachments = parts.attachments
        self._machine = machine
        self._record = record
        self._replicator = Replicator(parts.config.rank, replicates=parts.config.replicas > 0)
        self._files = CheckpointFiles(
            Path(parts.config.run_dir) / "checkpoints",
            parts.config.keep_checkpoints,
            post=lambda result: self._hub.post(lambda: self._checkpoint_ended(result)),
        )
        self._desk = ModelDesk(parts, adoption, self._replicator, self._files)
        self._pending: collections.deque[Action] = collections.deque()
        """Actions that are still to be performed."""
        self._is_performing = False
        self._norms_told: list[tuple[int, float]] = []
        """Norms of gradients that workers told, and the controller has not heard of."""
        self._ticked_at = 0.0
        self._ends_run = EndsRun(parts.controller.fail)

    @classmethod
    def first(cls, parts: ServerParts) -> "Leader":
        """The leader of a run that begins, or goes on from a checkpoint."""
        config = parts.config
        resumed = load(Path(config.resume)) if config.resume else None
        applied = 0 if resumed is None else int(resumed.meta["lead"]["pushes"])
        thinning = pushes_thinning(config.records_mb)
        record = PushRecord.begin(Path(config.run_dir) / "pushes.csv", applied, thinning)
        adoption = Adoption(resumed, parts.executor.mode)
        return cls(parts, _new_machine(parts, record), adoption, record)

    @classmethod
    def succeeding(cls, follower: Follower) -> "Leader":
        """A follower leads from now on, with its parts: the leader is gone."""
        parts, heir = follower.parts, follower.heir
        standby = follower.machine.standby
        assert standby is not None
        adoption = Adoption(None, parts.executor.mode)  # training goes on: no worker starts from a checkpoint
        assert heir.model is not None  # it has been handed the model, or it could not lead
        adoption.model, adoption.extras = Offer(None, heir.model), heir.extras
        record = PushRecord.take_over(
            Path(parts.config.run_dir) / "pushes.csv",
            standby.decider.totals.pushes,
            standby.records,
            pushes_thinning(parts.config.records_mb),
        )
        reduced = parts.executor.reduced
        machine = LeadMachine.succeeding(
            follower.machine,
            lead_settings(parts.config),
            queued=[*parts.executor.queue],
            reduced=None if reduced is None else reduced.number,
            applied=record.pending,
            directory_of=directories_in(parts.config.run_dir),
        )
        leader = cls(parts, machine, adoption, record)
        parts.hub.handler = leader
        leader._files.states.update(heir.states)
        leader._succeed(follower)
        return leader

    def _succeed(self, follower: Follower) -> None:
        """Go on where the leader before has stopped."""
        unheard = follower.machine.unheard([*self._executor.queue])
        self._follow(self._machine.succeed(follower.machine, time.monotonic()))
        if self._executor.reduced is not None:  # the leader before died between the halves of an update
            self._follow(self._machine.reduced(*self._executor.reduced))
        for request in unheard:
            if (peer := self._executor.peers.get(request.worker)) is None:
                continue
            try:
                with self._ends_run:
                    self._follow(self._machine.request(request, time.monotonic()))
            except PacelineError as error:
                refuse(peer.connection, error)
                self._hub.end(peer.connection, str(error))
        for connection, body in follower.early_followers:
            self._hub.add(connection)
            self.on_hello(connection, body)

    def close(self) -> None:
        """The server ends."""
        self.running = False
        self._files.close()
        self._replicator.close()
        self._write_pushes()
        self._record.close()

    # --- what the machine decides -----------------------------------------------------------------

    def _follow(self, actions: Actions) -> None:
        """Perform what the machine decided, and then what has become possible by it, until nothing is left.

        Actions are performed in the order in which they were decided, also those that follow from what comes
        of a step that is executed meanwhile.
        """
        pending = self._pending
        pending.extend(actions)
        if self._is_performing:
            return
        self._is_performing = True
        try:
            while True:
                while pending:
                    self._perform(pending.popleft())
                if not (more := self._machine.settle(time.monotonic())):
                    return
                pending.extend(more)
        finally:
            self._is_performing = False

    def _perform(self, action: Action) -> None:
        match action:
            case actions.Order(steps):
                self._replicator.replicate(action)  # before this server acts on it
                if steps:
                    self._executor.queue.extend(steps)
                    self._advance()
            case actions.SendGrant(worker, leases, over, notes):
                granted = tuple((lease.id, lease.ranges) for lease in leases)
                self._answer(worker, sent.GrantReply(leases=granted, over=over, **notes))
            case actions.SendVerdict(worker, notes):
                self._answer(worker, sent.VerdictReply(**notes))
            case actions.SendAnswer(worker, values, notes):
                self._answer(worker, sent.CallReply(values=tuple(values), **notes))
            case actions.Welcome(worker, notes):
                if (peer := self._executor.peers.get(worker)) is not None:
                    self._attachments.welcome(peer, self._desk.welcome(notes))
            case actions.Tell(report):
                self._report(report)
            case actions.TellUser(text):
                self._controller.tell_user_once(text)
            case actions.WriteLog(text, is_error):
                log.log(logging.ERROR if is_error else logging.WARNING, "%s", text)
            case actions.ReportProgress():
                self._controller.tell(self._progress())
            case actions.FailRun(error):
                self._controller.fail(error)
            case actions.TakeIn():
                self._replicator.take_in(action)
            case actions.LeaveBehind(server):
                self._replicator.leave_behind(server)
            case actions.EndFollower(server):
                if (link := self._replicator.followers.get(server)) is not None:
                    self._hub.end(link, "a worker cannot reach it any more")
            case actions.OpenCheckpoint(version, directory, lead):
                self._open_checkpoint(version, Path(directory), lead)
            case actions.CommitCheckpoint():
                self._files.commit(self._desk.adoption.extras)
            case actions.AbandonCheckpoint():
                self._files.close()
            case _:
                assert_never(action)

    def _answer(
        self,
        worker: int,
        reply: sent.GrantReply | sent.VerdictReply | sent.CallReply,
    ) -> None:
        if (peer := self._executor.peers.get(worker)) is not None:
            with contextlib.suppress(LinkError):  # it died: its link says so by itself
                peer.connection.tell(reply)

    def _advance(self) -> None:
        """Execute what is due, as far as all that it needs is here, and tell the machine what comes of it."""
        while (outcomes := self._executor.execute_next(self._admit)) is not None:
            for outcome in outcomes:
                self._hear_outcome(outcome)

    def _admit(self, worker: int, version: int) -> sent.AdmitReply:
        return sent.AdmitReply(**self._machine.admitted(worker, version, time.monotonic()))

    def _hear_outcome(self, outcome: Outcome) -> None:
        machine = self._machine
        match outcome:
            case outcomes.Reduced(number, norms):
                self._follow(machine.reduced(number, norms))
            case outcomes.VectorAnswers(answers):
                self._follow(machine.vectors_answered([*answers]))
            case outcomes.PushSpoiled(worker):
                self._follow(machine.push_spoiled(worker))
            case outcomes.ModeChanged():
                self._follow(machine.mode_changed(self._executor.mode))
            case outcomes.Placed(placement):
                self._follow(machine.placed(placement))
            case outcomes.SlicesDue(server, number, tensors):
                self._replicator.give(server, number, tensors)
            case outcomes.SnapshotTaken(directory, tensors):
                self.parts.part_writer.write(directory, tensors, self._part_written)
            case outcomes.Forgotten(peer):
                self._worker_left(peer, finished=False)
            case _:
                assert_never(outcome)

    # --- connections ------------------------------------------------------------------------------

    def on_stranger(self, reason: str) -> None:
        """A connection was refused."""
        self._controller.report_stranger(reason)

    def on_hello(self, connection: Connection, body: Body) -> None:
        """Workers and the other servers connect to the leader."""
        self.parts.expected.greeted(connection.peer, body)
        if connection.peer.startswith("server:"):
            self._meet_server(server_rank(connection), connection, body)
        elif "resume" in body:
            self._attachments.resume(connection, body)
        else:
            rank_of(connection)

    def _meet_server(self, server: int, link: Connection, body: Body) -> None:
        has_model = self._executor.shard is not None
        if not has_model and server >= self.config.servers:  # scaled up before there is a model to hand over
            self._replicator.add_early(server, link, body)
            return
        address = self._replicator.addresses[server] = field(body, "address", dict)
        if has_model and field(body, "fresh", bool):
            self._replicator.add_newcomer(server, link)
            self._machine.newcomer_came(server, address)
            self._desk.hand_over(server, first=False)
            return
        self._follow(self._machine.follower_came(server))
        self._replicator.add_follower(server, link)
        if not has_model:
            with self._ends_run:
                self._desk.adopt_if_ready(self._machine)
            return
        self._replicator.catch_up(link, field(body, "position", int), self._machine.order)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """A message of a worker, a follower or the controller."""
        with self._ends_run:
            if connection is self._controller.link:
                self._on_controller(frame)
            elif connection.peer.startswith("server:"):
                self._on_server(connection, frame)
            else:
                self._on_worker(connection, frame)

    def _on_worker(self, connection: Connection, frame: Frame) -> None:
        match sent.TO_SERVER.read(frame.kind, frame.body):
            case sent.PushMessage() as message:
                self._on_push(connection, message)
            case sent.PullMessage() | sent.VoteMessage() | sent.CallMessage() as message:
                self._on_request(connection, message)
            case sent.TakeMessage() as message:
                self._desk.check_loader()
                self._on_request(connection, message)
            case sent.AssignMessage() as message:
                self._on_assign(connection, message)
            case sent.ProbeMessage():
                # Our probe comes behind all that we sent: if some of that was lost, the worker sees it.
                connection.send(Kind.PROBE)
            case sent.OfferMessage() as message:
                self._on_offer(connection, message)
            case sent.WeightsMessage() as message:
                self._desk.take_weights(connection, message, self._machine)
            case sent.AttachMessage() as message:
                self._on_attach(connection, message, frame.descriptors)
            case sent.DetachMessage() as message:
                self._on_detach(connection, message)
            case sent.StateAsked():
                self._attachments.send_state(connection)
            case sent.LoadStateMessage() as message:
                self._attachments.receive_state(connection, frame, message)
                self._advance()
            case sent.SavedMessage(cut):
                self._on_saved(connection, frame, cut)
            case sent.BuffersMessage():
                self._attachments.hear_buffers(saved_part(connection, frame)[1], rank_of(connection))
            case sent.SendsMessage():
                pass  # for links with threads that read payloads; in shared memory servers see all of it
            case other:
                assert_never(other)

    def on_end(self, connection: Connection, reason: str) -> None:
        """A connection is over. Without a follower that no other server replaces the run cannot go on."""
        if connection is self._controller.link:
            self.running = self.running and self._controller.keep_after_end()
        elif connection.peer.startswith("server:"):
            if self._replicator.remove(connection) and self.running:
                now, server = time.monotonic(), server_rank(connection)
                self._follow(self._machine.server_gone(server, reason, now))
        else:
            self._desk.adoption.gone(connection)
            self._attachments.connection_ended(connection, reason)

    def controller_back(self) -> None:
        """Another controller took over."""
        self._follow(self._machine.controller_back())

    # --- the model --------------------------------------------------------------------------------

    def _on_offer(self, connection: Connection, message: sent.OfferMessage) -> None:
        """A worker offers its model."""
        with blaming(connection.peer):
            adoption = self._desk.adoption
            adoption.offered(rank_of(connection), connection, message, begun=self._machine.decider.begun)
            if adoption.offered_anew(self.config.workers):
                self._begin_anew()
            self._machine.gate.came(time.monotonic())
            self._desk.answer(self._machine)
            self._desk.adopt_if_ready(self._machine)

    def _begin_anew(self) -> None:
        """All workers have prepared more before the first step: the run has no model yet, as at its start."""
        for peer in [*self._executor.peers.values()]:  # whose goodbye over an older link is on its way
            self._worker_left(peer, finished=False)
        self._executor.forget_model()
        self._files.close()
        self._machine = _new_machine(self.parts, self._record, self._machine)
        for server in self._replicator.followers:
            self._follow(self._machine.follower_came(server))

    # --- workers ----------------------------------------------------------------------------------

    def _on_push(self, connection: Connection, message: sent.PushMessage) -> None:
        """The flow of a push: read it, keep the gradient, decide; then replicate, execute and answer."""
        peer = self._attachments.peer_of(connection)
        request = push_request(message, peer, self._executor.optimizers)
        push = request.push
        self._attachments.receive_push(peer, message)
        if push.norm is not None and len(self._norms_told) < _MOST_NORMS:
            self._norms_told.append((peer.worker, push.norm))
        if push.void:
            log.warning("%s pushed NaN or Inf at step %s: refused", peer.name, push.id.sequence + 1)
        if request.parameters:
            self._take_parameters(peer)
        if self._executor.mode.by_epoch and peer.settings is not None:
            rate = peer.settings[0].get("lr", 0.0)
            assert isinstance(rate, float | int)  # receive_push has looked
            request = request._replace(told=(*request.told, Rate(float(rate))))
        self._follow(self._machine.request(request, time.monotonic()))

    def _on_assign(self, connection: Connection, message: sent.AssignMessage) -> None:
        peer = self._attachments.peer_of(connection)
        request = read_request(message, peer, self._executor.optimizers)
        self._attachments.receive_push(peer, message)
        self._follow(self._machine.request(request, time.monotonic()))

    def _on_request(self, connection: Connection, message: sent.PullMessage | sent.LeaderQuestion) -> None:
        request = read_request(message, self._attachments.peer_of(connection), self._executor.optimizers)
        self._follow(self._machine.request(request, time.monotonic()))

    def _take_parameters(self, peer: WorkerPeer) -> None:
        """allreduce: the root has made its step, and waits."""
        mode = self._executor.mode
        if not mode.serverless:
            raise FrameError(f"{peer.name} pushed parameters, and in mode {mode} servers have their own")
        self._executor.present_shard.assign(peer.carrier.pushed_parameters())

    def _on_attach(self, connection: Connection, message: sent.AttachMessage, descriptors: list[int]) -> None:
        peer = self._attachments.attach(
            connection, message, descriptors, lambda older: self._worker_left(older, finished=False)
        )
        machine, now, fates = self._machine, time.monotonic(), peer.needs_fates
        listens = message.listens
        self._follow(machine.attach(peer.worker, peer.incarnation, now, needs_fates=fates, listens=listens))

    def _on_detach(self, connection: Connection, message: sent.DetachMessage) -> None:
        peer = self._attachments.peer_of(connection)
        told = account_events(message, peer.worker)
        self._worker_left(peer, finished=not message.left, told=told)

    def worker_lost(self, peer: WorkerPeer) -> None:
        """A worker's link is gone for good. Most likely its process is, too."""
        self._worker_left(peer, finished=False)
        self._machine.link_lost(peer.worker, peer.incarnation, time.monotonic())

    def _worker_left(self, peer: WorkerPeer, *, finished: bool, told: Iterable[Event] = ()) -> None:
        if peer.residual and not finished:
            self._controller.tell_user_once(
                f"{peer.name} is gone, and with it a gradient of L2 norm {peer.residual:.3g} that "
                "compression had held back until later pushes"
            )
        self._attachments.detach(peer, finished=finished)
        self._advance()
        now = time.monotonic()
        self._follow(self._machine.left(peer.worker, peer.incarnation, now, finished=finished, told=told))

    def _on_saved(self, connection: Connection, frame: Frame, cut: int) -> None:
        """A worker's part of a checkpoint."""
        rank = rank_of(connection)
        name, tensors = saved_part(connection, frame)
        self._attachments.hear_buffers(tensors, rank)
        self._files.keep_part(name, tensors, of_this_one=self._machine.cuts.awaits(rank))
        self._follow(self._machine.worker_saved(rank, cut))

    # --- other servers ----------------------------------------------------------------------------

    def _on_server(self, connection: Connection, frame: Frame) -> None:
        server, machine = server_rank(connection), self._machine
        match between_servers.TO_LEADER.read(frame.kind, frame.body):
            case between_servers.NormsReduced(number, norms):
                self._follow(machine.reduced(number, norms))
            case between_servers.VectorsAnswered(answers):
                self._follow(machine.vectors_answered([*answers]))
            case between_servers.ModelHeld():
                connection.send_aside()  # it and this server may give each other slices
                self._follow(machine.server_adopted(server))
                self._desk.answer(machine)
            case between_servers.SlicesMessage(number=number) as message:
                if (blob := self._replicator.relay(connection, frame, message)) is not None:
                    tensors = read_blob(blob, f"slices by {connection.peer}")
                    self._executor.receive_slices(number, tensors)
                    self._advance()
            case between_servers.SlicesPlaced(number):
                self._follow(machine.placed_on(server, number))
            case between_servers.PartWritten() | between_servers.PartFailed() as part:
                self._part_written(part)
            case other:
                assert_never(other)

    # --- checkpoints ------------------------------------------------------------------------------

    def _open_checkpoint(self, version: int, directory: Path, lead: JsonObject) -> None:
        self._write_pushes()  # a run that goes back to this checkpoint finds the record of all that is in it
        numbers = {"servers": self.config.servers, "workers": self.config.workers}
        try:
            self._files.open(version, directory, {**self._desk.facts, "lead": lead, **numbers})
        except CheckpointError as error:
            self._follow(self._machine.checkpoint_failed(str(error), time.monotonic()))

    def _part_written(self, part: between_servers.PartWritten | between_servers.PartFailed) -> None:
        """A server has written its part of a checkpoint, or could not."""
        failed = part.reason if isinstance(part, between_servers.PartFailed) else None
        if isinstance(part, between_servers.PartWritten):
            info = FileInfo(name=part.name, sha256=part.sha256, bytes=part.bytes)
            self._files.add(part.directory, info)
        self._follow(self._machine.part_written(part.directory, time.monotonic(), failed))

    def _checkpoint_ended(self, result: Path | CheckpointError) -> None:
        """A commit has succeeded or failed."""
        self._files.close()
        now = time.monotonic()
        if isinstance(result, CheckpointError):
            self._follow(self._machine.checkpoint_failed(str(result), now))
        else:
            log.info("checkpoint %s", result.name)
            self._follow(self._machine.checkpoint_saved(str(result), now))

    # --- the controller ---------------------------------------------------------------------------

    def _on_controller(self, frame: Frame) -> None:
        machine = self._machine
        match messages.FROM_CONTROLLER.read(frame.kind, frame.body):
            case messages.SaveSoon():
                machine.save_soon()
            case messages.SaveNow(all_ended):
                # Copying a large model takes seconds, without a word.
                self._controller.tell(messages.SaveBegun())
                self._follow(machine.save_now(time.monotonic(), all_ended=all_ended))
            case messages.SwitchMode(mode, request):
                self._follow(machine.switch(mode, request))
            case messages.LetServerGo(server):
                self._follow(machine.let_server_go(server))
            case messages.EndEarly(reason):
                self._follow(machine.end_early(reason))
            case messages.LetWorkerGo(worker):
                machine.let_worker_go(worker)
            case messages.StopServing():
                self.parts.tell_report()
                self._controller.tell(self._progress()._replace(last=True))
                self.running = False
            case messages.RolesExpected(workers, servers):
                self.parts.expected.expect(workers, servers)
            case messages.ServerAddresses() | messages.LastWordsKept():
                pass  # it leads, and has said nothing that must be heard before it may end
            case other:
                assert_never(other)

    def _report(self, report: LeaderReport) -> None:
        match report:
            case messages.SaveEnded():
                self._controller.tell(self._progress())
            case messages.RunEndsEarly(reason):
                log.info("the run ends early: %s", reason)
            case messages.ReplaceWorker():
                log.warning("%s", report.reason)
        self._controller.tell(report)

    def _progress(self) -> messages.LeadReport:
        norms, self._norms_told = self._norms_told, []
        return progress_of(self._machine.decider, self._executor, self._desk.adoption.model, norms)

    # --- time -------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Called after every turn of the loop."""
        if self._executor.awaits_verdicts:
            self._advance()
        if now - self._ticked_at >= _TICK_S:
            self._ticked_at = now
            self._write_pushes()
            for link, body in self._replicator.take_early() if self._executor.shard is not None else ():
                self.on_hello(link, body)
            self._follow(self._machine.tick(now, self._desk.adoption.waiting))
            self._controller.tell(self._progress())

    def _write_pushes(self) -> None:
        try:
            self._record.write(self._machine.decider.totals.pushes)
        except OSError as error:
            self._controller.tell_user_once(
                f"pushes.csv in {self.config.run_dir} cannot be written: {error.strerror or error}. Training "
                "goes on, but this record has gaps: make room there, or use another --run-dir next time."
            )


def _new_machine(parts: ServerParts, record: PushRecord, before: LeadMachine | None = None) -> LeadMachine:
    """The decisions of a run that has no model yet, or has none any more (`before`)."""
    config = replace(parts.config, mode=str(parts.executor.mode))  # it may have been switched
    return LeadMachine(
        lead_settings(config),
        new_decider(config),
        present=Present(parts.executor.mode),
        log=OrderLog(LOG_STEPS if config.replicas else 0) if before is None else before.order.log,
        gate=StartGate(config.workers, early=None if before is None else before.gate.early),
        applied=record.pending,
        directory_of=directories_in(parts.config.run_dir),
    )
