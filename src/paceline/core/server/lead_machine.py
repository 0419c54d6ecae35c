"""LeadMachine: every decision of the server that leads, without sockets, clocks, threads or tensors.

Inputs are what workers, followers, the controller and this server's own executor tell it; times come in as
numbers. Every input returns actions, which the leader's process performs in their order. What comes of an
executed step is an input again.

    request ──► events ──decider──► steps ──sequencer──► Order: followers are sent it, then it is executed
                                       ▲                                    │
                                       └──── norms, vectors, spoiled pushes ┘ (outcomes)

After the actions of an input are performed, `settle` answers whatever has become possible.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

from paceline.core.decider import Decider
from paceline.core.events import (
    Answers,
    Assign,
    Dismiss,
    Event,
    FatesTold,
    Granted,
    Heard,
    Join,
    Leave,
    Spoiled,
    StopEarly,
    Verdicts,
)
from paceline.core.json_types import JsonObject
from paceline.core.layout import Layout
from paceline.core.leases import Lease
from paceline.core.modes import ModeSpec, Rounds
from paceline.core.modes.lbfgs import Answer
from paceline.core.notes import AdmitNotes, GrantNotes, Notes
from paceline.core.out_of_step import mixed_round
from paceline.core.placement import Placement
from paceline.core.placement_changes import PlacementChanges
from paceline.core.rulings import CallAnswer, LeaseGrant, Reply, Verdict
from paceline.core.sequencer import OrderLog, Sequencer
from paceline.core.server.checkpoint_cuts import CheckpointCuts
from paceline.core.server.deadlines import Deadlines
from paceline.core.server.follower_machine import FollowerMachine
from paceline.core.server.lead_actions import (
    Actions,
    OutgoingActions,
    SendAnswer,
    SendGrant,
    SendVerdict,
    Tell,
    TellUser,
    Welcome,
    WriteLog,
)
from paceline.core.server.lead_reports import RunEndsEarly
from paceline.core.server.lead_settings import LeadSettings
from paceline.core.server.mode_switch import ModeSwitch
from paceline.core.server.placer import Placer
from paceline.core.server.present import Present
from paceline.core.server.reply_notes import ReplyNotes
from paceline.core.server.run_order import RunOrder
from paceline.core.server.start_gate import StartGate
from paceline.core.server.waits import Waits
from paceline.core.server.worker_requests import (
    AssignRequest,
    CallRequest,
    OrderedRequest,
    PullRequest,
    PushRequest,
    TakeRequest,
    VoteRequest,
    WorkerRequest,
)
from paceline.core.steps import LeaveStep, Steps
from paceline.core.totals import Applied

__all__ = ["LEASES_AT_ONCE", "LeadMachine"]

LEASES_AT_ONCE = 8
"""Maximum number of leases that a worker is granted by one reply."""

_Where = JsonObject | None


class LeadMachine:
    """One owner: the leader's process, which performs the actions of one input before the next.

    Args:
        gate: open, if another leader began the run.
        applied: gets the records of applied pushes.
        directory_of: names a new directory for a checkpoint of this version.
    """

    def __init__(
        self,
        settings: LeadSettings,
        decider: Decider,
        *,
        present: Present,
        log: OrderLog,
        gate: StartGate,
        applied: list[Applied],
        directory_of: Callable[[int], str],
    ) -> None:
        self.settings = settings
        self.decider = decider
        self.present = present
        self.gate = gate
        self.waits = Waits()
        self._out = OutgoingActions()
        sequencer, changes = Sequencer(settings.clip_norm), PlacementChanges(settings.replicas)
        self.cuts = CheckpointCuts(
            every=settings.checkpoint_every,
            decider=decider,
            sequencer=sequencer,
            present=present,
            out=self._out,
            directory_of=directory_of,
        )
        self.order = RunOrder(
            settings,
            decider,
            sequencer,
            self.cuts,
            present=present,
            log=log,
            out=self._out,
            applied=applied,
        )
        self.placer = Placer(
            settings, self.order, changes, gate=gate, waits=self.waits, present=present, out=self._out
        )
        self._notes = ReplyNotes(settings, decider, present, self.cuts, changes)
        self._switch = ModeSwitch(self.order, gate, present, self._out)
        self._deadlines = Deadlines(settings, decider, sequencer, gate, self.waits, present, self._out)
        self._arrivals: list[int] = []
        """Workers that have joined, and are still to be welcomed."""
        self._told_ending = False
        """Whether the controller knows that the run ends early."""

    # --- another leader's place -------------------------------------------------------------------

    @classmethod
    def succeeding(
        cls,
        follower: FollowerMachine,
        settings: LeadSettings,
        *,
        queued: Steps,
        reduced: int | None,
        applied: list[Applied],
        directory_of: Callable[[int], str],
    ) -> "LeadMachine":
        """A follower leads from now on. `succeed` is its first input.

        Args:
            queued: steps that this server has not executed yet.
            reduced: the update of which this server has done the first half.
        """
        standby, present = follower.standby, follower.present
        assert standby is not None
        present.ordered = follower.last_ordered_placement(queued)
        gate = StartGate(settings.workers, open=True)
        machine = cls(
            settings,
            standby.decider,
            present=present,
            log=follower.log,
            gate=gate,
            applied=applied,
            directory_of=directory_of,
        )
        machine.order.sequencer.take_over(follower.half_done_update(reduced, queued), standby.held)
        return machine

    def succeed(self, follower: FollowerMachine, now: float) -> Actions:
        """Lead in the place of the leader that the follower had. The next inputs are `follower.unheard`."""
        standby, decider, gone = follower.standby, self.decider, follower.leader
        assert standby is not None
        text = f"{self.settings.name} leads from here on, in the place of server:{gone}"
        self._out.put(WriteLog(text))
        self.cuts.current = decider.version
        self.cuts.unsaved = True
        self._notes.mode_changed(self.present.attached)
        for worker in follower.owed:
            self.waits.owed.add(worker)
            self.waits.begin(worker, now)
        self.placer.succeed(gone)
        for worker in sorted(decider.machine.members - self.present.attached.keys()):
            incarnation = decider.roster.incarnations[worker]
            finished = standby.gone.get(worker) == (incarnation, True)
            self._happen(Leave(worker, incarnation, finished))
        return self._out.take()

    # --- the model --------------------------------------------------------------------------------

    def adopt(self, layout: Layout, placement: Placement, optimizers: int) -> None:
        """This server holds the model; the decider has begun. The followers are sent it now."""
        present = self.present
        present.layout, present.optimizers = layout, optimizers
        present.placement = present.ordered = placement
        self.gate.hand_out(self.placer.followers)

    # --- workers that come and go -----------------------------------------------------------------

    def attach(
        self, worker: int, incarnation: int, now: float, *, needs_fates: bool = False, listens: _Where = None
    ) -> Actions:
        """A worker attached.

        Args:
            needs_fates: whether it must be told which of its pushes were applied.
            listens: where it listens for the members of its group.
        """
        self.present.attached[worker] = incarnation
        self._notes.attached(worker, needs_fates=needs_fates, listens=listens)
        if self.gate.open:
            self._join([worker])
        else:
            self.gate.came(now)
            if self.gate.attached(worker):
                self._switch.gate_opened()
                self._join(sorted(self.present.attached))
                self.placer.tell_whole()
                self.placer.gate_opened()
        return self._out.take()

    def _join(self, workers: Iterable[int]) -> None:
        for worker in workers:
            incarnation = self.present.attached[worker]
            self._happen(Join(worker, incarnation))
            if incarnation:  # also of a process that only other servers have seen
                self.order.append([LeaveStep(worker, incarnation - 1)])
            self._arrivals.append(worker)
        self._end_if_asked()

    def link_lost(self, worker: int, incarnation: int, now: float) -> None:
        """A worker's link is gone for good. Most likely its process is, too; `left` follows."""
        self.waits.link_lost(worker, incarnation, now)

    def left(
        self, worker: int, incarnation: int, now: float, *, finished: bool, told: Iterable[Event] = ()
    ) -> Actions:
        """A worker is gone, in order (`finished`) or not.

        Args:
            told: events that it reported with its last message.
        """
        for event in told:
            self.order.happen(event)
        if self.present.attached.get(worker) == incarnation:
            del self.present.attached[worker]
        self.waits.left(worker)
        self._notes.left(worker)
        self.placer.left(worker)
        if self.gate.open:
            self._happen(Leave(worker, incarnation, finished))
        else:
            self.gate.left(worker)
        self.order.append(self.cuts.worker_left(worker, now, finished=finished))
        return self._out.take()

    # --- what workers ask -------------------------------------------------------------------------

    def request(self, request: WorkerRequest, now: float) -> Actions:
        """A worker made a request.

        Raises:
            OutOfStep: for many rounds the workers have stepped different optimizers.
            PlanError: workers draw different orders of an epoch's samples.
        """
        match request:
            case PushRequest():
                self._on_push(request, now)
            case PullRequest():
                self._on_pull(request, now)
            case TakeRequest():
                self._on_take(request, now)
            case AssignRequest():
                self._on_assign(request, now)
            case VoteRequest():
                self._on_vote(request, now)
            case CallRequest():
                self._on_call(request, now)
            case _:
                assert_never(request)
        return self._out.take()

    def _on_push(self, request: PushRequest, now: float) -> None:
        worker = request.worker
        self._hear(request, now)
        for event in request.told:
            self.order.happen(event)
        if request.parameters:
            self.cuts.current = self.decider.version + 1
        if self.decider.descent is not None:
            self.cuts.unsaved = True  # it is in a sum, which has no version of its own
        self.waits.acting = worker
        self.waits.since[worker] = now
        self._happen(request.push)
        machine = self.decider.machine
        if isinstance(machine, Rounds) and machine.mixed == 1:
            self._out.put(TellUser(mixed_round(machine)))

    def _on_assign(self, request: AssignRequest, now: float) -> None:
        self._hear(request, now)
        self.cuts.unsaved = True
        self.cuts.current = self.decider.version
        self.waits.acting = request.worker
        self.waits.begin(request.worker, now)
        self._happen(Assign(request.push))

    def _on_pull(self, request: PullRequest, now: float) -> None:
        self._hear(request, now)
        if request.load is not None:
            self.cuts.unsaved = True
            self._happen(request.load)
        self.placer.pull(request.worker, request.without, now, fetch=request.fetch)

    def _on_take(self, request: TakeRequest, now: float) -> None:
        take, waits, roster = request.take, self.waits, self.decider.roster
        worker = waits.acting = take.worker
        waits.heard(worker, now)
        waits.taking.add(worker)
        self._hear_ready(worker, request.ready)
        if take.number and roster.takes.get(worker) == take.number:  # the leader before had heard it
            number, leases, over = roster.grants.get(worker, (0, (), False))
            if number == take.number:
                self._grant(worker, leases, over, now)
            else:
                waits.begin(worker, now)
            return
        for event in request.told:
            self.order.happen(event)
        ruling = self.order.happen(take)
        if not ruling.replies:
            waits.begin(worker, now)
        self._reply(ruling.replies, now)
        self.order.append(ruling.steps)

    def _on_vote(self, request: VoteRequest, now: float) -> None:
        vote, waits = request.vote, self.waits
        worker = waits.acting = vote.worker
        waits.heard(worker, now)
        waits.voting.add(worker)
        self._hear_ready(worker, request.ready)
        if self.decider.ballot.answer_to(worker, vote.number) is not None:  # the leader before had decided it
            self._send_verdict(worker, now)
            return
        waits.begin(worker, now)
        self.order.happen(vote)

    def _on_call(self, request: CallRequest, now: float) -> None:
        call, waits = request.call, self.waits
        worker = waits.acting = call.worker
        waits.heard(worker, now)
        waits.calling[worker] = call.place
        self._hear_ready(worker, request.ready)
        if (
            self.decider.collectives.answer_to(worker, call.number) is not None
        ):  # settled by the leader before
            self._send_answer(worker, now)
            return
        waits.begin(worker, now)
        self.order.happen(call)

    def _hear(self, request: OrderedRequest, now: float) -> None:
        """A request that the order answers."""
        worker, waits = request.worker, self.waits
        waits.heard_at[worker] = now
        if request.ready:  # first: followers hear of the request together with what follows from it
            self._hear_ready(worker, request.ready)
        waits.owed.add(worker)
        self.order.happen(Heard(worker, request.number))

    def _hear_ready(self, worker: int, number: int) -> None:
        """A worker may say that it is ready for the placement to come."""
        if number:
            self.placer.ready(worker, number)

    # --- what workers are told --------------------------------------------------------------------

    def admitted(self, worker: int, version: int, now: float) -> AdmitNotes:
        """The order answers a worker's request. Returns what the answer tells it."""
        notes = self._notes.admit(worker, version)
        self.waits.owed.discard(worker)
        self.waits.answered(worker, now, notes)
        if "unapplied" in notes:
            self.order.happen(FatesTold(worker))
        return notes

    def _reply(self, replies: Sequence[Reply], now: float) -> None:
        """Answer workers that asked this leader: one that asked the leader before will ask again."""
        for reply in replies:
            match reply:
                case LeaseGrant(worker, leases, over):
                    if worker in self.waits.taking:
                        self._grant(worker, leases, over, now)
                case Verdict(worker):
                    if worker in self.waits.voting:
                        self._send_verdict(worker, now)
                case CallAnswer(worker):
                    if worker in self.waits.calling:
                        self._send_answer(worker, now)
                case _:
                    assert_never(reply)

    def _grant(self, worker: int, leases: tuple[Lease, ...], over: bool, now: float) -> None:
        self.waits.taking.discard(worker)
        notes: GrantNotes = {"version": self.decider.version}
        self._reply_with(worker, notes, now)
        self._out.put(SendGrant(worker, leases, over, notes))

    def _send_verdict(self, worker: int, now: float) -> None:
        self.waits.voting.discard(worker)
        notes: Notes = {}
        self._reply_with(worker, notes, now)
        self._out.put(SendVerdict(worker, notes))

    def _send_answer(self, worker: int, now: float) -> None:
        self.waits.calling.pop(worker, None)
        notes: Notes = {}
        self._reply_with(worker, notes, now)
        self._out.put(SendAnswer(worker, self.decider.collectives.last_answer(worker), notes))

    def _reply_with(self, worker: int, notes: Notes, now: float) -> None:
        self.waits.answered(worker, now, notes)
        self._notes.add(worker, notes)
        self.order.forward()  # before the worker acts on it

    def _happen(self, event: Event) -> None:
        """Let something happen, and order the steps that follow."""
        self.order.append(self.order.happen(event).steps)

    def settle(self, now: float) -> Actions:
        """Answer whatever has become possible: to be called until nothing is."""
        decider = self.decider
        if self._arrivals:
            arrivals, self._arrivals = self._arrivals, []
            self.cuts.current = decider.version
            self.order.forward()  # a follower that leads next must know that they have joined
            for worker in arrivals:
                if worker in self.present.attached:
                    self._out.put(Welcome(worker, self._notes.welcome(worker)))
        if decider.ballot.voters:
            self._reply(self.order.happen(Verdicts()).replies, now)
        if decider.ballot.reason is not None and not self._told_ending:
            self._told_ending = True
            self._out.put(Tell(RunEndsEarly(decider.ballot.reason)))
        if decider.readers.parked:
            ruling = self.order.happen(Granted(LEASES_AT_ONCE))
            self.order.append(ruling.steps)
            self._reply(ruling.replies, now)
        actions = self._out.take()
        if actions or not decider.collectives.calls:
            return actions
        self._reply(self.order.happen(Answers()).replies, now)
        return self._out.take()

    # --- what comes of executed steps -------------------------------------------------------------

    def reduced(self, number: int, norms: Iterable[tuple[int, float]]) -> Actions:
        """A server has done the first half of an update. When all have, the second half is ordered."""
        self.order.reduced(number, norms)
        return self._out.take()

    def vectors_answered(self, answers: list[Answer]) -> Actions:
        """A server has answered an ask. When all have, the decider's next steps are ordered."""
        self.order.vectors_answered(answers)
        return self._out.take()

    def push_spoiled(self, worker: int) -> Actions:
        """This server found NaN or Inf in a push that its worker thought finite, and left that part out."""
        self.order.happen(Spoiled(worker))
        return self._out.take()

    def mode_changed(self, mode: ModeSpec) -> Actions:
        """This server has come to another mode in the order."""
        self.present.mode = mode
        self._notes.mode_changed(self.present.attached)
        self._switch.took_effect()
        return self._out.take()

    def placed(self, placement: Placement) -> Actions:
        """This server has come to a placement in the order."""
        self.placer.placed(placement)
        return self._out.take()

    # --- other servers ----------------------------------------------------------------------------

    def follower_came(self, server: int) -> Actions:
        """A server follows: at the start of the run, or one that followed the leader before."""
        self.order.forward()  # events that it learns from the decider's state
        self.placer.followers.add(server)
        return self._out.take()

    def newcomer_came(self, server: int, address: JsonObject) -> None:
        """A server came to a run that goes on, and is being told of the model."""
        self.placer.newcomer(server, address)

    def server_adopted(self, server: int) -> Actions:
        """A server holds the model."""
        self.placer.adopted(server)
        return self._out.take()

    def placed_on(self, server: int, number: int) -> Actions:
        """A follower has come to a placement in the order, and has all its slices from there on."""
        self.placer.placed_on(server, number)
        return self._out.take()

    def server_gone(self, server: int, reason: str, now: float) -> Actions:
        """The link to another server ended."""
        if self.placer.gone(server, reason):
            self.order.append(self.cuts.server_gone(server, now))
        return self._out.take()

    # --- the controller ---------------------------------------------------------------------------

    def switch(self, mode: str, request: str) -> Actions:
        """The controller wants another mode, and has seen that the plan allows it."""
        self._switch.request(mode, request)
        return self._out.take()

    def save_soon(self) -> None:
        """The controller wants a checkpoint at the next update."""
        self.cuts.want_soon()

    def save_now(self, now: float, *, all_ended: bool) -> Actions:
        """The controller wants a checkpoint, and waits for it; see CheckpointCuts."""
        self.order.append(self.cuts.want_now(now, all_ended=all_ended))
        return self._out.take()

    def let_server_go(self, server: int) -> Actions:
        """The controller wants a server to leave."""
        self.placer.depart(server)
        return self._out.take()

    def let_worker_go(self, worker: int) -> None:
        """The controller wants a worker to leave after its current step."""
        self._notes.leave(worker)
        self.order.happen(Dismiss(worker))

    def end_early(self, reason: str) -> Actions:
        """The controller wants the run to end early."""
        self.gate.early.end = reason
        self._end_if_asked()
        return self._out.take()

    def _end_if_asked(self) -> None:
        """End the run early. Before the gate is open followers could not be told, so it waits until then."""
        early = self.gate.early
        if early.end is not None and self.gate.open:
            reason, early.end = early.end, None
            self.order.happen(StopEarly(reason))
            self.order.forward()

    def controller_back(self) -> Actions:
        """Another controller took over: tell it what it may not know."""
        self._switch.tell()
        self._told_ending = False
        return self._out.take()

    # --- checkpoints ------------------------------------------------------------------------------

    def worker_saved(self, worker: int, version: int) -> Actions:
        """A worker's part of a checkpoint is here; see CheckpointCuts."""
        self.cuts.worker_saved(worker, version)
        return self._out.take()

    def part_written(self, directory: str, now: float, failed: str | None = None) -> Actions:
        """A server has written its part of a checkpoint, or could not (`failed`: why)."""
        self.order.append(self.cuts.part_written(directory, now, failed))
        return self._out.take()

    def checkpoint_saved(self, path: str, now: float) -> Actions:
        """A checkpoint is committed."""
        self.order.append(self.cuts.saved(path, now))
        return self._out.take()

    def checkpoint_failed(self, reason: str, now: float) -> Actions:
        """A checkpoint could not be opened or committed."""
        self.order.append(self.cuts.failed(reason, now))
        return self._out.take()

    # --- time -------------------------------------------------------------------------------------

    def tick(self, now: float, offering: set[int]) -> Actions:
        """Some time has passed.

        Args:
            offering: workers that have offered their model and wait for an answer.
        """
        self._deadlines.check(now, offering)
        self.placer.tick(now)
        self.order.append(self.cuts.hurry_if_late(now))
        self.cuts.tell_cut()
        return self._out.take()
