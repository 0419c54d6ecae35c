"""Which server holds what: servers that die, come and go. A part of the lead server.

A placement is a step of the order. Before one in which servers are new, workers are told: they reach them,
and send them what they will need; when all have, it is ordered.
"""

import contextlib
import logging
from typing import Any

from safetensors.torch import save
from torch import Tensor

from paceline.comm import Connection, Frame, Kind
from paceline.comm.frames import field
from paceline.comm.messages import FullyReplicated, ServerEmptied, ServerUnreachable
from paceline.core.decider_state import decider_state_to_json
from paceline.core.placement_changes import PlacementChanges
from paceline.core.steps import AdmitStep, PlaceStep, steps_to_json
from paceline.exceptions import LinkError
from paceline.params import Placement, bytes_of
from paceline.ps.ordering import Ordering
from paceline.ps.peers import MAX_STATE_BYTES
from paceline.ps.standby import records_to_json

__all__ = ["Placing"]

log = logging.getLogger("paceline.server")

_ACCUSED_S = 2.0
"""How long a worker says that it has lost a server, before we part with that server, too."""


class Placing(Ordering):
    """Places slices."""

    def _begin_placing(self) -> None:
        self._changes = PlacementChanges(self.config.replicas)
        self._newcomer_links: dict[int, Connection] = {}
        """Links of the servers that are not in the order yet."""
        self._where: dict[int, dict[str, Any]] = {}
        """Where workers reach the followers."""
        self._left_behind: dict[int, Connection] = {}
        """Servers that hold nothing any more; they end when the controller says so."""
        self._owed: set[int] = set()
        """Workers with a request that the order has not answered."""
        self._lost: dict[int, tuple[set[int], bool, float]] = {}
        """Workers that lost servers: which, whether they want parameters, and since when they say so."""

    def _follower_gone(self, rank: int, reason: str) -> None:
        """Others hold copies of its slices, or the run cannot go on."""
        able = self._replicates and self._gate is None and not self._changes.settling
        placement = self._latest_placement().without(rank) if able else None
        if placement is None:
            with contextlib.suppress(LinkError):  # the last that is known of what is lost
                self._controller.tell(self._stats())
            self._fail(LinkError(f"{self.name} lost server:{rank}: {reason}"))
            return
        log.warning("server:%s: %s; others answer for its slices", rank, reason)
        self._checkpoints.server_gone(rank)
        self._changes.change = None
        self._act([PlaceStep(placement)])
        self._plan_change()

    def _latest_placement(self) -> Placement:
        """The last one in the order, whether we are there yet or not."""
        steps = [*self._executor.queue, *self._sequencer.held]
        latest = next((step for step in reversed(steps) if isinstance(step, PlaceStep)), None)
        return self._executor.placement if latest is None else latest.placement

    def _follows(self, rank: int, connection: Connection) -> None:
        """It is in the order from here on. Who is next in line to lead hears of everything first."""
        self._followers[rank] = connection
        self._followers = dict(sorted(self._followers.items()))

    def _plan_change(self) -> None:
        """Let workers get ready for the servers that there are now."""
        latest, layout, mode = self._latest_placement(), self._executor.layout, self._executor.mode
        if self._gate is not None or layout is None or not self._changes.needed(latest):
            return
        if mode.damping in ("dc", "gap"):
            self._say_once(
                f"servers cannot come or go while the run is in mode {mode}: what they need to know "
                "of every worker's last parameters is not sent. The others go on without them."
            )
            return
        self._changes.plan(layout, latest, self._executor.peers)
        self._change_if_ready()

    def _change_if_ready(self) -> None:
        if self._changes.change is None or self._decider.pushes.holds or self._sequencer.waiting:
            return
        change = self._changes.take_ready(self._executor.peers.keys())
        if change is None:
            return
        self._forward([])  # what only those hear who were here before
        for rank in change.addresses:
            link = self._newcomer_links.pop(rank)
            answered = {w: n - (w in self._owed) for w, n in self._decider.roster.requests.items()}
            body: dict[str, Any] = {"steps": [], "position": self._log.position, "answered": answered}
            # Who gives it what follows from the placement before: it may have adopted an earlier one.
            body["placement"] = self._latest_placement().to_json()
            if self._replicates:
                body["decider"] = decider_state_to_json(self._decider.state())
                body["records"] = records_to_json(self._record.pending)
            with contextlib.suppress(LinkError):
                link.send(Kind.ORDER, body)
            self._follows(rank, link)
        self._changes.settling = {*self._followers}
        self._act([PlaceStep(change.placement)])
        for rank in [r for r in self._followers if r not in change.placement.servers]:
            self._changes.departing.discard(rank)
            self._left_behind[rank] = self._followers.pop(rank)

    def _on_placed(self, rank: int, number: int) -> None:
        """A server has come to a place in the order, and has all its slices from there on."""
        if number != self._latest_placement().number:
            return
        settled = self._changes.placed(rank, leaves=rank in self._left_behind)
        self._let_depart()
        if settled and self._changes.complete(self._executor.placement):
            self._tell_whole()

    def _let_depart(self) -> None:
        """Servers end that hold nothing, when every worker has been told to do without them."""
        with contextlib.suppress(LinkError):
            for rank in self._changes.free_to_end(self._executor.peers.keys(), self._decider.groups.speaks):
                self._controller.tell(ServerEmptied(rank))
                self._changes.departed.discard(rank)

    def _give(self, server: int, number: int, tensors: dict[str, Tensor]) -> None:
        with contextlib.suppress(LinkError):  # on_end says so
            link = self._followers.get(server)
            if link is not None:
                link.send(Kind.STATE, {"number": number}, [memoryview(save(tensors))])

    def _relay(self, giver: Connection, frame: Frame) -> None:
        """Slices from one server to another."""
        server = field(frame.body, "to", int)
        if server == self.config.rank:
            self._receive_gift(giver, frame)
        elif server in self._followers:
            blob = giver.read_blob(frame, MAX_STATE_BYTES)
            with contextlib.suppress(LinkError):
                number = field(frame.body, "number", int)
                self._followers[server].send(Kind.STATE, {"number": number}, [memoryview(blob)])
        else:
            giver.read_blob(frame, MAX_STATE_BYTES)

    def _tell_whole(self) -> None:
        """All slices have all the copies that they should have."""
        with contextlib.suppress(LinkError):
            self._controller.tell(FullyReplicated(tuple(sorted(self._executor.placement.servers))))

    def _catch_up(self, follower: Connection, position: int) -> None:
        """A follower of the leader before has come. It lacks the steps that only we have heard of, and the
        events that we have decided on meanwhile: it gets our decider's state as it is now."""
        steps = self._log.since(position)
        if steps is None:
            at = self._log.position
            raise LinkError(f"{follower.peer} is at step {position} of the order, and we at {at}")
        body = {
            "steps": steps_to_json(steps),
            "held": steps_to_json(self._sequencer.held),
            "decider": decider_state_to_json(self._decider.state()),
            "records": records_to_json(self._record.pending),
        }
        follower.send_aside()
        follower.send(Kind.ORDER, body)

    def _answer_lost(self) -> None:
        """Workers that lost servers which the present placement does without can go on."""
        servers = self._executor.placement.servers
        ready = [w for w, (lost, _, _) in self._lost.items() if not lost & servers]
        for worker in sorted(ready):
            _, fetch, _ = self._lost.pop(worker)
            self._act([AdmitStep(worker, self._decider.version, None if fetch else "keep")])

    def _hand_over(self, rank: int, link: Connection, checkpoint: str | None) -> None:
        """Tell a follower what the run trains."""
        model = self._adoption.model
        assert model is not None and self._executor.base is not None and self._executor.region is not None
        extras = save(self._adoption.extras) if self._replicates else b""
        message = {
            **model.facts(),
            "numerics": model.numerics.to_json(),
            "checkpoint": checkpoint,
            "placement": self._executor.placement.to_json(),
            "extras_bytes": len(extras),
        }
        slices = [model.layout.slices[i] for i in self._executor.placement.held(rank)]
        pieces = [] if link.local else [bytes_of(self._executor.base[s.start : s.stop]) for s in slices]
        payload = [*pieces, memoryview(extras)] if extras else pieces
        link.send(Kind.ADOPT, message, payload, [self._executor.region.fd] if link.local else ())

    def _servers_facts(self) -> dict[str, Any]:
        """What a worker must know to reach all servers."""
        me = {self.config.rank: self._hub.listener.address.to_json()}
        where = {str(rank): at for rank, at in {**self._where, **me}.items()}
        placement = self._executor.placement.to_json()
        return {"placement": placement, "servers": where, "replicated": self._replicates}

    def _check_lost(self, now: float) -> None:
        """A worker lost a server that we still see: one of us is wrong, and the server is the one to go."""
        for _worker, (lost, _, since) in [*self._lost.items()]:
            for rank in lost & self._followers.keys() if now - since > _ACCUSED_S else ():
                self._hub.end(self._followers[rank], "a worker cannot reach it any more")
                with contextlib.suppress(LinkError):
                    self._controller.tell(ServerUnreachable(rank))
