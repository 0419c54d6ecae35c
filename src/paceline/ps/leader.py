"""The lead: a server that also makes the run's order. Server 0, or who takes its place.

It runs the Lead (mode, leases), forwards what that decides to the other servers, sees that nobody waits
longer than the deadline, and gathers checkpoints.

With replicas it sends what it hears along with what it decides, and before it acts on it: then each follower
could lead (`standby.py`). Whoever does begins by placing the slices of the lead that is gone.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save
from torch import Tensor

from paceline.comm import Connection, Frame, Kind, Region
from paceline.comm.frames import field
from paceline.comm.lasting import LastingLink
from paceline.data.leases import Lease
from paceline.exceptions import CheckpointError, DeadlineError, FrameError, LinkError, PlanError
from paceline.modes import parse_mode
from paceline.modes.lbfgs import Answer
from paceline.params import Placement, bytes_of
from paceline.ps.adoption import Adoption, Offer
from paceline.ps.descent import Descent
from paceline.ps.lead import QUARANTINE, EarlyExit, Event, Lead, Steps
from paceline.ps.peers import MAX_STATE_BYTES, ShmPeer, WorkerPeer
from paceline.ps.saving import Saver, state_book, worker_state
from paceline.ps.server import TICK_S, Server, ServerConfig, book_of, new_lead, rank_of, saved_part
from paceline.ps.standby import lead_to_json
from paceline.storage.atomic import write_text_atomically
from paceline.storage.checkpoint import Checkpoint, FileInfo, load

__all__ = ["LeadServer", "serve"]

log = logging.getLogger("paceline.server")

_LEASES_AT_ONCE = 8
_ACCUSED_S = 2.0
"""How long a worker says that it has lost a server, before we part with that server, too."""
_PROMISED = 1000
"""More placements than a lead announces without making them."""
_HURRY_S = 0.8
"""How long a checkpoint that was asked for waits for the end of a round and for the workers' parts."""


@dataclass
class _Change:
    """A placement to come. Workers are told of it first: they reach the servers that are new, and send them
    what they will need."""

    placement: Placement
    addresses: dict[int, dict[str, Any]]
    """Of the servers that are new."""
    untold: set[int]
    unready: set[int]
    """Workers that have not heard of it, and that have not said that they are ready for it."""

    def to_json(self) -> list[Any]:
        return [self.placement.to_json(), {str(rank): where for rank, where in self.addresses.items()}]


class LeadServer(Server):
    """See the module."""

    def __init__(self, config: ServerConfig, secret: bytes, controller: LastingLink) -> None:
        super().__init__(config, secret, controller)
        resumed = load(Path(config.resume)) if config.resume else None
        self._begin_leading(new_lead(config, None, None), Adoption(resumed, self.mode), gate=set())
        applied = 0 if resumed is None else int(resumed.meta["lead"]["pushes"])
        self._pushes = _open_pushes(Path(config.run_dir) / "pushes.csv", applied)

    @classmethod
    def succeeding(cls, follower: Server) -> "LeadServer":
        """A follower leads from now on: the lead is gone. All that it has is this one's."""
        server = cls.__new__(cls)
        vars(server).update(vars(follower))
        server._take_over()
        return server

    def _begin_leading(self, lead: Lead, adoption: Adoption, gate: set[int] | None = None) -> None:
        self._lead = lead
        self._adoption = adoption
        self._replicates = self.config.replicas > 0
        self._events: list[Event] = []
        """What the followers have not been told yet."""
        self._newcomers: dict[int, tuple[Connection, dict[str, Any]]] = {}
        """Servers that are not in the order yet: their links, and where workers reach them."""
        self._adopted: set[int] = set()
        """Those of them that know the model."""
        self._departing: set[int] = set()
        """Servers that are to leave."""
        self._settling: set[int] = set()
        """Servers of which slices that change hands are not known to be where they should be."""
        self._numbered = 0
        """The highest number that a placement was given."""
        self._where: dict[int, dict[str, Any]] = {}
        """Where workers reach the followers."""
        self._left_behind: dict[int, Connection] = {}
        """Servers that hold nothing any more; they end when the controller says so."""
        self._change: _Change | None = None
        self._owed: set[int] = set()
        """Workers with a request that the order has not answered."""
        self._unplaced: set[int] = set()
        """Workers that have not been told of the present placement."""
        self._lost: dict[int, tuple[set[int], bool, float]] = {}
        """Workers that lost servers: which, whether they want parameters, and since when they say so."""
        self._listens: dict[int, Any] = {}
        """Where the roots of groups listen for their members."""
        self._request: str | None = None
        """Whose switch is to take effect, at the end of a round."""
        self._leaving: set[int] = set()
        """Workers that are to be told to leave."""
        self._untold: set[int] = set()
        """Workers that have not been told of the present mode."""
        self._followers: dict[int, Connection] = {}
        self._adopting: set[int] | None = None
        self._gate = gate
        """Workers that wait for the others to come; None once training has begun."""
        self._gate_since: float | None = None
        self._held_since: dict[int, float] = {}
        self._acting = -1
        """The worker whose message is being dealt with."""
        self._norms: dict[int, float] = {}
        self._norms_due = 0
        self._after_norms: Steps = []
        self._answers: list[list[Answer]] = []
        self._saver: Saver | None = None
        self._save_flags: set[int] = set()
        self._save_again = False
        self._save_at_next = False
        self._asked = False
        self._hurry_at: float | None = None
        self._last_saved = -1
        # allreduce: the version that our parameters are of, the next one that needs them, and the versions
        # of the parts that workers sent.
        self._current = 0
        self._announced = -1
        self._cuts: dict[int, int] = {}
        self._unsaved = False  # something is newer than a checkpoint of this version would have it
        self._states: dict[str, dict[str, Tensor]] = {}
        self._last_stats = 0.0
        self._said: set[str] = set()

    def _handlers(self) -> dict[Kind, Callable[[Connection, Frame], None]]:
        return {**super()._handlers(), Kind.OFFER: self._on_offer}

    def _close(self) -> None:
        if self._saver is not None:
            self._saver.join()
        for link in self._followers.values():
            link.close()
        super()._close()
        self._write_pushes()
        self._pushes.close()

    # --- connections ------------------------------------------------------------------------------

    def on_hello(self, connection: Connection, body: dict[str, Any]) -> None:
        """Workers and the other servers connect to the lead."""
        role, _, rank = connection.peer.partition(":")
        if role == "server":
            self._where[int(rank)] = field(body, "address", dict)
        if role == "server" and self.shard is not None and field(body, "fresh", bool):
            self._newcomers[int(rank)] = (connection, field(body, "address", dict))
            self._hand_over(int(rank), connection, None)
        elif role == "server":
            self._follows(int(rank), connection)
            if self.shard is None:
                self._try_adopt()
            else:
                self._catch_up(connection, field(body, "position", int))
        else:
            super().on_hello(connection, body)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """As any server, and what followers report."""
        if connection.peer.startswith("server:"):
            self._on_follower(connection, frame)
            return
        try:
            super().on_frame(connection, frame)
        except EarlyExit as error:
            self._fail(error)
        except (PlanError, CheckpointError) as error:
            self._fail(error)
            raise

    def on_end(self, connection: Connection, reason: str) -> None:
        """As any server; without a follower the run cannot go on."""
        if connection in self._followers.values():
            rank = _rank(connection)
            del self._followers[rank]
            if self._running:
                self._follower_gone(rank, reason)
            return
        if connection.peer.startswith("server:"):
            rank = _rank(connection)
            if self._left_behind.pop(rank, None) is None and self._running:
                log.warning("server:%s is gone before it held anything: %s", rank, reason)
                self._newcomers.pop(rank, None)
                self._adopted.discard(rank)
                self._plan_change()
            return
        self._adoption.gone(connection)
        super().on_end(connection, reason)

    def _on_controller(self, frame: Frame) -> None:
        if frame.kind is Kind.CHECKPOINT:
            self._asked = True
            self._save_now()
        elif frame.kind is Kind.SWITCH:
            self._switch(field(frame.body, "mode", str), field(frame.body, "request", str))
        elif frame.kind is Kind.LEAVE and "server" in frame.body:
            self._departing.add(field(frame.body, "server", int))
            self._plan_change()
        elif frame.kind is Kind.LEAVE:
            self._leaving.add(field(frame.body, "worker", int))
        elif frame.kind is Kind.STOP:
            self._running = False

    def _controller_back(self, fresh: Connection) -> None:
        super()._controller_back(fresh)
        body = {"mode": str(self._lead.mode), "version": self._lead.version, "request": None}
        self._controller.send(Kind.STATS, body)

    # --- in another server's place ----------------------------------------------------------------

    def _follower_gone(self, rank: int, reason: str) -> None:
        """Others hold copies of its slices, or the run cannot go on."""
        able = self._replicates and self._gate is None and not self._settling
        placement = self._latest_placement().without(rank) if able else None
        if placement is None:
            with contextlib.suppress(LinkError):  # the last that is known of what is lost
                self._controller.send(Kind.STATS, self._stats())
            self._fail(LinkError(f"{self.name} lost server:{rank}: {reason}"))
            return
        log.warning("server:%s: %s; others answer for its slices", rank, reason)
        if self._saver is not None:
            self._save_again = True
            self._saver.part_written(CheckpointError(f"server:{rank} is gone"))
        self._change = None
        self._act([["place", *placement.to_json()]])
        self._plan_change()

    def _take_over(self) -> None:
        """Lead in the place of a lead that is gone: from what it has told, and what workers have asked."""
        standby = self._standby
        assert standby is not None
        self._standby, self._succeeds = None, False
        self._hub.handler = self
        self._watch_controller()
        self._worker_handlers = self._handlers()
        adoption = Adoption(_still_there(standby.model["checkpoint"]), self.mode)
        adoption.model, adoption.extras = Offer(None, standby.model), standby.extras
        self._begin_leading(standby.lead, adoption)
        self._adopting = set()
        self._states = standby.states
        self._untold = set(self._peers)
        asked = {worker: peer.asked[0] for worker, peer in self._peers.items() if peer.asked is not None}
        self._owed = {worker for worker, kind in asked.items() if kind is not Kind.TAKE}
        self._current = self._lead.version
        self._unsaved = True
        self._after_norms = standby.held
        if self._reduced_to or any(step[0] == "reduce" for step in self._orders):
            self._norms_due = 1
            self._norms = dict(self._reduced_to[1]) if self._reduced_to else {}
        self._numbered = self._placement.number + _PROMISED  # workers may know of some that never came
        self._pushes = _append_pushes(Path(self.config.run_dir) / "pushes.csv", self._lead)
        log.warning("%s leads from here on, in the place of server:%s", self.name, self._led_by)
        placement = self._latest_placement().without(self._led_by)
        if placement is None:
            self._fail(LinkError(f"{self.name} lost server:{self._led_by}, and nobody has its slices"))
            return
        self._act([["place", *placement.to_json()]])
        for worker in sorted(self._lead.machine.members - self._peers.keys()):
            incarnation, finished = standby.gone.get(worker, (-1, False))
            present = self._lead.incarnation_of(worker)
            self._act(self._do("leave", worker, present, finished and incarnation == present))
        for worker, peer in sorted(self._peers.items()):
            self._answer_unheard(worker, peer)
        early, self._early_followers = self._early_followers, []
        for connection, body in early:
            self._hub.add(connection)
            self.on_hello(connection, body)

    def _answer_unheard(self, worker: int, peer: WorkerPeer) -> None:
        """What this worker has asked last, if the lead before has told us nothing of it."""
        if peer.asked is None:
            return
        kind, body = peer.asked
        if kind is Kind.TAKE or field(body, "n", int) > self._lead.requests.get(worker, 0):
            self._hub.handle(peer.connection, Frame(kind, body, 0, []))

    def _latest_placement(self) -> Placement:
        """The last one in the order, whether we are there yet or not."""
        steps = [*self._orders, *self._after_norms]
        latest = next((step for step in reversed(steps) if step[0] == "place"), None)
        return self._placement if latest is None else Placement.from_json(latest[1:])

    # --- servers that come and go -----------------------------------------------------------------

    def _follows(self, rank: int, connection: Connection) -> None:
        """It is in the order from here on. Who is next in line to lead hears of everything first."""
        self._followers[rank] = connection
        self._followers = dict(sorted(self._followers.items()))

    def _plan_change(self) -> None:
        """Let workers get ready for the servers that there are now."""
        latest = self._latest_placement()
        servers = (latest.servers | self._adopted) - self._departing
        if self._gate is not None or self.layout is None:
            return
        if servers == latest.servers and self._full(latest):
            self._change = None
            return
        if self.mode.damping in ("dc", "gap"):
            self._say_once(
                f"servers cannot come or go while the run is in mode {self.mode}: what they need to know "
                "of every worker's last parameters is not sent. The others go on without them."
            )
            return
        self._numbered = number = max(latest.number, self._numbered) + 1
        placement = Placement.over(self.layout, sorted(servers), self.config.replicas, number)
        if placement.holders == latest.holders and servers == latest.servers:
            self._change = None
            return
        addresses = {rank: where for rank, (_, where) in self._newcomers.items() if rank in servers}
        workers = set(self._peers)
        self._change = _Change(placement, addresses, workers, set(workers))
        self._change_if_ready()

    def _full(self, placement: Placement) -> bool:
        """Whether every slice has as many copies as there can be."""
        copies = min(self.config.replicas, len(placement.servers) - 1)
        return all(len(holders) == copies + 1 for holders in placement.holders)

    def _change_if_ready(self) -> None:
        change = self._change
        if change is None or change.unready & self._peers.keys() or self._lead.holds or self._norms_due:
            return
        self._change = None
        self._forward([])  # what only those hear who were here before
        for rank in change.addresses:
            link, _ = self._newcomers.pop(rank)
            self._adopted.discard(rank)
            answered = {w: n - (w in self._owed) for w, n in self._lead.requests.items()}
            body: dict[str, Any] = {"steps": [], "position": self._position, "answered": answered}
            if self._replicates:
                body["lead"] = lead_to_json(self._lead)
            with contextlib.suppress(LinkError):
                link.send(Kind.ORDER, body)
            self._follows(rank, link)
        self._settling = {*self._followers}
        self._act([["place", *change.placement.to_json()]])
        for rank in [r for r in self._followers if r not in change.placement.servers]:
            self._departing.discard(rank)
            self._left_behind[rank] = self._followers.pop(rank)

    def _on_placed(self, rank: int, number: int) -> None:
        """A server has come to a place in the order, and has all its slices from there on."""
        if number != self._latest_placement().number:
            return
        if rank in self._left_behind:
            with contextlib.suppress(LinkError):
                self._controller.send(Kind.STATS, {"departed": rank})
        if rank in self._settling:
            self._settling.discard(rank)
            if not self._settling and self._full(self._placement):
                self._tell_whole()

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
            self._controller.send(Kind.STATS, {"whole": sorted(self._placement.servers)})

    def _catch_up(self, follower: Connection, position: int) -> None:
        """A follower of the lead before has come: it lacks what only we have heard of."""
        missing = self._position - position
        if not 0 <= missing <= len(self._log):
            raise LinkError(f"{follower.peer} is at step {position} of the order, and we at {self._position}")
        body = {"steps": [*self._log][len(self._log) - missing :], "held": self._after_norms}
        follower.send(Kind.ORDER, body)

    def _place(self, placement: Placement) -> None:
        super()._place(placement)
        self._unplaced = set(self._peers)
        self._hub.post(self._answer_lost)

    def _answer_lost(self) -> None:
        """Workers that lost servers which the present placement does without can go on."""
        servers = self._placement.servers
        ready = [w for w, (lost, _, _) in self._lost.items() if not lost & servers]
        for worker in sorted(ready):
            _, fetch, _ = self._lost.pop(worker)
            self._act([["admit", worker, self._lead.version, "fetch" if fetch else "keep"]])

    def _switch(self, text: str, request: str) -> None:
        """The controller wants another mode, and has seen that the run can carry it."""
        mode = parse_mode(text)
        if reason := self._lead.mode.carries(mode):
            self._refuse_switch(request, reason)
            return
        if self._request is not None:
            self._refuse_switch(self._request, f"a switch to {mode} came before it took effect")
        self._request = request
        self._act(self._do("switch", str(mode)))
        if self._request == request and self._lead.mode == mode:
            self._tell_mode()  # it is in it already, and what was to come was taken back

    def _refuse_switch(self, request: str, reason: str) -> None:
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, {"refused_switch": reason, "request": request})

    def _tell_mode(self) -> None:
        request, self._request = self._request, None
        body = {"mode": str(self._lead.mode), "version": self._lead.version, "request": request}
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, body)

    def _on_follower(self, connection: Connection, frame: Frame) -> None:
        rank = _rank(connection)
        if frame.kind is Kind.ADOPTED and rank in self._newcomers:
            self._adopted.add(rank)
            self._plan_change()
        elif frame.kind is Kind.ADOPTED and self._adopting is not None:
            self._adopting.discard(rank)
            self._try_answer()
        elif frame.kind is Kind.DONE and "placed" in frame.body:
            self._on_placed(rank, field(frame.body, "placed", int))
        elif frame.kind is Kind.STATE:
            self._relay(connection, frame)
        elif frame.kind is Kind.DONE and "norms" in frame.body:
            self._add_norms(field(frame.body, "number", int), frame.body["norms"])
        elif frame.kind is Kind.DONE and "answers" in frame.body:
            self._answered(frame.body["answers"])
        elif frame.kind is Kind.DONE:
            self._part_written(frame.body)

    # --- the model --------------------------------------------------------------------------------

    def _on_offer(self, connection: Connection, frame: Frame) -> None:
        if frame.payload_bytes:
            self._begin_adoption(self._adoption.take_weights(connection, frame))
        else:
            self._adoption.offered(rank_of(connection), connection, frame)
            self._gate_since = self._gate_since or time.monotonic()
            self._try_answer()
            self._try_adopt()

    def _try_adopt(self) -> None:
        if len(self._followers) == self.config.servers - 1 and self._adoption.ask_for_weights():
            assert self._adoption.model is not None
            self._begin_adoption(Region.create(self._adoption.model.layout.nbytes))

    def _begin_adoption(self, region: Region) -> None:
        """Take the model and hand it to the other servers."""
        model, saved = self._adoption.model, self._adoption.checkpoint
        assert model is not None
        self._lead.book = book_of(self.config, model.data)
        if self.mode.by_epoch:
            self._begin_descent(model.spec.groups[0])
        placement = Placement.over(model.layout, range(self.config.servers), self.config.replicas)
        self._adopt(model.layout, model.spec, region, placement, lambda slices: None)
        if saved is not None:
            self._lead.restore(saved.meta["lead"])
            self._last_saved = self._lead.version
            book = state_book(saved, optimizer=not self.mode.serverless)
            self._shard.restore(book, vectors=self.mode.by_epoch)
            # Until workers send newer ones, the next checkpoint keeps what this one has of them.
            for rank in range(self.config.workers):
                if kept := worker_state(saved, rank):
                    self._states[f"worker-{rank}.safetensors"] = kept
        self._adopting = set(self._followers)
        for rank, link in self._followers.items():
            self._hand_over(rank, link, None if saved is None else str(saved.path))
        self._try_answer()

    def _hand_over(self, rank: int, link: Connection, checkpoint: str | None) -> None:
        """Tell a follower what the run trains."""
        model = self._adoption.model
        assert model is not None and self._base is not None and self._region is not None
        extras = save(self._adoption.extras) if self._replicates else b""
        message = {
            "layout": model.layout.to_json(),
            "optimizer": model.spec.to_json(),
            "data": model.data,
            "state_keys": model.state_keys,
            "checkpoint": checkpoint,
            "placement": self._placement.to_json(),
            "extras_bytes": len(extras),
        }
        slices = [model.layout.slices[i] for i in self._placement.held(rank)]
        pieces = [] if link.local else [bytes_of(self._base[s.start : s.stop]) for s in slices]
        payload = [*pieces, memoryview(extras)] if extras else pieces
        link.send(Kind.ADOPT, message, payload, [self._region.fd] if link.local else ())

    def _begin_descent(self, settings: dict[str, Any]) -> None:
        """Sandblaster: the settings are L-BFGS's."""
        self._lead.descent = Descent.of(settings)
        if "instead_of" in settings:
            self._say_once(
                f"in mode {self.mode} the servers step by L-BFGS with lr {settings['lr']:g}; nothing of the "
                f"script's {settings['instead_of']} is used, neither learning rate nor weight decay. Give "
                "the script torch.optim.LBFGS to choose L-BFGS's settings."
            )

    def _try_answer(self) -> None:
        """Once all servers have the model nobody else may write to it, and workers may come."""
        if self._adopting is None or self._adopting:
            return
        assert self._region is not None
        self._adoption.answer(
            self._region,
            facts=self._servers_facts(),
            writable=self.mode.needs_memory,
            epoch=self._lead.epoch,
            share=self.mode.in_place or self.mode.needs_memory or self.mode.switchable,
            mode=str(self.mode),
            first=self._gate is not None,
        )

    def _servers_facts(self) -> dict[str, Any]:
        """What a worker must know to reach all servers."""
        me = {self.config.rank: self._hub.listener.address.to_json()}
        where = {str(rank): at for rank, at in {**self._where, **me}.items()}
        placement = self._placement.to_json()
        return {"placement": placement, "servers": where, "replicated": self._replicates}

    # --- workers ----------------------------------------------------------------------------------

    def _on_attach(self, connection: Connection, frame: Frame) -> None:
        peer = self._attach(connection, frame)
        if "listens" in frame.body:
            self._listens[peer.worker] = frame.body["listens"]
        if self._gate is None:
            self._let_in([peer])
            return
        # The first step waits until all planned workers are here, so that a run is repeatable.
        self._gate.add(peer.worker)
        self._gate_since = self._gate_since or time.monotonic()
        if len(self._gate) == self.config.workers:
            self._gate = None
            self._let_in([self._peers[rank] for rank in sorted(self._peers)])
            self._tell_whole()

    def _let_in(self, peers: list[WorkerPeer]) -> None:
        for peer in peers:
            self._act(self._do("join", peer.worker, peer.incarnation))
        self._current = self._lead.version
        for peer in peers:
            facts: dict[str, Any] = {"version": self._lead.version, "mode": str(self.mode)}
            if self.config.groups:
                facts["group"] = self._listens.get(self._lead.root_of(peer.worker))
            self._announce_cut(peer.worker, facts)
            self._unplaced.discard(peer.worker)
            if self._change is not None:
                self._change.unready.add(peer.worker)
                self._change.untold.discard(peer.worker)
                facts["next"] = self._change.to_json()
            facts["placement"] = self._placement.to_json()
            self._welcome(peer, **facts)

    def _on_push(self, connection: Connection, frame: Frame) -> None:
        peer, body = self._peer(connection), frame.body
        push = self._receive_push(peer, body)
        void = field(body, "void", bool, False)
        facts = [
            field(body, "read_version", int),
            field(body, "samples", int, 0),
            field(body, "leases", list, []),
            void,
            field(body, "norm", float) if "norm" in body else None,
        ]
        self._heard(peer, body)
        peer.residual = field(body, "residual", float, peer.residual)
        if "refused" in body:
            self._do("refuse", peer.worker, field(body, "refused", list))
        if field(body, "carries", str, "slot") == "parameters":
            self._take_parameters(peer)
        if void:
            log.warning("%s pushed NaN or Inf at step %s: refused", peer.name, push.sequence + 1)
        self._acting = peer.worker
        if self._lead.descent is not None:
            self._unsaved = True  # it is in a sum, which has no version of its own
            if peer.settings is not None:
                self._lead.descent.driver.lr = float(peer.settings[0]["lr"])
        self._held_since[peer.worker] = time.monotonic()
        steps = self._do("push", push.worker, push.incarnation, push.sequence, *facts)
        if self._lead.refused_norm is not None:
            norm, usual = self._lead.refused_norm
            log.warning(
                "%s pushed a gradient of norm %.3g at step %s, and %.3g is usual: refused (--norm-bound)",
                *(peer.name, norm, push.sequence + 1, usual),
            )
        self._act(steps)
        if self._lead.sick:
            self._quarantine()

    def _do(self, *event: Any) -> Any:
        """Let something happen to the Lead; the followers will hear of it with the next order."""
        if self._replicates:
            self._events.append([*event])
        return self._lead.replay([*event])

    def _heard(self, peer: WorkerPeer, body: dict[str, Any]) -> None:
        """A request that is answered by an admit."""
        self._owed.add(peer.worker)
        number = field(body, "n", int)
        self._lead.requests[peer.worker] = number
        if self._replicates:
            self._events.append(["heard", peer.worker, number])
        if self._change is not None and body.get("ready") == self._change.placement.number:
            self._change.unready.discard(peer.worker)
            self._change_if_ready()

    def _take_parameters(self, peer: WorkerPeer) -> None:
        """allreduce: the root has made its step, and waits."""
        if not self.mode.serverless:
            raise FrameError(f"{peer.name} pushed parameters, and in mode {self.mode} servers have their own")
        assert peer.copy is not None
        whole = [each for each in peer.copy if each is not None]
        self._shard.assign(whole if isinstance(peer, ShmPeer) else peer.gradients.flat)
        self._current = self._lead.version + 1

    def _on_assign(self, connection: Connection, frame: Frame) -> None:
        peer = self._peer(connection)
        push = self._receive_push(peer, frame.body)
        self._heard(peer, frame.body)
        self._unsaved = True
        self._current = self._lead.version
        self._held_since[peer.worker] = time.monotonic()
        self._acting = peer.worker
        self._act(self._do("assign", push.worker, push.incarnation, push.sequence))

    def _on_pull(self, connection: Connection, frame: Frame) -> None:
        peer, fetch = self._peer(connection), field(frame.body, "fetch", bool, True)
        self._heard(peer, frame.body)
        if lost := set(field(frame.body, "without", list, [])) & self._placement.servers:
            self._lost[peer.worker] = (lost, fetch, time.monotonic())
        else:
            self._act([["admit", peer.worker, self._lead.version, "fetch" if fetch else "keep"]])

    def _on_take(self, connection: Connection, frame: Frame) -> None:
        peer, body = self._peer(connection), frame.body
        if self._adoption.model is None or self._adoption.model.data is None:
            raise FrameError("leases of a run without a prepared loader")
        self._acting = peer.worker
        number, epoch = field(body, "n", int, 0), field(body, "epoch", int)
        if self._change is not None and body.get("ready") == self._change.placement.number:
            self._change.unready.discard(peer.worker)
            self._change_if_ready()
        if number and self._lead.takes.get(peer.worker) == number:  # the lead before had heard it
            granted, given, over = self._lead.grants.get(peer.worker, (0, (), False))
            if granted == number:
                self._grant(peer, given, over=over)
            return
        for name in ("give_back", "carry"):
            if name in body:
                self._do(name, peer.worker, field(body, name, list))
        limit = min(_LEASES_AT_ONCE, max(0, field(body, "limit", int)))
        leases, steps = self._do("take", peer.worker, epoch, limit, field(body, "wait", bool), number)
        if leases is None:
            self._held_since[peer.worker] = time.monotonic()
        else:
            self._grant(peer, leases, over=self._lead.over(epoch))
        self._act(steps)

    def _grant(self, peer: WorkerPeer, leases: tuple[Lease, ...], *, over: bool) -> None:
        body: dict[str, Any] = {
            "leases": [[lease.id, list(lease.ranges)] for lease in leases],
            "over": over,
            "version": self._lead.version,
        }
        self._released(peer.worker, body)
        self._flag(peer.worker, body)
        self._forward([])  # before anybody acts on it
        with contextlib.suppress(LinkError):
            peer.connection.send(Kind.GRANT, body)

    def _on_saved(self, connection: Connection, frame: Frame) -> None:
        rank = rank_of(connection)
        name, tensors = saved_part(connection, frame)
        self._states[name] = tensors
        self._cuts[rank] = field(frame.body, "cut", int, 0)
        if self._saver is None or rank not in self._saver.waits_for:
            self._unsaved = True  # unasked: the worker's end
        else:
            self._saver.worker_saved(rank)

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        self._held_since.pop(peer.worker, None)
        self._acting = -1
        self._save_flags.discard(peer.worker)
        self._leaving.discard(peer.worker)
        self._lost.pop(peer.worker, None)
        self._owed.discard(peer.worker)
        if self._change is not None:
            self._change.unready.discard(peer.worker)
        if peer.residual and not finished:
            self._say_once(
                f"{peer.name} is gone, and with it a gradient of L2 norm {peer.residual:.3g} that "
                "compression had held back until later pushes"
            )
        super()._worker_left(peer, finished=finished)
        if self._gate is not None:
            self._gate.discard(peer.worker)
        else:
            self._act(self._do("leave", peer.worker, peer.incarnation, finished))
        if self._saver is not None:
            self._saver.worker_saved(peer.worker)
        elif self._save_at_next and not self._lead.machine.active:
            self._save_now()  # no round will end any more

    # --- the order --------------------------------------------------------------------------------

    def _act(self, steps: Steps) -> None:
        """Make steps part of the order, then answer whoever waits for leases."""
        self._order(steps)
        while True:
            if not self._lead.parks:
                return
            answers, more = self._do("granted", _LEASES_AT_ONCE)
            if not answers and not more:
                return
            self._order(more)
            for worker, leases, over in answers:
                if worker in self._peers:
                    self._grant(self._peers[worker], leases, over=over)

    def _quarantine(self) -> None:
        sick, self._lead.sick = self._lead.sick, []
        what = "NaN or Inf" + (", or more than --norm-bound," if self.config.norm_bound else "")
        for worker in sick:
            self._replace(
                worker,
                f"worker:{worker} pushed {what} {QUARANTINE} times in a row while other workers did not: "
                "something is wrong with its process, its data or its device",
            )

    def _order(self, steps: Steps) -> None:
        """Forward steps to the followers, then execute them."""
        if not steps:
            return
        if self._norms_due:  # an update is half done: what follows in the order waits for its commit
            self._after_norms += steps
            self._forward([], steps)
            return
        applies = [i for i, step in enumerate(steps) if step[0] in ("apply", "vectors")]
        if applies and self._save_is_due():
            at = applies[-1] + 1
            steps = [*steps[:at], *self._begin_save(), *steps[at:]]
        for i, step in enumerate(steps):
            if step[0] in ("reduce", "ask"):
                self._norms_due = len(self._placement.servers)
                steps, self._after_norms = steps[: i + 1], steps[i + 1 :]
                break
        self._forward(steps, self._after_norms)
        self._orders.extend(steps)
        self._advance()
        if self._lead.descent is not None and self._lead.descent.news:
            self._say_once(self._lead.descent.news)

    def _forward(self, steps: Steps, held: Steps | None = None) -> None:
        """Send steps to the followers, who is next in line to lead first."""
        self._position += len(steps)
        body: dict[str, Any] = {"steps": steps}
        if self._replicates:
            self._log.extend(steps)
            events, self._events = self._events, []
            body = {"steps": steps, "events": events, "held": held or []}
        if not any(body.values()):
            return
        for link in self._followers.values():
            with contextlib.suppress(LinkError):  # on_end says so
                link.send(Kind.ORDER, body)

    def _change_mode(self, text: str) -> None:
        super()._change_mode(text)
        self._untold = set(self._peers)
        self._tell_mode()

    def _admit_body(self, worker: int, version: int) -> dict[str, Any]:
        body = super()._admit_body(worker, version)
        self._owed.discard(worker)
        self._released(worker, body)
        self._flag(worker, body)
        self._announce_cut(worker, body)
        return body

    def _released(self, worker: int, body: dict[str, Any]) -> None:
        """A worker is answered: if somebody else's message brought it about, it has waited for that one."""
        since = self._held_since.pop(worker, None)
        if since is not None and self._acting not in (-1, worker):
            body["on"], body["held"] = self._acting, round(time.monotonic() - since, 6)

    def _refused(self, worker: int) -> None:
        self._do("spoiled", worker)

    def _reduced(self, number: int, norms: list[tuple[int, float]]) -> None:
        self._add_norms(number, norms)

    def _add_norms(self, number: int, norms: list[Any]) -> None:
        if number != self._reduces or not self._norms_due:
            return  # of a server whose slices' copies were enough
        self._norms.update({int(i): float(x) for i, x in norms})
        assert self.layout is not None
        if len(self._norms) < len(self.layout.slices):
            return
        self._norms_due = 0
        assert self.config.clip_norm is not None
        norm = sum(self._norms[i] for i in sorted(self._norms)) ** 0.5
        self._norms.clear()
        held, self._after_norms = self._after_norms, []
        # torch.nn.utils.clip_grad_norm_'s formula
        steps: Steps = [["commit", min(1.0, self.config.clip_norm / (norm + 1e-6))]]
        if self._save_is_due() and not any(step[0] == "reduce" for step in held):
            steps += self._begin_save()
        self._order([*steps, *held])

    def _answered(self, answers: list[Answer]) -> None:
        self._answers.append(answers)
        self._norms_due -= 1
        if self._norms_due:
            return
        parts, self._answers = self._answers, []
        held, self._after_norms = self._after_norms, []
        self._act([*self._lead.answered(parts), *held])

    # --- checkpoints ------------------------------------------------------------------------------

    def _save_is_due(self) -> bool:
        if self.mode.serverless:
            return self._lead.version == self._announced
        return self._save_at_next or self._is_periodic(self._lead.version)

    def _is_periodic(self, version: int) -> bool:
        return self.config.checkpoint_every > 0 and version % self.config.checkpoint_every == 0

    def _announce_cut(self, worker: int, body: dict[str, Any]) -> None:
        """allreduce: tell the root that the version which it makes next is to be kept. It then sends its
        parameters along, and tells its group, so that all parts are of one moment."""
        due = self._save_at_next or self._is_periodic(self._lead.version + 1)
        if self.mode.serverless and self._lead.speaks(worker) and self._saver is None and due:
            self._announced = self._lead.version + 1
            body["cut"] = True

    def _save_now(self) -> None:
        """The controller wants a checkpoint, soon."""
        self._hurry_at = self._hurry_at or time.monotonic() + _HURRY_S
        if self.shard is None:
            self._report({"checkpoint": None, "reason": "there is no model yet"})
        elif self._saver is not None:
            self._save_again = self._unsaved or self._saver.version < self._lead.version
        elif self._last_saved == self._lead.version and not self._unsaved:
            self._report({"checkpoint": "kept", "version": self._last_saved})
        elif (self.mode.by_round and self._lead.machine.active) or self._norms_due or not self._is_current():
            # Between two rounds every worker is between two batches, and a resume is bitwise.
            self._save_at_next = True
        else:
            self._order(self._begin_save())

    def _is_current(self) -> bool:
        """Whether our parameters are those of the present version. In allreduce they often are not."""
        return not self.mode.serverless or self._current == self._lead.version

    def _hurry(self) -> None:
        """A checkpoint was asked for and somebody takes his time: cut it here, commit what there is."""
        self._hurry_at = None
        if self._save_at_next and not self._norms_due and self._is_current():
            self._order(self._begin_save())
        if self._saver is not None:
            self._saver.stop_waiting()

    def _begin_save(self) -> Steps:
        """The step that cuts a checkpoint here; none if the one before is still being written."""
        if self._saver is not None:
            log.warning("checkpoint %s skipped: the one before is not finished", self._lead.version)
            return []
        self._save_at_next = self._unsaved = False
        self._write_pushes()  # who goes back to this checkpoint finds the record of all that is in it
        workers = {w for w in self._peers if self._lead.root_of(w) in self._lead.machine.members}
        if self.mode.serverless:  # they send their parts by themselves
            workers = {w for w in workers if self._cuts.get(w) != self._lead.version}
        try:
            self._saver = Saver(
                Path(self.config.run_dir) / "checkpoints",
                self._lead.version,
                parts=len(self._placement.servers),
                workers=workers,
                keep=self.config.keep_checkpoints,
                post=lambda result: self._hub.post(lambda: self._saved(result)),
            )
        except CheckpointError as error:
            self._saved(error)
            return []
        # The root of a group tells the others.
        asked = set() if self.mode.serverless else {w for w in workers if self._lead.speaks(w)}
        self._save_flags = asked
        self._saver.attach_states(self._small_parts)
        model = self._adoption.model
        assert model is not None
        self._saver.describe(
            {
                "layout": model.layout.to_json(),
                "optimizer": model.spec.to_json(),
                "state_keys": model.state_keys,
                "data": model.data,
                "lead": self._lead.snapshot(),
                "servers": self.config.servers,
                "workers": self.config.workers,
            }
        )
        return [["checkpoint", self._lead.version, str(self._saver.directory)]]

    def _small_parts(self) -> dict[str, dict[str, Tensor]]:
        extras = self._adoption.extras
        return {**self._states, **({"extras.safetensors": extras} if extras else {})}

    def _flag(self, worker: int, body: dict[str, Any]) -> None:
        """With a reply it gets anyway, ask a worker for its part of the checkpoint in the making, and tell
        it of a new mode."""
        if worker in self._leaving:
            body["leave"] = True
        if worker in self._untold:
            self._untold.discard(worker)
            body["mode"] = str(self.mode)
        if self._change is not None and worker in self._change.untold:
            self._change.untold.discard(worker)
            body["next"] = self._change.to_json()
        if worker in self._unplaced:
            self._unplaced.discard(worker)
            body["placement"] = self._placement.to_json()
        if worker in self._save_flags and self._saver is not None:
            self._save_flags.discard(worker)
            body["save"] = self._saver.version

    def _part_written(self, body: dict[str, Any]) -> None:
        if self._saver is None or body["directory"] != str(self._saver.directory):
            return  # of one that failed meanwhile
        if "failed" in body:
            self._saver.part_written(CheckpointError(body["failed"]))
        else:
            self._saver.part_written(FileInfo(name=body["name"], sha256=body["sha256"], bytes=body["bytes"]))

    def _saved(self, result: Path | CheckpointError) -> None:
        """A checkpoint is complete, or failed."""
        body: dict[str, Any]
        if isinstance(result, CheckpointError):
            log.error("checkpoint failed: %s", result)
            body = {"checkpoint": None, "reason": str(result)}
        else:
            assert self._saver is not None
            self._last_saved = self._saver.version
            log.info("checkpoint %s", result.name)
            body = {"checkpoint": str(result), "version": self._saver.version}
        self._saver = None
        self._save_flags.clear()
        again, self._save_again = self._save_again, False
        if again:
            self._save_now()
        else:
            self._hurry_at = None
            self._report(body)

    def _report(self, body: dict[str, Any]) -> None:
        """What became of a checkpoint; `asked`: it is the answer to the controller's wish for one."""
        asked, self._asked = self._asked, False
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, self._stats())
            self._controller.send(Kind.STATS, {**body, "asked": asked})

    # --- watching ---------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if now - self._last_stats < TICK_S:
            return
        self._last_stats = now
        self._write_pushes()
        self._check_deadline(now)
        self._check_lost(now)
        self._change_if_ready()
        if self._hurry_at is not None and now > self._hurry_at:
            self._hurry()
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, self._stats())

    def _stats(self) -> dict[str, Any]:
        totals = self._lead.totals
        return {
            "version": self._lead.version,
            "epoch": self._lead.epoch,
            "samples": totals.samples,
            "pushes": totals.pushes,
            "dropped": totals.dropped,
            "refused": totals.refused,
            "lost": self.lost,
            "update_s": round(self.update_s, 6),
            "staleness": {str(k): totals.staleness[k] for k in sorted(totals.staleness)[:64]},
            "clocks": {str(k): v for k, v in self._lead.machine.clocks.items()},
            "data": self._adoption.model.data if self._adoption.model else None,
            "leases": self._lead.book.accounts()[-100:] if self._lead.book else [],
            "parameters": self.layout.numel if self.layout else 0,
        }

    def _write_pushes(self) -> None:
        lines = [
            f"{r.version + 1},{r.push.id.worker},{r.push.id.incarnation},{r.push.id.sequence},"
            f"{r.push.read_version},{r.staleness},{r.push.samples}\n"
            for r in self._lead.applied
        ]
        self._lead.applied.clear()
        try:
            self._pushes.write("".join(lines).encode())
        except OSError as error:
            self._say_once(
                f"pushes.csv in {self.config.run_dir} cannot be written: {error.strerror or error}. Training "
                "goes on, but this record has gaps: make room there, or use another --run-dir next time."
            )

    def _say_once(self, text: str) -> None:
        """Tell the user something that training does not stop for."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)
            with contextlib.suppress(LinkError):
                self._controller.send(Kind.STATS, {"note": text})

    def _check_lost(self, now: float) -> None:
        """A worker lost a server that we still see: one of us is wrong, and the server is the one to go."""
        for _worker, (lost, _, since) in [*self._lost.items()]:
            for rank in lost & self._followers.keys() if now - since > _ACCUSED_S else ():
                self._hub.end(self._followers[rank], "a worker cannot reach it any more")
                with contextlib.suppress(LinkError):
                    self._controller.send(Kind.STATS, {"unreachable": rank})

    def _check_deadline(self, now: float) -> None:
        """Nobody waits for ever, and the error names who is missing."""
        limit = self.config.deadline_s
        advice = f"the deadline is {limit:g} s (--deadline)"
        if self._gate is not None and self._gate_since and now - self._gate_since > limit:
            missing = sorted(set(range(self.config.workers)) - self._gate - self._adoption.waiting)
            who = ", ".join(f"worker:{r}" for r in missing)
            self._fail(DeadlineError(f"{who} did not reach paceline.prepare() while others wait; {advice}."))
        for worker, since in self._held_since.items():
            if now - since > limit:
                blockers = self._blockers(worker)
                who = ", ".join(f"worker:{b}" for b in sorted(blockers))
                text = (
                    f"worker:{worker} has waited {now - since:.0f} s at version {self._lead.version} "
                    f"for {who or 'a server'}; {advice}. Look at its log, or raise the deadline if a "
                    "step may take this long."
                )
                if not blockers:
                    self._fail(DeadlineError(text))
                    return
                for blocker in blockers:
                    self._replace(blocker, f"DeadlineError: {text}")
                # Who waits, waits anew: for those that come instead.
                self._held_since = dict.fromkeys(self._held_since, now)
                return

    def _replace(self, worker: int, reason: str) -> None:
        """Have the controller put another process in a worker's place. This one can write no more then."""
        peer = self._peers.get(worker)
        body = {
            "replace": worker,
            "incarnation": peer.incarnation if peer is not None else None,
            "reason": reason,
        }
        log.warning("%s", reason)
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, body)

    def _blockers(self, worker: int) -> set[int]:
        waits_for = self._lead.machine.waiting.get(worker, set()) | self._lead.missing_assigns
        if not waits_for and self._lead.book:
            waits_for = set(self._lead.book.outstanding)
        # What nobody holds, somebody has still to take or to read to its end.
        waits_for = waits_for - {worker} or self._lead.machine.members - self._held_since.keys()
        return waits_for - {worker}


def _rank(connection: Connection) -> int:
    return int(connection.peer.partition(":")[2])


def serve(config: ServerConfig, secret: bytes, controller: LastingLink) -> None:
    """Be a server in this process until the controller stops it."""
    if config.import_from is not None:
        sys.path.insert(0, config.import_from)
    torch.set_num_threads(1)  # the shard has its own threads
    torch.set_grad_enabled(False)
    kind = LeadServer if config.lead == config.rank else Server
    server: Server = kind(config, secret, controller)
    while server.run():
        server = LeadServer.succeeding(server)


_PUSHES = "version,worker,incarnation,sequence,read_version,staleness,samples\n"


def _open_pushes(path: Path, applied: int) -> IO[bytes]:
    """The record of every applied push. Unbuffered: what a full disk refuses is not kept in memory.

    Args:
        applied: how many the run goes on from: what came after them is undone, and no part of the record.
    """
    kept: list[str] = []
    with contextlib.suppress(OSError):
        kept = path.read_text().splitlines(keepends=True)[1 : 1 + applied]
    write_text_atomically(path, "".join([_PUSHES, *kept]))
    return path.open("ab", buffering=0)


def _append_pushes(path: Path, lead: Lead) -> IO[bytes]:
    """The record, in another lead's place: what that one has not written is among the last applied."""
    written = 0
    with contextlib.suppress(OSError):
        text = path.read_bytes()
        written = max(0, text.count(b"\n") - 1)
        if not text.endswith(b"\n"):  # it died while it wrote
            os.truncate(path, text.rfind(b"\n") + 1)
    missing = max(0, lead.totals.pushes - written)
    lead.applied = lead.applied[len(lead.applied) - missing :] if missing <= len(lead.applied) else []
    return path.open("ab", buffering=0)


def _still_there(path: str | None) -> Checkpoint | None:
    """The checkpoint that a run began from, unless newer ones have taken its place."""
    try:
        return None if path is None else load(Path(path))
    except CheckpointError:
        return None
