"""A parameter server: one process, one thread that reads small frames and updates slices.

It executes the run's one order of instructions, which the lead server makes (`leader.py`). Shared-memory
links are served by the main thread itself, so a round costs no hand-over between threads; a link that
carries payloads itself has a thread that moves its bytes while the main thread updates.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, assert_never

from safetensors.torch import save
from torch import Tensor

from paceline.comm import Address, Connection, Frame, Kind, Region, connect
from paceline.comm.connection import spin_for
from paceline.comm.frames import field
from paceline.comm.hub import refuse
from paceline.comm.messages import (
    FROM_CONTROLLER,
    EndEarly,
    LastWordsKept,
    LetServerGo,
    LetWorkerGo,
    SaveNow,
    SaveSoon,
    ServerAddresses,
    ServerListening,
    ServerReport,
    StopServing,
    StrangerSeen,
    SwitchMode,
)
from paceline.core.events import events_from_json
from paceline.core.steps import steps_from_json
from paceline.exceptions import (
    AuthError,
    FrameError,
    LinkError,
    PacelineError,
)
from paceline.observe.record.phase import PHASES
from paceline.params import Layout, Numerics, OptimizerSpec, Placement, bytes_of
from paceline.ps.attachments import rank_of, saved_part
from paceline.ps.config import begin, new_decider
from paceline.ps.outcomes import (
    Forgotten,
    ModeChanged,
    Outcome,
    Placed,
    PushSpoiled,
    Reduced,
    SlicesDue,
    SnapshotTaken,
    VectorAnswers,
)
from paceline.ps.parts import ServerParts
from paceline.ps.peers import MAX_STATE_BYTES, WorkerPeer
from paceline.ps.saving import read_blob, state_book, worker_state
from paceline.ps.standby import Standby
from paceline.storage.checkpoint import load

__all__ = ["Server"]

log = logging.getLogger("paceline.server")

TELL_S = 0.5
"""How often a server tells the controller how it does."""
TICK_S = 0.25
"""How often a server looks around when nothing happens."""
_LOOK_S = 0.01
"""How often it looks whether a worker without a link has ended."""


class Server:
    """Holds a shard and executes the run's order on it. `run` returns when the run is over."""

    def __init__(self, parts: ServerParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.name = parts.executor.name
        self._controller = parts.controller
        self._hub = parts.hub
        self._executor = parts.executor
        self._attachments = parts.attachments
        self._part_writer = parts.part_writer
        self._log = parts.log
        self._lead_link: Connection | None = None
        self._standby: Standby | None = None
        self._told_at = 0.0
        self._running = True
        self._failed = False
        self._fresh = True
        """Whether it is not in the order yet."""
        self._led_by = 0
        self._succeeds = False
        self._early_followers: list[tuple[Connection, dict[str, Any]]] = []
        self._leaderless_since: float | None = None
        self._worker_handlers = self._handlers()
        self._hub.handler = self
        # Hear of it when another controller takes over.
        self._controller.watch(lambda fresh: self._hub.post(lambda: self._controller_back(fresh)))

    # --- for who leads in its place ---------------------------------------------------------------

    @property
    def standby(self) -> Standby:
        """What it kept so that it can lead."""
        assert self._standby is not None
        return self._standby

    @property
    def led_by(self) -> int:
        """The server that leads, or led last."""
        return self._led_by

    @property
    def early_followers(self) -> list[tuple[Connection, dict[str, Any]]]:
        """Servers that know sooner than this one that it leads."""
        return self._early_followers

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> bool:
        """Serve until told to stop. True: it is to lead from now on, and nothing is closed."""
        try:
            while self._running and not self._succeeds:
                self._hub.poll(_LOOK_S if self._attachments.broken else TICK_S)
                for peer in self._attachments.lost():
                    self._worker_lost(peer)
                self._tick(time.monotonic())
        finally:
            if not self._succeeds:
                self._close()
                self.parts.spans.close()
        return self._running and self._succeeds

    def meet_controller(self) -> None:
        """Listen to the controller, and say where workers find this server. It may be another one later."""
        self._hub.add(self._controller)
        self._controller.tell(ServerListening(self._hub.listener.address.to_json()))

    def _controller_back(self, fresh: Connection) -> None:
        if self._running:
            self._controller.renew(fresh)
            self.meet_controller()
        else:
            fresh.close()

    def _tick(self, now: float) -> None:
        """Called after every turn of the loop."""
        if now - self._told_at > TELL_S:
            self._told_at = now
            self._tell()
        if self._leaderless_since is not None and now - self._leaderless_since > self.config.deadline_s:
            self._fail(LinkError(f"{self.name} has been without a lead for {self.config.deadline_s:g} s"))

    def _tell(self) -> None:
        """Tell the controller how this server does."""
        spans, progress = self.parts.spans, self._part_writer.progress
        report = ServerReport(
            updates=self._executor.updates,
            update_s=round(self._executor.update_s, 6),
            phases={PHASES[phase]: round(s, 6) for phase, s in spans.flush().items()},
            spans_broken=None if spans.broken is None else str(spans.broken),
            saving=None if progress is None else (progress[0], progress[1]),
        )
        with contextlib.suppress(LinkError):
            self._controller.tell(report)

    def _close(self) -> None:
        self._running = False
        for peer in self._executor.peers.values():
            peer.close()
        if self._lead_link is not None:
            self._lead_link.close()
        self._hub.close()
        if self._executor.shard is not None:
            self._executor.shard.close()

    def _fail(self, error: PacelineError) -> None:
        """The run cannot go on: tell the controller, once."""
        if not self._failed:
            self._failed = True
            log.error("%s", error)
            refuse(self._controller, error)

    def on_stranger(self, reason: str) -> None:
        """A port scan, or a role of another run."""
        log.warning("refused a connection: %s", reason)
        with contextlib.suppress(LinkError):
            self._controller.tell(StrangerSeen(reason))

    def on_hello(self, connection: Connection, body: dict[str, Any]) -> None:
        """Only workers connect to a server, and servers to one that they know to lead sooner than it does."""
        if "resume" in body:
            self._attachments.resume(connection, body)
        elif connection.peer.startswith("server:") and self._standby is not None:
            self._hub.release(connection)
            self._early_followers.append((connection, body))
        else:
            rank_of(connection)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Whatever it is, it comes from somebody who knows the secret."""
        if connection is self._controller:
            self._on_controller(frame)
        elif connection is self._lead_link:
            self._on_lead(connection, frame)
        else:
            handler = self._worker_handlers.get(frame.kind)
            if handler is None:
                raise FrameError(f"a worker does not send {frame.kind.name} to {self.name}")
            handler(connection, frame)

    def on_end(self, connection: Connection, reason: str) -> None:
        """A connection is over: a worker's means it left."""
        if connection is self._controller:
            if self._controller.lasting and self._running:
                self._controller.lost()
            else:
                self._running = False
        elif connection is self._lead_link:
            self._lead_link = None
            if self._running and self._standby is not None:
                log.warning("%s: %s; another server will lead", connection.peer, reason)
                self._leaderless_since = time.monotonic()
            elif self._running:
                self._fail(LinkError(f"{self.name} lost {connection.peer}: {reason}"))
        else:
            self._attachments.connection_ended(connection, reason)

    # --- workers ----------------------------------------------------------------------------------

    def _handlers(self) -> dict[Kind, Callable[[Connection, Frame], None]]:
        """What workers send."""
        return {
            Kind.ATTACH: self._on_attach,
            Kind.PUSH: self._on_push,
            Kind.ASSIGN: self._on_assign,
            Kind.PULL: self._on_pull,
            Kind.STATE: self._on_state,
            Kind.BYE: self._on_bye,
            Kind.TAKE: self._on_take,
            Kind.VOTE: self._on_vote,
            Kind.CALL: self._on_call,
            Kind.SAVED: self._on_saved,
            Kind.SENDS: self._on_sends,
            Kind.PROBE: self._on_probe,
        }

    def _attach(self, connection: Connection, frame: Frame) -> WorkerPeer:
        return self._attachments.attach(
            connection, frame, lambda older: self._worker_left(older, finished=False)
        )

    def _on_attach(self, connection: Connection, frame: Frame) -> None:
        self._attachments.welcome(self._attach(connection, frame))

    def _on_probe(self, connection: Connection, frame: Frame) -> None:
        """A worker waits. Our probe comes behind all that we sent: if some of that was lost, it sees it."""
        connection.send(Kind.PROBE)

    def _on_push(self, connection: Connection, frame: Frame) -> None:
        peer = self._attachments.peer_of(connection)
        if not self._attachments.skips(peer, frame.body):
            self._attachments.receive_push(peer, frame.body)
            peer.asked = (frame.kind, frame.body)  # whoever leads next may not have heard of it
            self._advance()

    def _on_assign(self, connection: Connection, frame: Frame) -> None:
        self._on_push(connection, frame)

    def _on_pull(self, connection: Connection, frame: Frame) -> None:
        peer = self._attachments.peer_of(connection)
        if not self._attachments.skips(peer, frame.body):
            peer.asked = (frame.kind, frame.body)  # the leader orders the reply

    def _on_take(self, connection: Connection, frame: Frame) -> None:
        """Leases are the leader's: this worker knows that the leader is gone, and we do not yet."""
        self._attachments.peer_of(connection).asked = (frame.kind, frame.body)

    def _on_vote(self, connection: Connection, frame: Frame) -> None:
        """The leader answers votes: see `_on_take`."""
        self._on_take(connection, frame)

    def _on_call(self, connection: Connection, frame: Frame) -> None:
        """The leader answers calls: see `_on_take`."""
        self._on_take(connection, frame)

    def _on_saved(self, connection: Connection, frame: Frame) -> None:
        name, tensors = saved_part(connection, frame)
        self._attachments.hear_buffers(tensors, rank_of(connection))
        if self._standby is not None and "buffers" not in frame.body:
            self._standby.states[name] = tensors

    def _on_sends(self, connection: Connection, frame: Frame) -> None:
        """For those who read payloads; in shared memory we see all of it."""

    def _on_state(self, connection: Connection, frame: Frame) -> None:
        """A worker wants the optimizer state, or gives one."""
        if self._attachments.exchange_state(connection, frame):
            self._advance()

    def _on_bye(self, connection: Connection, frame: Frame) -> None:
        peer = self._executor.peers.get(rank_of(connection))
        if peer is not None and peer.connection is connection:
            self._worker_left(peer, finished=not field(frame.body, "left", bool, False))

    def _worker_lost(self, peer: WorkerPeer) -> None:
        """Its link is gone for good. Most likely its process is, too."""
        self._worker_left(peer, finished=False)

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        """A worker is gone, in order (`finished`) or not."""
        if self._standby is not None:
            self._standby.gone[peer.worker] = (peer.incarnation, finished)
        self._attachments.detach(peer, finished=finished)
        self._advance()

    # --- the controller and the leader ------------------------------------------------------------

    def _on_controller(self, frame: Frame) -> None:
        match FROM_CONTROLLER.read(frame.kind, frame.body):
            case ServerAddresses(servers, lead):
                self._follow(lead, servers)
            case StopServing():
                self._tell()
                self._running = False
            case (
                SaveNow()
                | SaveSoon()
                | SwitchMode()
                | LetWorkerGo()
                | LetServerGo()
                | EndEarly()
                | LastWordsKept()
            ):
                pass  # for the leader, whose death the controller had not noticed; it asks the next one again
            case other:
                assert_never(other)

    def _follow(self, lead: int, servers: dict[str, Any]) -> None:
        """That server leads: the first one, or one that takes the place of a lead that is gone."""
        if self._lead_link is not None and lead == self._led_by:
            return  # another controller says it again
        if self._lead_link is not None:  # what it sent before it died is still to be read
            link, self._lead_link = self._lead_link, None
            self._hub.release(link)
            with contextlib.suppress(LinkError, TimeoutError):
                while True:
                    self._on_lead(link, link.receive())
            link.close()
        self._leaderless_since = None
        if lead == self.config.rank:
            self._succeeds = True  # with `_led_by` still the one that is gone
            return
        self._led_by = lead
        try:
            link = connect(Address.from_json(servers[str(lead)]), self.parts.secret, peer=f"server:{lead}")
        except (AuthError, LinkError) as error:
            if not self.config.replicas:
                raise
            log.warning("%s; another server will lead", error)  # it died just now
            self._leaderless_since = time.monotonic()
            return
        hello = {"role": "server", "rank": self.config.rank, "position": self._log.position}
        hello["fresh"] = self._fresh
        link.send(Kind.HELLO, {**hello, "address": self._hub.listener.address.to_json()})
        if not self._fresh:
            link.send_aside()
        self._lead_link = link
        self._hub.add(link)
        if self._executor.reduced is not None:
            link.send(Kind.DONE, self._executor.reduced._asdict())

    def _advance(self) -> None:
        """Execute what is due, as far as all that it needs is here, and do what follows from it."""
        while (outcomes := self._executor.execute_next(self._admit_body)) is not None:
            for outcome in outcomes:
                self._follow_from(outcome)

    def _admit_body(self, worker: int, version: int) -> dict[str, Any]:
        return {"version": version}

    def _follow_from(self, outcome: Outcome) -> None:
        """Tell the leader what came of a step."""
        match outcome:
            case Reduced():
                self._tell_leader(Kind.DONE, outcome._asdict())
            case VectorAnswers(answers):
                self._tell_leader(Kind.DONE, {"answers": answers})
            case Placed(placement):
                self._tell_leader(Kind.DONE, {"placed": placement.number})
            case SlicesDue(server, number, tensors):
                body = {"to": server, "number": number}
                self._tell_leader(Kind.STATE, body, [memoryview(save(tensors))])
            case SnapshotTaken(directory, tensors):
                self._part_writer.write(directory, tensors, self._part_written)
            case Forgotten(peer):
                self._worker_left(peer, finished=False)
            case ModeChanged() | PushSpoiled():
                pass  # the leader sees it, too
            case _:
                assert_never(outcome)

    def _tell_leader(self, kind: Kind, body: dict[str, Any], payload: Sequence[memoryview] = ()) -> None:
        if self._lead_link is not None:
            with contextlib.suppress(LinkError):  # then everything is different anyway
                self._lead_link.send(kind, body, payload)

    def _part_written(self, body: dict[str, Any]) -> None:
        """This server's part of a checkpoint is written, or could not be."""
        self._tell_leader(Kind.DONE, body)

    def _receive_gift(self, link: Connection, frame: Frame) -> None:
        blob = link.read_blob(frame, MAX_STATE_BYTES)
        number = field(frame.body, "number", int)
        self._executor.receive_slices(number, read_blob(blob, f"slices by {link.peer}"))
        self._advance()

    def _on_lead(self, link: Connection, frame: Frame) -> None:
        if frame.kind is Kind.ADOPT:
            self._on_adopt(link, frame)
        elif frame.kind is Kind.ORDER:
            if "position" in frame.body:  # we came later, and begin here
                self._log.begin_at(field(frame.body, "position", int))
                self._executor.placement = Placement.from_json(frame.body["placement"])
                self._fresh = False
                self._attachments.answered_before = {
                    int(w): int(n) for w, n in frame.body["answered"].items()
                }
                for peer in self._executor.peers.values():
                    if peer.asked is not None and self._attachments.skips(peer, peer.asked[1]):
                        self._executor.pushed = {
                            k: v for k, v in self._executor.pushed.items() if v.peer is not peer
                        }
            if self._standby is not None and "decider" in frame.body:
                self._standby.begin_here(frame.body["decider"], frame.body["records"])
            steps = steps_from_json(field(frame.body, "steps", list))
            if self._standby is not None:
                self._standby.hear(
                    steps,
                    events_from_json(field(frame.body, "events", list, [])),
                    steps_from_json(field(frame.body, "held", list, [])),
                )
            self._log.extend(steps)
            self._executor.queue.extend(steps)
            self._advance()
        elif frame.kind is Kind.STATE:
            self._receive_gift(link, frame)

    def _on_adopt(self, link: Connection, frame: Frame) -> None:
        body, fds = frame.body, frame.descriptors
        layout = Layout.from_json(body["layout"])
        extras = bytearray(field(body, "extras_bytes", int, 0))
        region = Region.attach(fds[0], layout.nbytes) if fds else None

        def read_weights(slices: Sequence[Tensor]) -> None:
            weights = [] if region is not None else [bytes_of(each) for each in slices]
            if frame.payload_bytes:
                link.read_into([*weights, memoryview(extras)])

        placement = Placement.from_json(body["placement"])
        Numerics.from_json(body["numerics"]).apply()
        if self._executor.layout is not None and self._executor.layout.fingerprint != layout.fingerprint:
            for peer in [
                *self._executor.peers.values()
            ]:  # all workers have prepared more, and will attach again
                self._worker_left(peer, finished=False)
            self._forget_model()
        spec = OptimizerSpec.from_json(body["optimizer"])
        self._adopt(layout, spec, region, placement, read_weights)
        self._fresh = self.config.rank not in placement.servers
        for peer in self._executor.peers.values():  # another lead had told it before
            peer.fit(self._executor.present_shard)
        checkpoint = load(Path(body["checkpoint"])) if body["checkpoint"] else None
        if checkpoint is not None:
            self._executor.present_shard.restore(state_book(checkpoint), vectors=self._executor.mode.by_epoch)
            for rank in range(self.config.workers):
                self._attachments.hear_buffers(worker_state(checkpoint, rank), rank)
        if self.config.replicas:
            decider = new_decider(self.config)
            begin(decider, self.config, body["data"], spec, checkpoint)
            self._standby = Standby(decider, body, read_blob(bytes(extras), "the run's buffers"))
        link.send(Kind.ADOPTED)
        link.send_aside()

    def _forget_model(self) -> None:
        """Before the first step the workers have prepared more: another model takes this one's place."""
        self._executor.forget_model()

    def _adopt(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        region: Region | None,
        placement: Placement,
        read_weights: Callable[[Sequence[Tensor]], None],
    ) -> None:
        """Take this layout and optimizer; see `Executor.adopt`."""
        self._executor.adopt(layout, spec, region, placement, read_weights)
        self._hub.spin_s = spin_for(layout.nbytes, self.config.worker_threads + self.config.servers)
