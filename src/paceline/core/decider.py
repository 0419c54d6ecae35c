"""The brain of the leader: mode machine, lease book, and the run's one order of instructions.

Events in (`events.py`), steps (`steps.py`) and replies to workers out. Server 0 executes the steps and
forwards them, in order, to the other servers. No sockets, no torch, no clock.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, assert_never

from paceline.core import events
from paceline.core.ballot import Ballot
from paceline.core.claims import believed
from paceline.core.collective_calls import CollectiveCalls
from paceline.core.decider_state import DeciderState
from paceline.core.descent import Descent
from paceline.core.leases import Lease, LeaseBook
from paceline.core.modes import (
    Admit,
    Apply,
    Clocks,
    Instruction,
    ModeSpec,
    PushId,
    Rounds,
    Schedule,
    WholeEpochs,
    parse_mode,
)
from paceline.core.modes.lbfgs import Answer, Lbfgs
from paceline.core.out_of_step import check_in_step
from paceline.core.pushes import Pushes, Terms
from paceline.core.readers import Readers
from paceline.core.roster import Roster
from paceline.core.rows import Groups
from paceline.core.rulings import CallAnswer, LeaseGrant, Reply, Ruling, Verdict
from paceline.core.sampler_orders import SamplerOrders
from paceline.core.steps import AdmitStep, AssignStep, DropStep, LeaveStep, LoadStep, ModeStep, Steps
from paceline.core.totals import Totals

__all__ = ["Decider"]

_SMALLER, _LARGER = 0.8, 1.1
"""Factors of the batches of a straggler, and of a worker that waits: quickly down, and carefully up."""


class Decider:
    """Turns what workers do into the run's order.

    Args:
        clip_norm: bound on the norm of the averaged gradient (bsp only).
        norm_bound: how many times the usual norm of a push is absurd.
        schedule: modes that the run goes through by itself.
        groups: workers that all-reduce among themselves, in the modes that have groups.
        max_updates, max_samples: the run ends early after so many.
    """

    def __init__(
        self,
        mode: ModeSpec,
        *,
        clip_norm: float | None = None,
        norm_bound: float | None = None,
        schedule: Schedule | None = None,
        groups: Sequence[Sequence[int]] = (),
        max_updates: int | None = None,
        max_samples: int | None = None,
    ) -> None:
        self.mode = mode
        self.machine = mode.machine()
        self.book: LeaseBook | None = None
        self.descent = Descent(Lbfgs(history=mode.history)) if mode.by_epoch else None
        """Sandblaster's minimisation."""
        self.several_optimizers = False
        """Whether a batch may have several steps, of which the first accounts for its samples."""
        self.ballot = Ballot()
        """Whether the run ends early."""
        self.collectives = CollectiveCalls()
        """What workers give each other."""
        self.pushes = Pushes(clip_norm=clip_norm, norm_bound=norm_bound)
        self.roster = Roster()
        self.readers = Readers()
        self.groups = Groups(groups)
        """Workers in groups: the root of each stands for it in the machine and in the book."""
        self.news: list[str] = []
        """What the user should read of the last event; to be cleared."""
        self._orders = SamplerOrders()
        self._assigns: dict[int, PushId] = {}
        self._schedule = schedule or Schedule(mode)
        self._scheduled = 0
        self._next_mode: ModeSpec | None = None
        self._max_updates = max_updates
        self._max_samples = max_samples

    def begin(self, book: LeaseBook | None, optimizers: int, descent: Descent | None) -> None:
        """The run has a model. Called once, before any worker joins.

        Args:
            book: of the script's loader; None if it has none, or one without an end.
            optimizers: number of optimizers that the script has.
            descent: sandblaster's, with the script's settings.
        """
        self.book = book
        self.several_optimizers = optimizers > 1
        if descent is not None:
            self.descent = descent

    def decide(self, event: events.Event) -> Ruling:
        """Let this event happen. Another decider that is told the same events knows and decides the same.

        Raises:
            OutOfStep: for many rounds the workers have stepped different optimizers.
            PlanError: workers draw different orders of an epoch's samples.
        """
        steps: Steps = []
        replies: Sequence[Reply] = ()
        match event:
            case events.Push():
                steps = self.push(event)
            case events.Take(worker, epoch, limit, wait, number):
                self.roster.takes[worker] = number
                leases, steps = self.take(worker, epoch, limit, wait=wait)
                if leases is not None:
                    replies = (LeaseGrant(worker, leases, self.over(epoch)),)
            case events.Granted(limit):
                replies, steps = self.granted(limit)
            case events.Heard(worker, number):
                self.roster.requests[worker] = number
            case events.Join(worker, incarnation):
                steps = self.join(worker, incarnation)
            case events.Leave(worker, incarnation, finished):
                steps = self.leave(worker, incarnation, finished=finished)
            case events.Dismiss(worker):
                self.roster.team.discard(worker)
            case events.Assign(push):
                steps = self.assign(push)
            case events.Load(worker, incarnation, number):
                steps = self.load(worker, incarnation, number)
            case events.Switch(mode):
                steps = self.switch(parse_mode(mode))
            case events.Vote(worker, number, who, wants):
                self.ballot.vote(worker, number, who, wants)
            case events.Verdicts():
                replies = [Verdict(worker, stop) for worker, stop in self.verdicts()]
            case events.StopEarly(reason):
                self.ballot.stop(reason)
            case events.Call(worker, number, place, value):
                self.collectives.call(worker, number, place, value)
            case events.Answers():
                replies = [CallAnswer(worker) for worker in self.answers()]
            case events.DrawOrder(worker, epoch, fingerprint, sampler):
                self._orders.draw(worker, epoch, fingerprint, sampler, self.over)
            case events.Count(samples):
                self.totals.samples += samples
            case events.GiveBack(worker, ids):
                self.give_back(worker, ids)
            case events.Carry(worker, ids):
                self.carry(worker, ids)
            case events.Refuse(worker, ids):
                self.refuse(worker, ids)
            case events.Skip(worker, ids, samples):
                self.skip(worker, ids, samples)
            case events.Spoiled(worker):
                self.pushes.spoiled(worker, self.machine.members)
            case events.Rate(lr):
                if self.descent is not None:
                    self.descent.driver.lr = lr
            case events.Answered(parts):
                steps = self.answered(parts)
            case events.FatesTold(worker):
                self.pushes.fates.take_unapplied(worker)
            case _:
                assert_never(event)
        return self._ruling(steps, replies)

    def _ruling(self, steps: Steps, replies: Sequence[Reply]) -> Ruling:
        """What follows from an event, with all that came of it on the way."""
        pushes, news = self.pushes, self.news
        if not (news or pushes.applied or pushes.sick or pushes.refused_norm):
            return Ruling(steps, replies)
        ruling = Ruling(steps, replies, news, pushes.sick, pushes.applied, pushes.refused_norm)
        self.news, pushes.sick, pushes.applied, pushes.refused_norm = [], [], [], None
        return ruling

    @property
    def totals(self) -> Totals:
        """Counts of the run."""
        return self.pushes.totals

    @property
    def begun(self) -> bool:
        """Whether a worker has asked for a batch or made a step since the run started or was resumed."""
        return bool(self.readers.entered) or self.pushes.begun

    @property
    def parks(self) -> bool:
        """Whether a worker waits for leases."""
        return bool(self.readers.parked)

    @property
    def version(self) -> int:
        return self.machine.version

    def switch(self, mode: ModeSpec) -> Steps:
        """Go on in another mode, now or, where workers read the servers' memory, after this round."""
        self._next_mode = mode
        return self._steps([])

    @property
    def epoch(self) -> int:
        if self.book is None:
            return self.readers.streamed
        # It ends when the parameters are those of the next one.
        return self.book.epoch - self._asking

    @property
    def _asking(self) -> bool:
        return self.descent is not None and self.descent.asking

    def join(self, worker: int, incarnation: int) -> Steps:
        """A worker attached."""
        self.collectives.joined(worker, late=self.begun)
        self.roster.join(worker, incarnation)
        self.readers.join(worker)
        self.ballot.forget(worker)
        self.pushes.fates.begin(worker)
        if not self.groups.speaks(worker):
            return []
        self.roster.team.add(worker)
        self.pushes.forget(worker, self.book)
        if self.book:
            self.book.left(worker)
            self.book.joined(worker, self.groups.width(worker))
        return self._steps(self.machine.joined(worker, incarnation))

    def load(self, worker: int, incarnation: int, number: int) -> Steps:
        """A worker gave all servers an optimizer state. Said again, it changes nothing."""
        loads = self.roster.load(worker, incarnation, number)
        return [LoadStep(PushId(worker, incarnation, number))] if loads else []

    def leave(self, worker: int, incarnation: int, *, finished: bool) -> Steps:
        """A worker is gone, in order (`finished`) or not. Its unfinished leases go back."""
        if not self.roster.leave(worker, incarnation):
            return []  # a late notice of a worker that was replaced already
        self.ballot.forget(worker)
        self.collectives.forget(worker)
        self.readers.parked.pop(worker, None)
        if not self.groups.speaks(worker):
            return [LeaveStep(worker, incarnation)]
        if finished:
            self.readers.finish(worker, self.machine.clocks[worker])
        steps = self._steps(self.machine.left(worker))
        self.pushes.forget(worker, self.book)
        if self.book:
            self.book.left(worker)
        self._assigns.pop(worker, None)
        return [*steps, LeaveStep(worker, incarnation), *self._assigned()]

    def push(self, push: events.Push) -> Steps:
        """A gradient arrived whole.

        Raises:
            OutOfStep: for many rounds the workers have stepped different optimizers.
        """
        worker, readers = push.id.worker, self.readers
        if readers.finished and self.mode.bound == 0 and worker not in readers.entered:
            self._note_early_ends(worker)
        if (epoch := readers.looking.pop(worker, None)) is not None:
            self._note_early_ends(worker, epoch)
        if self.book is not None:
            push, doubt = believed(push, self.book)
            if doubt is not None and doubt not in self.news:
                self.news.append(doubt)
        push = self.pushes.arrive(push)
        self.collectives.stepped(worker)
        readers.parked.pop(worker, None)
        self.roster.fetches(worker, push.fetch)
        spent = self.book is not None and self.book.superseded(push.leases)
        made = self.machine.pushed(push.id, push.read_version, spent=spent, optimizer=push.optimizer)
        if isinstance(self.machine, Rounds):
            check_in_step(self.machine, self.mode)
        if self.book is not None and self.mode.deals_by_speed:
            self._resize(self.book, push, made)
        return [*self._steps(made), *self._assigned()]

    def _resize(self, book: LeaseBook, push: events.Push, made: Sequence[Instruction]) -> None:
        """Who was waited for gets smaller batches, and who waits itself larger ones again."""
        worker = push.id.worker
        admitted = {each.worker for each in made if isinstance(each, Admit)}
        if admitted - {worker}:
            book.resize(worker, push.leases, _SMALLER)
        elif worker not in admitted:
            book.resize(worker, push.leases, _LARGER)

    def take(
        self, worker: int, epoch: int, limit: int, *, wait: bool
    ) -> tuple[tuple[Lease, ...] | None, Steps]:
        """A worker wants leases. None means: no answer yet, it is parked until `granted` has one.

        Args:
            wait: it has used up all it had, so it may be parked; else an empty answer comes at once.
        """
        if not self.over(epoch):
            self.readers.entered[worker] = max(epoch, self.readers.entered.get(worker, 0))
            if wait:
                self._note_early_ends(worker, epoch)
            elif self.readers.finished:
                self.readers.looking[worker] = epoch
        leases = self._draw(worker, epoch, limit)
        if leases or self.over(epoch) or not wait:
            self._grant(worker, epoch, leases)
            return leases, []
        self.readers.parked[worker] = epoch
        if not self.groups.speaks(worker):
            return None, []
        return None, [*self._steps(self.machine.rested(worker)), *self._assigned()]

    def _grant(self, worker: int, epoch: int, leases: tuple[Lease, ...]) -> None:
        over = self.over(epoch)
        self.roster.grants[worker] = (self.roster.takes.get(worker, 0), leases, over)
        if over and not leases:
            self.readers.tell_over(worker, epoch)

    @property
    def left_behind(self) -> set[int]:
        """Workers in an epoch that is over without them, of which they have not heard, although others have
        ended their script: the run waits for these only."""
        return self._behind if self.readers.finished else set()

    @property
    def _behind(self) -> set[int]:
        """Workers in an epoch that ended without them, of which they have not heard."""
        return self.readers.behind(self.machine.members, self.epoch)

    def _draw(self, worker: int, epoch: int, limit: int) -> tuple[Lease, ...]:
        if self.book is None or self._asking or self._loops_end:
            return ()
        return self.groups.take(self.book, worker, epoch, limit)

    def assign(self, push: PushId) -> Steps:
        """A worker sent parameters to take over.

        Where workers read one memory, that must not change while another one computes on it, or computes
        what it will itself assign: it changes when all have assigned (the lowest rank's values count) or
        wait for something else. Groups in bsp do the same, and so does sandblaster, where what has been added
        up is of the old ones.
        """
        in_groups = self.mode.inner is not None and self.mode.inner.in_place
        if not (self.mode.in_place or in_groups or self.mode.by_epoch):
            return [AssignStep(push), AdmitStep(push.worker, self.version)]
        self._assigns[push.worker] = push
        return self._assigned()

    @property
    def missing_assigns(self) -> set[int]:
        """Whom those who wait in an assign wait for."""
        if not self._assigns:
            return set()
        return self.machine.active - self._assigns.keys() - self.pushes.workers

    def _assigned(self) -> Steps:
        if not self._assigns or self.missing_assigns:
            return []
        first, *rest = sorted(self._assigns.values())
        self._assigns.clear()
        if self.descent is not None:
            self.descent.restart()
            self._changed()
        drops = [DropStep(push) for push in rest]
        admits = [AdmitStep(push.worker, self.version) for push in (first, *rest)]
        return [*drops, AssignStep(first), *admits]

    def over(self, epoch: int) -> bool:
        """Whether an epoch has no more leases: it is finished for everybody, or the run ends early."""
        return self.epoch > epoch or self._loops_end

    @property
    def _loops_end(self) -> bool:
        """Whether no more leases are given because the run ends early. The root of a group tells its members
        at their next step, so that all of them end their loops there."""
        return self.ballot.reason is not None and not self.groups

    def verdicts(self) -> list[tuple[int, bool]]:
        """Answers to workers that asked whether the run ends early: (worker, whether it does)."""
        together = not isinstance(self.machine, Clocks)
        busy = self._busy | self.collectives.callers
        return self.ballot.settle(self.machine.members, busy, together=together)

    @property
    def awaited_votes(self) -> set[int]:
        """Workers that those who asked whether the run ends early wait for."""
        return self.ballot.awaited(self.machine.members, self._busy | self.collectives.callers)

    def answers(self) -> list[int]:
        """Workers that are answered what the others brought that call at the same place."""
        answered = self.collectives.settle(self.machine.members, self._busy | self.ballot.voters)
        left_out, self.collectives.left_out = self.collectives.left_out, []
        self.news += [
            f"paceline.{place} was answered without worker:{worker}, which waits for something else (a step "
            "of the others, an epoch's end, another call). Call it on every worker at the same place, best "
            "between two epochs."
            for place, worker in left_out
        ]
        return answered

    @property
    def awaited_callers(self) -> set[int]:
        """Workers that those who wait in a collective wait for."""
        return self.collectives.awaited(self.machine.members, self._busy | self.ballot.voters)

    @property
    def _busy(self) -> set[int]:
        """Workers that wait for a round, for leases or for an assign."""
        return {*self.readers.parked, *self.machine.waiting, *self._assigns}

    def granted(self, limit: int) -> tuple[list[LeaseGrant], Steps]:
        """Answers for parked workers that are possible now: (worker, leases, epoch over), and steps."""
        readers = self.readers
        if not readers.parked or self._asking:
            return [], []
        # Where others may do a slow worker's last leases, it would fall behind further and further.
        waited_for = self._behind if self.mode.copies == "slow" else self._behind & readers.late
        if self._loops_end or self._steps_may_follow:
            pass
        elif self.book and not waited_for:
            # Who waits for a later epoch left its loop early; who waits in this one may get more of it.
            over = self.book.turn_if_over({w for w, e in readers.parked.items() if e > self.book.epoch})
            if over and self.descent is not None and (steps := self.descent.evaluate()):
                if not self.descent.asking:
                    self._changed()
                return [], steps
        elif self.book is None and set(readers.parked) >= self.machine.members:
            # Of a stream only its readers know where it ends; some may have left an epoch early.
            readers.streamed = max(readers.streamed, min(readers.parked.values()) + 1)
        answers: list[LeaseGrant] = []
        instructions: list[Instruction] = []
        for worker, epoch in sorted(readers.parked.items()):
            leases = self._draw(worker, epoch, limit)
            if leases or self.over(epoch):
                answers.append(LeaseGrant(worker, leases, self.over(epoch)))
        for worker, leases, _ in answers:
            self._grant(worker, readers.parked.pop(worker), leases)
            if self.groups.speaks(worker):
                instructions += self.machine.woke(worker)
        return answers, self._steps(instructions)

    @property
    def _steps_may_follow(self) -> bool:
        """Whether a worker may yet step another optimizer with samples that are accounted for: the epoch's
        last parameters are known when no worker computes any more."""
        return self.several_optimizers and isinstance(self.machine, Rounds) and bool(self.machine.active)

    def answered(self, parts: Sequence[Sequence[Answer]]) -> Steps:
        """All servers have answered an `ask`."""
        assert self.descent is not None
        steps = self.descent.answered(parts)
        self._changed()
        return steps

    def _changed(self) -> None:
        assert isinstance(self.machine, WholeEpochs)
        self.machine.changed()
        self._check_limit()

    def _check_limit(self) -> None:
        if self._max_updates is not None and self.version >= self._max_updates:
            self.ballot.stop(f"it made {self._max_updates:,} updates (--max-updates)")
        elif self._max_samples is not None and self.totals.samples >= self._max_samples:
            self.ballot.stop(f"it trained on {self._max_samples:,} samples (--max-samples)")

    def carry(self, worker: int, leases: Sequence[int]) -> None:
        """A worker has read these, and the step that covers them comes after the epoch's end."""
        if self.descent is not None:  # its parameters will be other ones then
            self.give_back(worker, leases)
        elif self.book and self.groups.speaks(worker):
            self.book.carry(worker, leases)

    def give_back(self, worker: int, leases: Sequence[int]) -> None:
        """A worker will not use these leases."""
        if self.book and leases and self.groups.speaks(worker):
            self.groups.give_back(self.book, worker, leases)

    def refuse(self, worker: int, leases: Sequence[int]) -> None:
        """A step that had these was not made: it was not finite. Its worker goes on with the next."""
        self.totals.refused += 1
        if self.book:
            self.book.finish(worker, leases, refused=True)

    def skip(self, worker: int, leases: Sequence[int], samples: int) -> None:
        """A worker's script read these leases, and samples without a lease, and made no step with them."""
        if self.groups.speaks(worker):
            self.totals.skipped += samples + (self.book.skip(worker, leases) if self.book else 0)

    def snapshot(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold of the lead, as JSON."""
        return {
            "mode": str(self.mode),
            "machine": self.machine.snapshot(),
            "leases": self.book.snapshot() if self.book else None,
            "descent": self.descent.snapshot() if self.descent else None,
            "streamed": self.readers.streamed,
            "orders": self._orders.snapshot(),
            "samples": self.totals.samples,
            "pushes": self.totals.pushes,
            "skipped": self.totals.skipped,
            "staleness": {str(k): v for k, v in self.totals.staleness.items()},
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a checkpoint; the book must have been made already."""
        self.machine.restore(snapshot["machine"])
        if self.book and snapshot["leases"]:
            self.book.restore(snapshot["leases"])
        if self.descent and snapshot.get("descent"):
            self.descent.restore(snapshot["descent"])
        self._scheduled = self.version
        self.readers.streamed = snapshot["streamed"]
        self._orders.restore(snapshot.get("orders", {}))
        self.totals.samples = snapshot["samples"]
        self.totals.pushes = snapshot["pushes"]
        self.totals.skipped = snapshot.get("skipped", 0)
        self.totals.staleness = Counter({int(k): v for k, v in snapshot["staleness"].items()})

    def state(self) -> DeciderState:
        """All that it knows. (Its checkpoint leaves out who is there, and what is under way.) It is shared:
        encode it before the next event."""
        assert self.descent is None and not self.groups, "neither has replicas"
        return DeciderState(
            mode=str(self.mode),
            machine=self.machine.state(),
            book=self.book.state() if self.book else None,
            several_optimizers=self.several_optimizers,
            ballot=self.ballot,
            collectives=self.collectives,
            pushes=self.pushes.state(),
            roster=self.roster,
            readers=self.readers,
            orders=self._orders,
            assigns=self._assigns,
            scheduled=self._scheduled,
            next_mode=None if self._next_mode is None else str(self._next_mode),
        )

    def load_state(self, state: DeciderState) -> None:
        """Know all that another decider of the same run knows, and nothing else."""
        self.mode = parse_mode(state.mode)
        self.machine = self.mode.machine()
        self.machine.load_state(state.machine)
        self.book = None if state.book is None else LeaseBook.from_state(state.book)
        self.several_optimizers = state.several_optimizers
        self.ballot = state.ballot
        self.collectives = state.collectives
        self.pushes.load_state(state.pushes)
        self.roster = state.roster
        self.readers = state.readers
        self._orders = state.orders
        self._assigns = state.assigns
        self._scheduled = state.scheduled
        self._next_mode = None if state.next_mode is None else parse_mode(state.next_mode)

    def _note_early_ends(self, worker: int, epoch: int | None = None) -> None:
        if self.ballot.reason is None and self.readers.finished:
            self.news += self.readers.note_early_ends(worker, self.machine.clocks, epoch)

    def _steps(self, instructions: Sequence[Instruction]) -> Steps:
        """What the servers do about the machine's instructions, and about a change of mode that is due."""
        steps = self._translated(instructions)
        self._check_limit()
        if due := self._schedule.due(self.version, since=self._scheduled):
            self._scheduled = self.version
            self._next_mode = due
        if self._next_mode is None:
            return steps
        applied = any(isinstance(instruction, Apply) for instruction in instructions)
        if self.mode.in_place and self.machine.active and not applied:
            return steps
        mode, self._next_mode = self._next_mode, None
        if mode == self.mode:
            return steps
        self.machine, more = self.machine.switch(mode)
        if self.mode.copies == "slow":
            self.readers.late |= self._behind
        self.mode = mode
        if self.book:
            self.book.deal_by_round(mode.by_round, mode.copies)
        # Who is admitted from here on is told of the new mode.
        at = len(steps)
        while at and isinstance(steps[at - 1], AdmitStep):
            at -= 1
        return [*steps[:at], ModeStep(str(mode)), *steps[at:], *self._translated(more)]

    def _translated(self, instructions: Sequence[Instruction]) -> Steps:
        if not instructions:
            return []
        terms = Terms(self.mode, self.version, self.book, self.descent, len(self.roster.team))
        return self.pushes.steps(instructions, terms, self.roster.keeping)
