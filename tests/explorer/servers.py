"""A server of a world: the core's LeadMachine or FollowerMachine, and what `ps/leader.py` and
`ps/follower.py` do.

Those two read frames, tell the machine what they mean, and perform what it decides. So does this one, with
messages instead of sockets and a Shard instead of memory.
"""

import collections
import json
from collections.abc import Iterable
from typing import Any, assert_never

from paceline.causes import cause_of
from paceline.comm import Kind
from paceline.comm.worker_messages import TO_SERVER
from paceline.core.decider import Decider
from paceline.core.decider_state import decider_state_to_json
from paceline.core.events import Event, events_from_json, events_to_json
from paceline.core.layout import Layout
from paceline.core.modes import parse_mode
from paceline.core.placement import Placement
from paceline.core.sequencer import OrderLog
from paceline.core.server import lead_actions as actions
from paceline.core.server import lead_reports as reports
from paceline.core.server.follower_machine import FollowerMachine
from paceline.core.server.lead_actions import Action, Actions, Notes
from paceline.core.server.lead_machine import LeadMachine
from paceline.core.server.lead_settings import LeadSettings
from paceline.core.server.present import Present
from paceline.core.server.standby import Standby, records_to_json
from paceline.core.server.start_gate import StartGate
from paceline.core.server.worker_requests import AssignRequest, PushRequest
from paceline.core.steps import (
    AdmitStep,
    ApplyStep,
    ModeStep,
    ReduceStep,
    Steps,
    steps_from_json,
    steps_to_json,
)
from paceline.core.totals import Applied
from paceline.ps.worker_frames import account_events, read_request
from tests.explorer.beginnings import (
    Disk,
    contents_from_json,
    contents_to_json,
    layout_of,
    new_decider,
    place_of,
)
from tests.explorer.checks import check_bounds, check_update
from tests.explorer.model import CONTROLLER, END, Broken, Message, Output, Pid, World, message, server, worker
from tests.explorer.shards import Peer, Pushed, Shard, Slice

__all__ = ["ServerModel"]

_REQUESTS = {"PUSH", "PULL", "ASSIGN", "TAKE", "VOTE", "CALL"}


class ServerModel:
    """One server process.

    Args:
        disk: what the run begins from; None: its beginning.
        fresh: it comes to a run that goes on.
    """

    def __init__(self, world: World, pid: Pid, *, disk: Disk | None = None, fresh: bool = False) -> None:
        self.world, self.pid = world, pid
        self.rank = pid.rank
        self.outputs: list[Output] = []
        self.applied: list[Applied] = []
        mode = parse_mode(world.mode)
        layout = layout_of(world)
        placement = Placement.over(layout, range(world.servers), world.replicas)
        self.shard = Shard(pid.rank, str(mode), placement, {})
        self.settings = LeadSettings(
            rank=pid.rank,
            workers=world.workers,
            servers=world.servers,
            deadline_s=1e9,
            replicas=world.replicas,
            clip_norm=world.clip_norm,
            checkpoint_every=world.checkpoint_every,
        )
        self.log = OrderLog(100 if world.replicas and world.servers > 2 else 0)
        self.present = Present(mode)
        self.lead: LeadMachine | None = None
        self.follower: FollowerMachine | None = None
        self.leader: Pid | None = None
        """The leader that this follower has a link to."""
        self.came: set[int] = set()
        """Workers that have attached to a leader of a run that begins."""
        self.followers: dict[int, Pid] = {}
        self.addresses: dict[int, Pid] = {}
        """Where workers reach the other servers; those that are gone stay in it."""
        self.newcomers: dict[int, Pid] = {}
        self.left_behind: dict[int, Pid] = {}
        self.early: list[tuple[Pid, Message]] = []
        """Greetings of servers that know sooner than this one that it leads."""
        self.pending: collections.deque[Action] = collections.deque()
        self.performing = False
        self.io: collections.deque[tuple[str, Any]] = collections.deque()
        """What another thread does: parts that are being written, checkpoints that are being committed."""
        self.files: dict[str, Any] | None = None
        self.offers: list[Pid] = []
        """Workers that have offered their model, and wait for an answer."""
        if fresh:
            self.follower = FollowerMachine(self.present, self.log)
            return
        decider = new_decider(world)
        self.shard.contents = {i: Slice() for i in placement.held(pid.rank)}
        if disk is not None:
            decider.restore(disk.lead)
            self.shard.contents = {i: disk.contents[i] for i in placement.held(pid.rank)}
        if pid.rank == 0:
            self.lead = LeadMachine(
                self.settings,
                decider,
                present=self.present,
                log=self.log,
                gate=StartGate(world.workers),
                applied=self.applied,
                directory_of=str,
            )
            self._begin(layout, placement)
        else:
            self.follower = FollowerMachine(self.present, self.log)
            standby = Standby(decider) if world.replicas else None
            self.follower.adopt(layout, placement, 1, standby, takes_part=True)
            self.leader = server(0, pid.incarnation)

    def _begin(self, layout: Layout, placement: Placement) -> None:
        """All servers have the model; `followers` are those that the run begins with."""
        lead = self.lead
        assert lead is not None
        for rank in range(1, self.world.servers):
            lead.follower_came(rank)
            self.followers[rank] = self.addresses[rank] = server(rank, self.pid.incarnation)
        lead.adopt(layout, placement, 1)
        for rank in range(1, self.world.servers):
            lead.server_adopted(rank)

    @property
    def decider(self) -> Decider | None:
        """What this server knows of the run; None: nothing."""
        if self.lead is not None:
            return self.lead.decider
        standby = None if self.follower is None else self.follower.standby
        return None if standby is None else standby.decider

    @property
    def takes_part(self) -> bool:
        """Whether it executes the order."""
        return self.lead is not None or (self.follower is not None and self.follower.takes_part)

    # --- one event --------------------------------------------------------------------------------

    def handle(self, source: Pid | None, received: Message) -> list[Output]:
        """What follows from a message; of itself (`source` None) from work that another thread has done."""
        self.outputs = []
        if source is None:
            self._own(received)
        elif source == CONTROLLER:
            self._on_controller(received)
        elif source.role == "w" and not self._is_linked(source, received.kind):
            pass
        elif source.role == "s":
            self._on_server(source, received)
        elif self.lead is not None:
            self._lead_hears(self.lead, source, received)
        else:
            self._follower_hears(source, received)
        self.applied.clear()
        if self.lead is not None and self.lead.gate.open:
            if len(self.came) < self.world.workers and self.lead.decider.begun:
                raise Broken(f"the first step is made before all workers are here: {sorted(self.came)} are")
            check_bounds(self.lead.decider)
        return self.outputs

    def _send(self, pid: Pid, kind: str, **body: Any) -> None:
        for unread in ("on", "held"):  # who is blamed for a wait, and for how long
            if kind != "ORDER":
                body.pop(unread, None)
        self.outputs.append(Output(pid, message(kind, **body)))

    def _own(self, received: Message) -> None:
        if received.kind == "TICK":
            if self.lead is not None:
                self._follow(self.lead.tick(1e6, set()))
            return
        what, facts = self.io.popleft()
        lead = self.lead
        assert lead is not None
        if what == "part":
            self._part_written(*facts)
        elif self.files is not None:
            files, self.files = self.files, None
            self._commit(files)
            self._follow(lead.checkpoint_saved(f"checkpoint {files['version']}", 0.0))

    # --- workers ----------------------------------------------------------------------------------

    def _is_linked(self, source: Pid, kind: str) -> bool:
        """Whether a worker's link is read. It is closed when another process comes in its place, and when the
        order says that it is gone."""
        peer = self.shard.peers.get(source.rank)
        if kind in ("HELLO", "OFFER", "ATTACH"):
            return peer is None or peer.incarnation < source.incarnation
        return kind == "END" or (peer is not None and peer.incarnation == source.incarnation)

    def _peer(self, source: Pid) -> Peer:
        peer = self.shard.peers.get(source.rank)
        if peer is None or peer.incarnation != source.incarnation:
            raise Broken(f"{source} has not attached to {self.pid}")
        return peer

    def _attach(self, source: Pid, body: dict[str, Any]) -> Peer:
        older = self.shard.peers.get(source.rank)
        if older is not None:
            if older.incarnation >= source.incarnation:
                raise Broken(f"{source} is here already as incarnation {older.incarnation}")
            self._worker_left(source.rank, older, finished=False)
        peer = Peer(source.incarnation, "compress" in body, self.shard.placement.number)
        self.shard.peers[source.rank] = peer
        return peer

    def _keep(
        self, source: Pid, request: PushRequest | AssignRequest, positions: list[int], read: int
    ) -> None:
        push = request.push.id if isinstance(request, PushRequest) else request.push
        void = isinstance(request, PushRequest) and request.push.void
        pushed = Pushed(self._peer(source), tuple(positions), read, void)
        self.shard.receive(push, pushed)

    def _lead_hears(self, lead: LeadMachine, source: Pid, received: Message) -> None:
        kind, body = received.kind, received.body
        if received == END or kind == "DETACH":
            self.offers = [each for each in self.offers if each != source]
            peer = self.shard.peers.get(source.rank)
            if peer is not None and peer.incarnation == source.incarnation:
                finished = kind == "DETACH" and not body.get("left", False)
                told = (
                    account_events(TO_SERVER.read(Kind[kind], body), source.rank) if kind == "DETACH" else ()
                )
                self._worker_left(source.rank, peer, finished=finished, told=told)
                if kind != "DETACH":
                    lead.link_lost(source.rank, source.incarnation, 0.0)
        elif kind == "OFFER":
            self.offers.append(source)
            self._answer_offers(lead)
        elif kind == "ATTACH":
            peer = self._attach(source, body)
            needs = peer.needs_fates
            self.came.add(source.rank)
            self._follow(lead.attach(source.rank, source.incarnation, 0.0, needs_fates=needs))
        elif kind == "SAVED":
            self._follow(lead.worker_saved(source.rank, body.get("cut", 0)))
        elif kind in _REQUESTS:
            positions = body.pop("at", [])
            asked: Any = TO_SERVER.read(Kind[kind], body)
            request = read_request(asked, self._known(source), 1)
            if isinstance(request, PushRequest | AssignRequest):
                self._keep(source, request, positions, body["read_version"])
            self._follow(lead.request(request, 0.0))
        elif kind not in ("HELLO", "PROBE", "SENDS"):
            raise Broken(f"{source} sent {kind}")

    def _follower_hears(self, source: Pid, received: Message) -> None:
        follower, kind, body = self.follower, received.kind, received.body
        assert follower is not None
        if received == END or kind == "DETACH":
            peer = self.shard.peers.get(source.rank)
            if peer is not None and peer.incarnation == source.incarnation:
                self._worker_left(
                    source.rank, peer, finished=kind == "DETACH" and not body.get("left", False)
                )
        elif kind == "ATTACH":
            self._attach(source, body)
            follower.attach(source.rank, source.incarnation)
            self._send(source, "ATTACHED", owned=self.shard.placement.owned(self.rank))
        elif kind in _REQUESTS:
            positions = body.pop("at", [])
            asked: Any = TO_SERVER.read(Kind[kind], body)
            request = read_request(asked, self._known(source), 1)
            if kind in ("TAKE", "VOTE", "CALL"):
                follower.request(request)
                return
            if follower.keeps_requests and not follower.request(request):
                return
            if isinstance(request, PushRequest | AssignRequest):
                self._keep(source, request, positions, body["read_version"])
                self._advance()
        elif kind not in ("HELLO", "PROBE", "SENDS", "SAVED"):
            raise Broken(f"{source} sent {kind}")

    def _known(self, source: Pid) -> Any:
        self._peer(source)
        return _Known(source.rank, source.incarnation)

    def _worker_left(self, rank: int, peer: Peer, *, finished: bool, told: Iterable[Event] = ()) -> None:
        if self.follower is not None:
            self.follower.left(rank, peer.incarnation, finished=finished)
        if self.shard.peers.get(rank) is peer:
            del self.shard.peers[rank]
        self.shard.departures.gone(rank, peer.incarnation)
        self._advance()
        if self.lead is not None:
            self._follow(self.lead.left(rank, peer.incarnation, 0.0, finished=finished, told=told))

    def _where(self) -> dict[str, Any]:
        known = {**self.addresses, self.rank: self.pid}
        return {str(rank): place_of(pid) for rank, pid in sorted(known.items())}

    def _answer_offers(self, lead: LeadMachine) -> None:
        """See ModelDesk.answer."""
        if not lead.gate.model_everywhere:
            return
        offers, self.offers = self.offers, []
        where = self._where()
        for source in offers:
            self._send(
                source,
                "ADOPTED",
                placement=self.shard.placement.to_json(),
                servers=where,
                replicated=self.world.replicas > 0,
                epoch=lead.decider.epoch,
                mode=self.shard.mode,
                resumed=False,
            )

    # --- what the leader decides ------------------------------------------------------------------

    def _follow(self, decided: Actions) -> None:
        self.pending.extend(decided)
        if self.performing:
            return
        assert self.lead is not None
        self.performing = True
        while True:
            while self.pending:
                self._perform(self.pending.popleft())
            if not (more := self.lead.settle(0.0)):
                break
            self.pending.extend(more)
        self.performing = False

    def _perform(self, action: Action) -> None:
        match action:
            case actions.Order(steps, events, held):
                self._replicate(steps, events, held)
                self._check_order(steps)
                self.shard.queue.extend(steps)
                self._advance()
            case actions.SendGrant(rank, leases, over, notes):
                granted = [[lease.id, list(lease.ranges)] for lease in leases]
                self._answer(rank, "GRANT", {"leases": granted, "over": over, **notes})
            case actions.SendVerdict(rank, notes):
                self._answer(rank, "VERDICT", notes)
            case actions.SendAnswer(rank, values, notes):
                self._answer(rank, "ANSWER", {"values": values, **notes})
            case actions.Welcome(rank, notes):
                self._answer(rank, "ATTACHED", {**notes, "servers": self._where()})
            case actions.Tell(report):
                self._report(report)
            case actions.FailRun(error):
                cause = cause_of(error).value
                self._send(CONTROLLER, "FAILED", cause=cause, error=type(error).__name__, message=str(error))
            case actions.TakeIn():
                self._take_in(action)
            case actions.LeaveBehind(rank):
                self.left_behind[rank] = self.followers.pop(rank)
            case actions.EndFollower(rank):
                if (pid := self.followers.get(rank)) is not None:
                    self._on_server(pid, END)
            case actions.OpenCheckpoint(version, directory, snapshot):
                lead = json.dumps(snapshot, sort_keys=True)
                self.files = {"version": version, "directory": directory, "lead": lead, "parts": {}}
            case actions.CommitCheckpoint():
                self.io.append(("commit", None))
            case actions.AbandonCheckpoint():
                self.files = None
            case actions.TellUser() | actions.WriteLog() | actions.ReportProgress():
                pass
            case _:
                assert_never(action)

    def _answer(self, rank: int, kind: str, body: Notes) -> None:
        if (peer := self.shard.peers.get(rank)) is not None:
            self._send(worker(rank, peer.incarnation), kind, **body)

    def _replicate(self, steps: Steps, events: list[Event], held: Steps) -> None:
        replicates = self.world.replicas > 0
        if not (steps or events or (held and replicates)):
            return
        body: dict[str, Any] = {"steps": steps_to_json(steps)}
        if replicates:
            body |= {"events": events_to_json(events), "held": steps_to_json(held)}
        for pid in [self.followers[rank] for rank in sorted(self.followers)]:
            self._send(pid, "ORDER", **body)

    def _take_in(self, newcomer: actions.TakeIn) -> None:
        pid = self.newcomers.pop(newcomer.server)
        body: dict[str, Any] = {
            "steps": [],
            "position": newcomer.position,
            "answered": newcomer.answered,
            "incarnations": newcomer.incarnations,
            "placement": newcomer.placement.to_json(),
        }
        if newcomer.decider is not None:
            body |= {"decider": newcomer.decider, "records": records_to_json(newcomer.records)}
        self._send(pid, "ORDER", **body)
        self.followers[newcomer.server] = pid

    def _report(self, report: reports.LeaderReport) -> None:
        match report:
            case reports.SaveEnded() | reports.ReplaceWorker() | reports.FullyReplicated():
                self._send(CONTROLLER, type(report).__name__, **report._asdict())
            case reports.ServerEmptied() | reports.ServerUnreachable():
                self._send(CONTROLLER, type(report).__name__, **report._asdict())
            case reports.SaveCut() | reports.RunEndsEarly() | reports.ModeEntered() | reports.SwitchRefused():
                pass
            case _:
                assert_never(report)

    def _check_order(self, steps: Steps) -> None:
        assert self.lead is not None
        if any(isinstance(step, ModeStep) for step in steps):
            return  # it is of the mode before
        for step in steps:
            if isinstance(step, ApplyStep | ReduceStep):
                check_update(self.lead.decider, step)

    # --- executing --------------------------------------------------------------------------------

    def _advance(self) -> None:
        for what, facts in self.shard.execute(self._admit):
            self._outcome(what, facts)

    def _admit(self, rank: int, step: AdmitStep) -> None:
        peer = self.shard.peers[rank]
        if self.lead is not None:
            notes = self.lead.admitted(rank, step.version, 0.0)
        else:
            assert self.follower is not None
            self.follower.admitted(rank)
            notes = {"version": step.version}
        if peer.told != self.shard.placement.number:
            peer.told = self.shard.placement.number
            notes["owned"] = self.shard.placement.owned(self.rank)
        self._send(worker(rank, peer.incarnation), "ADMIT", **notes)

    def _outcome(self, what: str, facts: Any) -> None:
        lead, follower = self.lead, self.follower
        if what == "forgotten":
            if (peer := self.shard.peers.get(facts)) is not None:
                self._worker_left(facts, peer, finished=False)
        elif what == "slices":
            to, number, slices = facts
            self._give(to, number, contents_to_json(slices))
        elif what == "snapshot":
            directory, slices = facts
            part = contents_to_json(slices)
            if lead is not None:
                self.io.append(("part", (directory, part)))
            else:
                self._tell_leader("WRITTEN", directory=directory, part=part)
        elif lead is not None:
            match what:
                case "reduced":
                    self._follow(lead.reduced(*facts))
                case "answers":
                    self._follow(lead.vectors_answered(facts))
                case "mode":
                    self._follow(lead.mode_changed(facts))
                case "placed":
                    self._follow(lead.placed(facts))
        elif follower is not None:
            match what:
                case "reduced":
                    self._tell_leader("REDUCED", number=facts[0], norms=facts[1])
                case "answers":
                    self._tell_leader("ANSWERS", answers=facts)
                case "mode":
                    follower.mode_changed(facts)
                case "placed":
                    follower.placed(facts)
                    self._tell_leader("PLACED", placed=facts.number)

    def _give(self, to: int, number: int, slices: Any) -> None:
        if self.lead is None:
            self._tell_leader("SLICES", to=to, number=number, slices=slices)
        elif (pid := self.followers.get(to)) is not None:
            self._send(pid, "SLICES", to=to, number=number, slices=slices)

    def _tell_leader(self, kind: str, **body: Any) -> None:
        if self.leader is not None:
            self._send(self.leader, kind, **body)

    # --- checkpoints ------------------------------------------------------------------------------

    def _part_written(self, directory: str, part: Any) -> None:
        assert self.lead is not None
        if self.files is not None and self.files["directory"] == directory:
            self.files["parts"] |= {i: [version, pushes] for i, version, pushes in part}
        self._follow(self.lead.part_written(directory, 0.0))

    def _commit(self, files: dict[str, Any]) -> None:
        parts = files["parts"]
        if {*parts} != {*range(self.world.servers)}:
            raise Broken(f"the checkpoint of version {files['version']} has the slices {sorted(parts)} only")
        contents = [[i, *each] for i, each in sorted(parts.items())]
        if any(each[1:] != contents[0][1:] for each in contents):
            raise Broken(f"the checkpoint of version {files['version']} has slices of several moments")
        lead = json.loads(files["lead"])
        samples = sum(len(each[3]) for each in contents[0][2])
        if self.world.batches and not parse_mode(self.shard.mode).by_epoch and samples != lead["samples"]:
            raise Broken(
                f"the checkpoint of version {files['version']} has parameters of {samples} samples, and its "
                f"leases say {lead['samples']}"
            )
        self.outputs.append(Output(None, message("DISK", lead=lead, contents=contents), do="commit"))

    # --- other servers and the controller ---------------------------------------------------------

    def _on_server(self, source: Pid, received: Message) -> None:
        if self.lead is None:
            self._on_leader(source, received)
            return
        lead, kind, body = self.lead, received.kind, received.body
        if received == END:
            for known in (self.followers, self.newcomers, self.left_behind):
                if known.get(source.rank) == source:
                    del known[source.rank]
                    self._follow(lead.server_gone(source.rank, "it is gone", 0.0))
                    return
        elif kind == "HELLO":
            self._meet(source, body)
        elif source not in (*self.followers.values(), *self.newcomers.values(), *self.left_behind.values()):
            return  # its link is closed
        elif kind == "ADOPTED":
            self._follow(lead.server_adopted(source.rank))
            self._answer_offers(lead)
        elif kind == "SLICES":
            self._relay(received)
        elif kind == "PLACED":
            self._follow(lead.placed_on(source.rank, body["placed"]))
        elif kind == "REDUCED":
            self._follow(lead.reduced(body["number"], body["norms"]))
        elif kind == "ANSWERS":
            self._follow(lead.vectors_answered(body["answers"]))
        elif kind == "WRITTEN":
            self._part_written(body["directory"], body["part"])
        else:
            raise Broken(f"{source} sent {kind}")

    def _relay(self, received: Message) -> None:
        body = received.body
        if body["to"] == self.rank:
            self.shard.transfers.receive(body["number"], contents_from_json(body["slices"]))
            self._advance()
        else:
            self._give(body["to"], body["number"], body["slices"])

    def _meet(self, source: Pid, body: dict[str, Any]) -> None:
        lead = self.lead
        assert lead is not None
        self.addresses[source.rank] = source
        if body["fresh"]:
            self.newcomers[source.rank] = source
            lead.newcomer_came(source.rank, place_of(source))
            self._send(source, "ADOPT", placement=self.shard.placement.to_json())
            return
        self._follow(lead.follower_came(source.rank))
        self.followers[source.rank] = source
        steps = lead.order.log.since(body["position"])
        if steps is None:
            raise Broken(f"{source} is at step {body['position']} of the order, whose steps are not kept")
        self._send(
            source,
            "ORDER",
            steps=steps_to_json(steps),
            held=steps_to_json(lead.order.sequencer.held),
            decider=decider_state_to_json(lead.decider.state()),
            records=records_to_json(lead.order.unwritten),
        )

    def _on_leader(self, source: Pid, received: Message) -> None:
        follower, body = self.follower, received.body
        assert follower is not None
        if received.kind == "HELLO":
            self.early.append((source, received))
        elif source != self.leader:
            return  # its link is closed
        elif received == END:
            self.leader = None
            if not follower.leader_lost(0.0):
                self._send(
                    CONTROLLER, "FAILED", cause="lost link", error="LinkError", message="lost the lead"
                )
        elif received.kind == "ADOPT":
            self._adopt(Placement.from_json(body["placement"]))
        elif received.kind == "ORDER":
            self._on_order(follower, body)
        elif received.kind == "SLICES":
            self.shard.transfers.receive(body["number"], contents_from_json(body["slices"]))
            self._advance()
        else:
            raise Broken(f"{source} sent {received.kind}")

    def _adopt(self, placement: Placement) -> None:
        follower, world = self.follower, self.world
        assert follower is not None
        self.shard.placement = placement
        self.shard.contents = {}
        standby = Standby(new_decider(world)) if world.replicas else None
        follower.adopt(layout_of(world), placement, 1, standby, takes_part=False)
        self._tell_leader("ADOPTED")

    def _on_order(self, follower: FollowerMachine, body: dict[str, Any]) -> None:
        if "position" in body:
            placement = Placement.from_json(body["placement"])
            answered = {int(w): int(n) for w, n in body["answered"].items()}
            self.shard.placement = placement
            incarnations = {int(w): int(n) for w, n in body["incarnations"].items()}
            for request in follower.begin_at(body["position"], placement, answered, incarnations):
                if (peer := self.shard.peers.get(request.worker)) is not None:
                    self.shard.forget_pushes(peer)
        if "decider" in body:
            follower.know(body["decider"], body["records"])
        steps = steps_from_json(body["steps"])
        events, held = events_from_json(body.get("events", [])), steps_from_json(body.get("held", []))
        follower.hear(steps, events, held)
        self.shard.queue.extend(steps)
        self._advance()

    def _on_controller(self, received: Message) -> None:
        body, lead = received.body, self.lead
        if received.kind == "START":
            if lead is None:
                self._led_by(Pid(*body["lead"]))
        elif lead is None:
            pass  # for the leader, whose death the controller had not noticed
        elif received.kind == "SAVE":
            self._follow(lead.save_now(0.0, all_ended=body["all_ended"]))
        elif received.kind == "RETIRE":
            self._follow(lead.let_server_go(body["server"]))
        else:
            raise Broken(f"the controller sent {received.kind}")

    def _led_by(self, pid: Pid) -> None:
        """See Follower._follow. The link to the leader before is at its end: the world sees to it."""
        follower = self.follower
        assert follower is not None
        if self.leader is not None and pid.rank == follower.leader and follower.takes_part:
            return
        follower.leader_known()
        if pid == self.pid:
            self._promote(follower)
            return
        follower.leader = pid.rank
        self.leader = pid
        is_new = not follower.takes_part
        self._send(pid, "HELLO", position=follower.log.position, fresh=is_new)
        if self.shard.reduced is not None:
            norms = [(i, 1.0) for i in self.shard.placement.held(self.rank)]
            self._tell_leader("REDUCED", number=self.shard.reduced, norms=norms)

    def _promote(self, follower: FollowerMachine) -> None:
        """See Leader.succeeding."""
        if follower.standby is None:
            raise Broken(f"{self.pid} is to lead, and has no model")
        if not follower.takes_part:
            raise Broken(f"{self.pid} is to lead, and takes no part in the order")
        reduced = self.shard.reduced
        lead = LeadMachine.succeeding(
            follower,
            self.settings,
            queued=[*self.shard.queue],
            reduced=reduced,
            applied=self.applied,
            directory_of=str,
        )
        self.lead, self.follower, self.leader = lead, None, None
        self.came = set(range(self.world.workers))
        unheard = follower.unheard([*self.shard.queue])
        self._follow(lead.succeed(follower, 0.0))
        if (now := self.shard.reduced) is not None:
            self._follow(lead.reduced(now, [(i, 1.0) for i in self.shard.placement.held(self.rank)]))
        for request in unheard:
            if request.worker in self.shard.peers:
                self._follow(lead.request(request, 0.0))
        early, self.early = self.early, []
        for source, received in early:
            self._on_server(source, received)


class _Known:
    """The worker that a frame is from, for `read_request`."""

    def __init__(self, worker: int, incarnation: int) -> None:
        self.worker, self.incarnation = worker, incarnation
