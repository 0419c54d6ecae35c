"""Follower: a server that executes the order which another server, the leader, makes.

It keeps what it needs to lead itself, if the run has replicas. `server_process.py` promotes it when the
controller says that it leads.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import assert_never

from safetensors.torch import save
from torch import Tensor

from paceline.comm import Address, Connection, Frame, Kind, Region, connect, messages
from paceline.comm.frames import Body
from paceline.comm.server_messages import (
    FROM_LEADER,
    CaughtUp,
    ModelHeld,
    ModelMessage,
    NormsReduced,
    OrderEntered,
    OrderMessage,
    SlicesMessage,
    SlicesPlaced,
    ToLeader,
    VectorsAnswered,
)
from paceline.comm.worker_messages import (
    TO_SERVER,
    AdmitReply,
    AssignMessage,
    AttachedReply,
    AttachMessage,
    BuffersMessage,
    CallMessage,
    DetachMessage,
    LeaderQuestion,
    LoadStateMessage,
    OfferMessage,
    ProbeMessage,
    PullMessage,
    PushMessage,
    SavedMessage,
    SendsMessage,
    StateAsked,
    TakeMessage,
    VoteMessage,
    WeightsMessage,
)
from paceline.core.events import Event
from paceline.core.json_types import JsonObject
from paceline.core.sequencer import OrderLog
from paceline.core.server.follower_machine import FollowerMachine
from paceline.core.server.present import Present
from paceline.core.server.standby import Standby
from paceline.core.steps import Step
from paceline.exceptions import AuthError, FrameError, LinkError
from paceline.params import Layout, Numerics, OptimizerSpec, bytes_of
from paceline.ps import outcomes
from paceline.ps.attachments import rank_of, saved_part
from paceline.ps.config import begin, new_decider
from paceline.ps.outcomes import Outcome
from paceline.ps.parts import LOG_STEPS, ServerParts
from paceline.ps.peers import MAX_STATE_BYTES, WorkerPeer
from paceline.ps.saving import read_blob, state_book, worker_state
from paceline.ps.worker_frames import read_request

__all__ = ["Follower", "Heir"]

log = logging.getLogger("paceline.server")

_REDIAL_S = 30.0
"""How long a leader that has too many newcomers is dialled again."""


@dataclass
class Heir:
    """What a follower that leads from now on knows of the model, beside its shard."""

    model: ModelMessage | None = None
    """The offer that the run adopted, as the leader told it."""
    extras: dict[str, Tensor] = attribute(default_factory=dict)
    """Frozen parameters and initial buffers."""
    states: dict[str, dict[str, Tensor]] = attribute(default_factory=dict)
    """The workers' parts of the next checkpoint, by file."""


class Follower:
    """A hub's handler; the main thread only."""

    def __init__(self, parts: ServerParts) -> None:
        self.running = True
        self.is_promoted = False
        """Whether the controller says that this server leads."""
        self.parts = parts
        self.config = parts.config
        self.machine = FollowerMachine(
            Present(parts.executor.mode), OrderLog(LOG_STEPS if parts.config.replicas else 0)
        )
        self.heir = Heir()
        self.early_followers: list[tuple[Connection, Body]] = []
        """Servers that know sooner than this one that it leads, and what they said."""
        self._controller = parts.controller
        self._hub = parts.hub
        self._executor = parts.executor
        self._attachments = parts.attachments
        self._leader_link: Connection | None = None

    def close(self) -> None:
        """The server ends."""
        self.running = False
        if self._leader_link is not None:
            self._leader_link.close()

    # --- connections ------------------------------------------------------------------------------

    def on_stranger(self, reason: str) -> None:
        """A connection was refused."""
        self._controller.report_stranger(reason)

    def on_hello(self, connection: Connection, body: Body) -> None:
        """Workers connect to a follower, and servers that know sooner than it that it leads."""
        self.parts.expected.greeted(connection.peer, body)
        if "resume" in body:
            self._attachments.resume(connection, body)
        elif connection.peer.startswith("server:") and self.machine.standby is not None:
            self._hub.release(connection)
            self.early_followers.append((connection, body))
        else:
            rank_of(connection)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """A message of a worker, the leader or the controller."""
        if connection is self._controller.link:
            self._on_controller(frame)
        elif connection is self._leader_link:
            self._on_leader(connection, frame)
        else:
            self._on_worker(connection, frame)

    def _on_worker(self, connection: Connection, frame: Frame) -> None:
        match TO_SERVER.read(frame.kind, frame.body):
            case PushMessage() | AssignMessage() as message:
                self._on_push(connection, message)
            case PullMessage() as message:
                self._on_pull(connection, message)
            case TakeMessage() | VoteMessage() | CallMessage() as message:
                self._on_leaders_request(connection, message)
            case AttachMessage() as message:
                self._on_attach(connection, message, frame.descriptors)
            case DetachMessage(left=left):
                self._on_detach(connection, left=left)
            case StateAsked():
                self._attachments.send_state(connection)
            case LoadStateMessage() as message:
                self._attachments.receive_state(connection, frame, message)
                self._advance()
            case SavedMessage():
                name, tensors = self._saved_part(connection, frame)
                if self.machine.standby is not None:
                    self.heir.states[name] = tensors
            case BuffersMessage():
                self._saved_part(connection, frame)
            case ProbeMessage():
                # Our probe comes behind all that we sent: if some of that was lost, the worker sees it.
                connection.send(Kind.PROBE)
            case SendsMessage():
                pass  # for links with threads that read payloads; in shared memory servers see all of it
            case OfferMessage() | WeightsMessage():
                raise FrameError(f"a worker does not send {frame.kind.name} to {self._executor.name}")
            case other:
                assert_never(other)

    def on_end(self, connection: Connection, reason: str) -> None:
        """A connection is over."""
        if connection is self._controller.link:
            self.running = self.running and self._controller.keep_after_end()
        elif connection is self._leader_link:
            self._leader_link = None
            if self.running:
                self._leader_lost(f"{connection.peer}: {reason}")
        else:
            self._attachments.connection_ended(connection, reason)

    def _leader_lost(self, how: str) -> None:
        if self.machine.leader_lost(time.monotonic()):
            log.warning("%s; another server will lead", how)
        else:
            self._controller.fail(LinkError(f"{self._executor.name} lost {how}"))

    def controller_back(self) -> None:
        """Another controller took over: it has all that it needs from this server's introduction."""

    # --- workers ----------------------------------------------------------------------------------

    def _on_attach(self, connection: Connection, message: AttachMessage, descriptors: list[int]) -> None:
        peer = self._attachments.attach(
            connection, message, descriptors, lambda older: self._worker_left(older, finished=False)
        )
        self.machine.attach(peer.worker, peer.incarnation)
        self._attachments.welcome(peer, AttachedReply())

    def _on_push(self, connection: Connection, message: PushMessage | AssignMessage) -> None:
        """A push or an assign: the leader says when it is executed."""
        peer = self._attachments.peer_of(connection)
        if self.machine.keeps_requests:
            request = read_request(message, peer, self._executor.optimizers)
            if not self.machine.request(request):
                peer.carrier.skip()
                return
        self._attachments.receive_push(peer, message)
        self._advance()

    def _on_pull(self, connection: Connection, message: PullMessage) -> None:
        """The leader orders the reply."""
        peer = self._attachments.peer_of(connection)
        if self.machine.keeps_requests:
            request = read_request(message, peer, self._executor.optimizers)
            if not self.machine.request(request):
                peer.carrier.skip()

    def _on_leaders_request(self, connection: Connection, message: LeaderQuestion) -> None:
        """The leader answers it: this worker knows that the leader is gone, and this server does not yet."""
        peer = self._attachments.peer_of(connection)
        self.machine.request(read_request(message, peer, self._executor.optimizers))

    def _saved_part(self, connection: Connection, frame: Frame) -> tuple[str, dict[str, Tensor]]:
        """A worker's part of a checkpoint, or only its buffers, and the name of the file."""
        name, tensors = saved_part(connection, frame)
        self._attachments.hear_buffers(tensors, rank_of(connection))
        return name, tensors

    def _on_detach(self, connection: Connection, *, left: bool) -> None:
        peer = self._executor.peers.get(rank_of(connection))
        if peer is not None and peer.connection is connection:
            self._worker_left(peer, finished=not left)

    def worker_lost(self, peer: WorkerPeer) -> None:
        """A worker's link is gone for good. Most likely its process is, too."""
        self._worker_left(peer, finished=False)

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        self.machine.left(peer.worker, peer.incarnation, finished=finished)
        self._attachments.detach(peer, finished=finished)
        self._advance()

    # --- the order --------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Execute what is due, as far as all that it needs is here, and tell the leader what comes of it."""
        while (found := self._executor.execute_next(self._admit)) is not None:
            for outcome in found:
                self._hear_outcome(outcome)

    def _admit(self, worker: int, version: int) -> AdmitReply:
        self.machine.admitted(worker)
        return AdmitReply(version=version)

    def _hear_outcome(self, outcome: Outcome) -> None:
        match outcome:
            case outcomes.Reduced(number, norms):
                self._tell_leader(NormsReduced(number, tuple(norms)))
            case outcomes.VectorAnswers(answers):
                self._tell_leader(VectorsAnswered(tuple(answers)))
            case outcomes.Placed(placement):
                self.machine.placed(placement)
                self._tell_leader(SlicesPlaced(placement.number))
            case outcomes.SlicesDue(server, number, tensors):
                self._tell_leader(SlicesMessage(server, number), [memoryview(save(tensors))])
            case outcomes.SnapshotTaken(directory, tensors):
                self.parts.part_writer.write(directory, tensors, self._tell_leader)
            case outcomes.Forgotten(peer):
                self._worker_left(peer, finished=False)
            case outcomes.ModeChanged():
                self.machine.mode_changed(self._executor.mode)
            case outcomes.PushSpoiled():
                pass  # the leader sees it, too
            case _:
                assert_never(outcome)

    # --- the controller ---------------------------------------------------------------------------

    def _on_controller(self, frame: Frame) -> None:
        match messages.FROM_CONTROLLER.read(frame.kind, frame.body):
            case messages.ServerAddresses(servers, lead):
                self._follow(lead, servers)
            case messages.RolesExpected(workers, servers):
                self.parts.expected.expect(workers, servers)
            case messages.StopServing():
                self.parts.tell_report()
                self.running = False
            case (
                messages.SaveNow()
                | messages.SaveSoon()
                | messages.TakeSnapshot()
                | messages.SwitchMode()
                | messages.LetWorkerGo()
                | messages.LetServerGo()
                | messages.EndEarly()
                | messages.LastWordsKept()
            ):
                pass  # for the leader, whose death the controller had not noticed; it asks the next one again
            case other:
                assert_never(other)

    # --- the leader -------------------------------------------------------------------------------

    def _follow(self, leader: int, servers: dict[str, JsonObject]) -> None:
        """This server leads: the first leader, or one that takes the place of a leader that is gone."""
        if self._leader_link is not None and leader == self.machine.leader:
            return  # another controller says it again
        if self._leader_link is not None:  # what the old leader sent before it died is still to be read
            link, self._leader_link = self._leader_link, None
            self._hub.release(link)
            with contextlib.suppress(LinkError, TimeoutError):
                while True:
                    self._on_leader(link, link.receive())
            link.close()
        self.machine.leader_known()
        if leader == self.config.rank:
            self.is_promoted = True  # `machine.leader` is still the one that is gone
            return
        self.machine.leader = leader
        try:
            link = connect(
                Address.from_json(servers[str(leader)]),
                self.parts.secret,
                peer=f"server:{leader}",
                redial_s=min(self.config.deadline_s, _REDIAL_S),
            )
        except (AuthError, LinkError) as error:
            if not self.config.replicas:
                raise
            self._leader_lost(str(error))  # it died just now
            return
        self._greet(link)

    def _greet(self, link: Connection) -> None:
        """Tell a leader who this is, and how far it has come."""
        is_new = not self.machine.takes_part
        hello: Body = {"role": "server", "rank": self.config.rank, "position": self.machine.log.position}
        address = self._hub.listener.address.to_json()
        link.send(Kind.HELLO, {**hello, "fresh": is_new, "address": address})
        if not is_new:
            link.send_aside()
        self._leader_link = link
        self._hub.add(link)
        if self._executor.reduced is not None:
            number, norms = self._executor.reduced
            link.tell(NormsReduced(number, tuple(norms)))

    def _tell_leader(self, message: ToLeader, payload: Sequence[memoryview] = ()) -> None:
        if self._leader_link is not None:
            with contextlib.suppress(LinkError):  # the hub notices that it is gone
                self._leader_link.tell(message, payload)

    def _on_leader(self, link: Connection, frame: Frame) -> None:
        match FROM_LEADER.read(frame.kind, frame.body):
            case OrderMessage(steps, events, held):
                self._hear_order(steps, events, held)
            case ModelMessage() as message:
                self._on_model(link, frame, message)
            case SlicesMessage(number=number):
                blob = link.read_blob(frame, MAX_STATE_BYTES)
                self._executor.receive_slices(number, read_blob(blob, f"slices by {link.peer}"))
                self._advance()
            case OrderEntered() as message:
                self._enter_order(message)
            case CaughtUp(steps, held, decider, records):
                self.machine.know(decider, records)
                self._hear_order(steps, (), held)
            case other:
                assert_never(other)

    def _hear_order(self, steps: Sequence[Step], events: Sequence[Event], held: Sequence[Step]) -> None:
        """Steps come next in the order."""
        self.machine.hear([*steps], [*events], [*held])
        self._executor.queue.extend(steps)
        self._advance()

    def _enter_order(self, message: OrderEntered) -> None:
        """This server came to a run that goes on, and takes part from here on."""
        placement = message.placement
        self._executor.placement = placement
        answered, incarnations = message.answered, message.incarnations
        for request in self.machine.begin_at(message.position, placement, answered, incarnations):
            self._attachments.skip(request.worker)
        if message.decider is not None:
            self.machine.know(message.decider, message.records)
        self._hear_order((), (), ())

    # --- the model --------------------------------------------------------------------------------

    def _on_model(self, link: Connection, frame: Frame, model: ModelMessage) -> None:
        """The leader sends the model."""
        fds, executor = frame.descriptors, self._executor
        layout = Layout.from_json(model.layout)
        extras = bytearray(model.extras_bytes)
        region = Region.attach(fds.pop(), layout.nbytes) if fds else None

        def read_weights(slices: Sequence[Tensor]) -> None:
            weights = [] if region is not None else [bytes_of(each) for each in slices]
            if frame.payload_bytes:
                link.read_into([*weights, memoryview(extras)])

        placement = model.placement
        Numerics.from_json(model.numerics).apply()
        if executor.layout is not None and executor.layout.fingerprint != layout.fingerprint:
            for peer in [*executor.peers.values()]:  # all workers have prepared more, and will attach again
                self._worker_left(peer, finished=False)
            executor.forget_model()
        spec = OptimizerSpec.from_json(model.optimizer)
        self.parts.adopt(layout, spec, region, placement, read_weights)
        for peer in executor.peers.values():  # another leader had told it before
            peer.carrier.refit(executor.present_shard)
        checkpoint = self.parts.checkpoint_parts.load(model.checkpoint) if model.checkpoint else None
        if checkpoint is not None:
            executor.present_shard.restore(state_book(checkpoint), vectors=executor.mode.by_epoch)
            for rank in range(self.config.workers):
                self._attachments.hear_buffers(worker_state(checkpoint, rank), rank)
        standby = None
        if self.config.replicas:
            decider = new_decider(self.config)
            begin(decider, self.config, model.data, spec, checkpoint)
            standby = Standby(decider)
            self.heir = Heir(model, read_blob(bytes(extras), "the run's buffers"))
        takes_part = model.takes_part
        self.machine.adopt(layout, placement, len(spec.groups_of), standby, takes_part=takes_part)
        link.tell(ModelHeld())
        link.send_aside()

    # --- time -------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Called after every turn of the loop."""
        if self._executor.awaits_verdicts:
            self._advance()
        if self.machine.is_leaderless(now, self.config.deadline_s):
            name, limit = self._executor.name, self.config.deadline_s
            self._controller.fail(LinkError(f"{name} has been without a lead for {limit:g} s"))
