"""The brain of server 0: mode machine, lease book, and the run's one order of instructions.

Events in (`events.py`), steps (`steps.py`) and replies to workers out. Server 0 executes the steps and
forwards them, in order, to the other servers.

No sockets, no torch, no clock: tests drive it directly.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, assert_never

from paceline.core.ballot import Ballot
from paceline.core.collective_calls import CollectiveCalls
from paceline.core.descent import Descent
from paceline.core.events import (
    Answers,
    Assign,
    Call,
    Carry,
    Count,
    Dismiss,
    DrawOrder,
    Event,
    GiveBack,
    Granted,
    Heard,
    Join,
    Leave,
    Load,
    Push,
    Refuse,
    Skip,
    Spoiled,
    StopEarly,
    Switch,
    Take,
    Verdicts,
    Vote,
)
from paceline.core.fates import Fates
from paceline.core.leases import Lease, LeaseBook
from paceline.core.modes import (
    Admit,
    Apply,
    Clocks,
    Drop,
    Hold,
    Instruction,
    ModeSpec,
    PushId,
    Rounds,
    Schedule,
    WholeEpochs,
    parse_mode,
)
from paceline.core.modes.lbfgs import Answer, Lbfgs
from paceline.core.norms import NormBound
from paceline.core.rows import Rows
from paceline.core.staleness import RecentUpdates
from paceline.core.steps import (
    AddStep,
    AdmitStep,
    ApplyStep,
    AssignStep,
    DropStep,
    HoldStep,
    LeaveStep,
    LoadStep,
    ModeStep,
    ReduceStep,
    Step,
    Steps,
    WeightedPush,
)
from paceline.exceptions import PacelineError, PlanError

__all__ = ["Applied", "CallAnswer", "Lead", "LeaseGrant", "OutOfStep", "Reply", "Ruling", "Totals", "Verdict"]

_SMALLER, _LARGER = 0.8, 1.1
"""How the batches of a worker change whom others wait for, or who waits: quickly down, and carefully up."""

OUT_OF_STEP = 256
"""Rounds in a row in which workers stepped different optimizers: they do not run the same loop."""

QUARANTINE = 5
"""So many pushes in a row that are not finite, while others' are: the worker is replaced."""
_WITH_OTHERS, _OF_LAST = 2, 10
"""Another worker of whose last pushes so many were not finite either: it is the model's fault, not theirs."""


class OutOfStep(PacelineError):
    """In a mode with rounds, workers step the run's optimizers in different orders."""


class LeaseGrant(NamedTuple):
    """The answer to a worker that asked for leases."""

    worker: int
    leases: tuple[Lease, ...]
    over: bool
    """Whether there are no more of its epoch."""


class Verdict(NamedTuple):
    """The answer to a worker that asked whether the run ends early."""

    worker: int
    stop: bool


class CallAnswer(NamedTuple):
    """A worker that called a collective is answered."""

    worker: int


Reply = LeaseGrant | Verdict | CallAnswer


class Ruling(NamedTuple):
    """All that follows from an event: steps of the order, then replies to workers."""

    steps: Steps
    replies: Sequence[Reply] = ()


class Applied(NamedTuple):
    """The record kept of every applied push."""

    version: int
    push: Push
    staleness: int
    """Versions that its optimizer's parameters gained since its worker read them."""


@dataclass
class Totals:
    """Counts of a run."""

    samples: int = 0
    pushes: int = 0
    dropped: int = 0
    dropped_of: Counter[int] = field(default_factory=Counter)
    """The same by worker."""
    refused: int = 0
    skipped: int = 0
    """Samples that scripts read and made no step with."""
    staleness: Counter[int] = field(default_factory=Counter)

    def drop(self, worker: int) -> None:
        """A push of this worker is not applied."""
        self.dropped += 1
        self.dropped_of[worker] += 1


class Lead:
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
        self._schedule = schedule or Schedule(mode)
        self._scheduled = 0
        self._next_mode: ModeSpec | None = None
        self.machine = mode.machine()
        self.book: LeaseBook | None = None
        self.descent = Descent(Lbfgs(history=mode.history)) if mode.by_epoch else None
        """Sandblaster's minimisation: whoever knows the script's settings puts another one here."""
        self.ballot = Ballot()
        """Whether the run ends early."""
        self.collectives = CollectiveCalls()
        """What workers give each other."""
        self.several_optimizers = False
        """Whether a batch may have several steps, of which the first accounts for its samples."""
        self._max_updates = max_updates
        self._max_samples = max_samples
        self.news: list[str] = []
        """What the user should read; to be cleared."""
        self.totals = Totals()
        self._updates = RecentUpdates()
        self.applied: list[Applied] = []
        """Records since the server last took them."""
        self.sick: list[int] = []
        """Workers whose gradients, and only theirs, are not finite again and again; to be cleared."""
        self._refusals: Counter[int] = Counter()
        """Pushes in a row that were not finite, by worker."""
        self._finite_lately: dict[int, deque[bool]] = {}
        """Of workers with pushes that were not finite: whether their last ones were."""
        self._applied_of: Counter[int] = Counter()
        self._spoiled: dict[int, tuple[int, int]] = {}
        """Pushes in a row in which servers found what their worker did not: how many, up to which push."""
        self._others_well: set[int] = set()
        """Workers with such pushes, since when another one had a finite push applied."""
        self._clip_norm = clip_norm
        self._norm_bound = norm_bound
        self._norms: dict[int, NormBound] = {}
        """What is usual in the pushes of each optimizer, if the run has a bound on norms."""
        self.refused_norm: tuple[float, float] | None = None
        """The norm of the last push, if it was refused for that, and the usual one."""
        self._left_out: set[PushId] = set()
        """Pushes that are not applied though workers and servers think them sound: their norm is absurd, or
        somebody else was first with their samples."""
        self.fates = Fates()
        self._pushes: dict[PushId, Push] = {}
        self._keeping: set[int] = set()
        """Workers whose last push wanted no parameters back."""
        self._held: set[PushId] = set()
        self._parked: dict[int, int] = {}
        self._streamed = 0
        self._assigns: dict[int, PushId] = {}
        # Clock and last epoch of those whose script ended in order; the epochs of the others.
        self._finished: dict[int, tuple[int, int]] = {}
        self._noted: set[int] = set()
        """Those of them of whose end `news` has told."""
        self._entered: dict[int, int] = {}
        self._looking: dict[int, int] = {}
        """Workers that have taken leases of an epoch after others ended their script, and made no step since:
        a script may look at a batch when its training is over."""
        self._told_over: dict[int, int] = {}
        self._orders: dict[int, tuple[str, int]] = {}
        """Of the present epoch and later ones: the order's fingerprint, and the worker that drew it first."""
        self._late: set[int] = set()
        """Workers that were behind when the mode changed."""
        self._incarnations: dict[int, int] = {}
        self._team: set[int] = set()
        """Workers (of groups: the roots) that the run trains with: also those that have ended their script or
        are being replaced, but not those that were told to leave. EASGD and ConSGD scale by their number."""
        self._loads: dict[int, int] = {}
        """The number of each worker's last optimizer state that is in the order."""
        self.requests: dict[int, int] = {}
        """The number of each worker's last request, where requests are numbered."""
        self.takes: dict[int, int] = {}
        self.grants: dict[int, tuple[int, tuple[Lease, ...], bool]] = {}
        """Of each worker's last request for leases: its number, and what was answered to which."""
        # Workers in groups: the root of each stands for it in the machine and in the book.
        self._rows = {worker: rows for rows in map(Rows, groups) for worker in rows.members}

    def decide(self, event: Event) -> Ruling:
        """Let this event happen. Another decider that is told the same events knows and decides the same.

        Raises:
            OutOfStep: for many rounds the workers have stepped different optimizers.
            PlanError: workers draw different orders of an epoch's samples.
        """
        steps: Steps = []
        match event:
            case Push():
                steps = self.push(event)
            case Take(worker, epoch, limit, wait, number):
                self.takes[worker] = number
                leases, steps = self.take(worker, epoch, limit, wait=wait)
                if leases is not None:
                    return Ruling(steps, (LeaseGrant(worker, leases, self.over(epoch)),))
            case Granted(limit):
                grants, steps = self.granted(limit)
                return Ruling(steps, grants)
            case Heard(worker, number):
                self.requests[worker] = number
            case Join(worker, incarnation):
                steps = self.join(worker, incarnation)
            case Leave(worker, incarnation, finished):
                steps = self.leave(worker, incarnation, finished=finished)
            case Dismiss(worker):
                self.retire(worker)
            case Assign(push):
                steps = self.assign(push)
            case Load(worker, incarnation, number):
                steps = self.load(worker, incarnation, number)
            case Switch(mode):
                steps = self.switch(parse_mode(mode))
            case Vote(worker, number, who, wants):
                self.ballot.vote(worker, number, who, wants)
            case Verdicts():
                return Ruling([], [Verdict(worker, stop) for worker, stop in self.verdicts()])
            case StopEarly(reason):
                self.ballot.stop(reason)
            case Call(worker, number, place, value):
                self.collectives.call(worker, number, place, value)
            case Answers():
                return Ruling([], [CallAnswer(worker) for worker in self.answers()])
            case DrawOrder(worker, epoch, fingerprint, sampler):
                self.order(worker, epoch, fingerprint, sampler)
            case Count(samples):
                self.count(samples)
            case GiveBack(worker, ids):
                self.give_back(worker, ids)
            case Carry(worker, ids):
                self.carry(worker, ids)
            case Refuse(worker, ids):
                self.refuse(worker, ids)
            case Skip(worker, ids, samples):
                self.skip(worker, ids, samples)
            case Spoiled(worker):
                self.spoiled(worker)
            case _:
                assert_never(event)
        return Ruling(steps)

    def incarnation_of(self, worker: int) -> int:
        """Of a member."""
        return self._incarnations[worker]

    @property
    def begun(self) -> bool:
        """Whether a worker has asked for a batch or made a step since the run started or was resumed."""
        return bool(self._entered or self._pushes or self._applied_of or self._refusals)

    @property
    def holds(self) -> bool:
        """Whether servers hold pushes for an update to come."""
        return bool(self._held)

    @property
    def parks(self) -> bool:
        """Whether somebody waits for leases."""
        return bool(self._parked)

    def speaks(self, worker: int) -> bool:
        """Whether it stands for itself, or for its group, in the mode and in the leases."""
        return self.root_of(worker) == worker

    def root_of(self, worker: int) -> int:
        """Who speaks for a worker: the root of its group, or itself."""
        return self._rows[worker].root if worker in self._rows else worker

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
            return self._streamed
        # It ends when the parameters are those of the next one.
        return self.book.epoch - self._asking

    @property
    def _asking(self) -> bool:
        return self.descent is not None and self.descent.asking

    def join(self, worker: int, incarnation: int) -> Steps:
        """A worker attached."""
        self.collectives.joined(worker, late=self.begun)
        self._incarnations[worker] = incarnation
        self._parked.pop(worker, None)
        self._finished.pop(worker, None)
        self._noted.discard(worker)
        self._entered.pop(worker, None)
        self._looking.pop(worker, None)
        self.ballot.forget(worker)
        for numbers in (self.requests, self.takes, self.grants, self._told_over):
            numbers.pop(worker, None)
        self._keeping.discard(worker)
        self._late.discard(worker)
        self.fates.begin(worker)
        self._loads.pop(worker, None)
        if not self.speaks(worker):
            return []
        self._team.add(worker)
        self._forget_pushes(worker)
        if self.book:
            self.book.left(worker)
            self.book.joined(worker, self._rows[worker].width if worker in self._rows else 1)
        return self._steps(self.machine.joined(worker, incarnation))

    def retire(self, worker: int) -> None:
        """A worker was told to leave: the run goes on with fewer."""
        self._team.discard(worker)

    def load(self, worker: int, incarnation: int, number: int) -> Steps:
        """A worker gave all servers an optimizer state: they take it over here in the order. Said again, it
        changes nothing."""
        if self._incarnations.get(worker) != incarnation or self._loads.get(worker, -1) >= number:
            return []
        self._loads[worker] = number
        return [LoadStep(PushId(worker, incarnation, number))]

    def leave(self, worker: int, incarnation: int, *, finished: bool) -> Steps:
        """A worker is gone, in order (`finished`) or not. Its unfinished leases go back."""
        if self._incarnations.get(worker) != incarnation:
            return []  # a late notice of a worker that was replaced already
        del self._incarnations[worker]
        self.ballot.forget(worker)
        self.collectives.forget(worker)
        if not self.speaks(worker):
            self._parked.pop(worker, None)
            return [LeaveStep(worker, incarnation)]
        if finished:
            self._finished[worker] = (self.machine.clocks[worker], self._entered.get(worker, -1))
        self._parked.pop(worker, None)
        steps = self._steps(self.machine.left(worker))
        self._forget_pushes(worker)
        if self.book:
            self.book.left(worker)
        self._assigns.pop(worker, None)
        return [*steps, LeaveStep(worker, incarnation), *self._assigned()]

    def _forget_pushes(self, worker: int) -> None:
        """A worker is gone. What the servers hold of it will be applied all the same."""
        for push in [p for p in self._pushes if p.worker == worker]:
            if push not in self._held:
                del self._pushes[push]
                self._left_out.discard(push)
            elif self.book:
                self.book.finish(worker, self._pushes[push].leases, refused=self._pushes[push].void)

    def _judged(self, push: Push) -> Push:
        """The push, void if its norm is absurd."""
        self.refused_norm = None
        if self._norm_bound is None or push.norm is None or push.void:
            return push
        norms = self._norms.setdefault(push.optimizer, NormBound(self._norm_bound))
        usual = norms.usual
        if not norms.is_absurd(push.norm):
            return push
        self._left_out.add(push.id)
        self.refused_norm = (push.norm, usual or 0.0)
        return push._replace(void=True)

    def push(self, push: Push) -> Steps:
        """A gradient arrived whole.

        Raises:
            OutOfStep: for many rounds the workers have stepped different optimizers.
        """
        if self._finished and self.mode.bound == 0 and push.id.worker not in self._entered:
            self._note_early_end(push.id.worker)
        if (epoch := self._looking.pop(push.id.worker, None)) is not None:
            self._note_early_end(push.id.worker, epoch)
        push = self._judged(push)
        self.collectives.stepped(push.id.worker)
        self.fates.arrived(push.id.worker, push.id.sequence)
        self._parked.pop(push.id.worker, None)
        self._pushes[push.id] = push
        (self._keeping.discard if push.fetch else self._keeping.add)(push.id.worker)
        spent = self.book is not None and self.book.superseded(push.leases)
        made = self.machine.pushed(push.id, push.read_version, spent=spent, optimizer=push.optimizer)
        if isinstance(self.machine, Rounds) and self.machine.mixed >= OUT_OF_STEP:
            raise OutOfStep(self._words_on_mix(self.machine))
        if self.book is not None and self.mode.batches == "speed":
            self._resize(self.book, push, made)
        return [*self._steps(made), *self._assigned()]

    def _words_on_mix(self, machine: Rounds) -> str:
        clocks = machine.clocks
        who = ", ".join(
            f"worker:{worker} steps optimizer {optimizer} (step {clocks.get(worker, 0)})"
            for worker, optimizer in sorted(machine.last_mix.items())
        )
        return (
            f"for {machine.mixed} rounds the workers have stepped different optimizers at the same time: "
            f"{who}. In mode {self.mode} all workers must step the optimizers in the same order: look for "
            "what in the loop depends on the rank or on a worker's own data, or use mode asp."
        )

    def _resize(self, book: LeaseBook, push: Push, made: Sequence[Instruction]) -> None:
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
            self._entered[worker] = max(epoch, self._entered.get(worker, 0))
            if wait:
                self._note_early_end(worker, epoch)
            elif self._finished:
                self._looking[worker] = epoch
        leases = self._draw(worker, epoch, limit)
        if leases or self.over(epoch) or not wait:
            self._grant(worker, epoch, leases)
            return leases, []
        self._parked[worker] = epoch
        if not self.speaks(worker):
            return None, []
        return None, [*self._steps(self.machine.rested(worker)), *self._assigned()]

    def _grant(self, worker: int, epoch: int, leases: tuple[Lease, ...]) -> None:
        over = self.over(epoch)
        self.grants[worker] = (self.takes.get(worker, 0), leases, over)
        if over and not leases:
            self._told_over[worker] = epoch
            self._late.discard(worker)

    @property
    def left_behind(self) -> set[int]:
        """Workers in an epoch that is over without them, of which they have not heard, although others have
        ended their script: the run waits for these only."""
        return self._behind if self._finished else set()

    @property
    def _behind(self) -> set[int]:
        """Workers in an epoch that ended without them, of which they have not heard."""
        entered = {worker: self._entered.get(worker, -1) for worker in self.machine.members}
        return {w for w, e in entered.items() if self._told_over.get(w, -1) < e < self.epoch}

    def _draw(self, worker: int, epoch: int, limit: int) -> tuple[Lease, ...]:
        if self.book is None or self._asking or self._loops_end:
            return ()
        if worker in self._rows:
            return self._rows[worker].take(self.book, worker, epoch, limit)
        return self.book.take(worker, epoch, limit)

    def assign(self, push: PushId) -> Steps:
        """A worker sent parameters to take over.

        Where workers read one memory, that must not change while another one computes on it, or computes
        what it will itself assign: it changes when all have assigned (the lowest rank's values count) or
        wait for something else. Groups in bsp do the same, and so does sandblaster, where what has been added
        up is of the old ones.
        """
        together = self.mode.in_place or (self.mode.inner is not None and self.mode.inner.in_place)
        together = together or self.mode.by_epoch
        if not together:
            return [AssignStep(push), AdmitStep(push.worker, self.version)]
        self._assigns[push.worker] = push
        return self._assigned()

    @property
    def missing_assigns(self) -> set[int]:
        """Whom those who wait in an assign wait for."""
        if not self._assigns:
            return set()
        return self.machine.active - self._assigns.keys() - {push.worker for push in self._pushes}

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
        return self.ballot.reason is not None and not self._rows

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
        return {*self._parked, *self.machine.waiting, *self._assigns}

    def granted(self, limit: int) -> tuple[list[LeaseGrant], Steps]:
        """Answers for parked workers that are possible now: (worker, leases, epoch over), and steps."""
        if not self._parked or self._asking:
            return [], []
        # Where others may do a slow worker's last leases, it would fall behind further and further.
        waited_for = self._behind if self.mode.copies == "slow" else self._behind & self._late
        if self._loops_end or self._steps_may_follow:
            pass
        elif self.book and not waited_for:
            # Who waits for a later epoch left its loop early; who waits in this one may get more of it.
            over = self.book.turn_if_over({w for w, e in self._parked.items() if e > self.book.epoch})
            if over and self.descent is not None and (steps := self.descent.evaluate()):
                if not self.descent.asking:
                    self._changed()
                return [], steps
        elif self.book is None and set(self._parked) >= self.machine.members:
            # Of a stream only its readers know where it ends; some may have left an epoch early.
            self._streamed = max(self._streamed, min(self._parked.values()) + 1)
        answers: list[LeaseGrant] = []
        instructions: list[Instruction] = []
        for worker, epoch in sorted(self._parked.items()):
            leases = self._draw(worker, epoch, limit)
            if leases or self.over(epoch):
                answers.append(LeaseGrant(worker, leases, self.over(epoch)))
        for worker, leases, _ in answers:
            self._grant(worker, self._parked.pop(worker), leases)
            if self.speaks(worker):
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
        elif self.book and self.speaks(worker):
            self.book.carry(worker, leases)

    def give_back(self, worker: int, leases: Sequence[int]) -> None:
        """A worker will not use these leases."""
        if not self.book or not leases or not self.speaks(worker):
            return
        if worker in self._rows:
            self._rows[worker].give_back(self.book, leases)
        else:
            self.book.give_back(worker, leases)

    def refuse(self, worker: int, leases: Sequence[int]) -> None:
        """A step that had these was not made: it was not finite. Its worker goes on with the next."""
        self.totals.refused += 1
        if self.book:
            self.book.finish(worker, leases, refused=True)

    def order(self, worker: int, epoch: int, fingerprint: str, sampler: str) -> None:
        """A worker has drawn the order of an epoch from the script's sampler, and asks for leases next.

        Raises:
            PlanError: another worker, or the run before it was resumed, has drawn another order.
        """
        if self.over(epoch):
            return
        self._orders = {e: drawn for e, drawn in self._orders.items() if not self.over(e)}
        known, first = self._orders.setdefault(epoch, (fingerprint, worker))
        if known != fingerprint:
            other = f"worker:{first} did" if first >= 0 else "the run did before it was resumed"
            raise PlanError(
                f"worker:{worker} draws another order of the samples of epoch {epoch + 1} than {other}, from "
                f"the DataLoader's sampler ({sampler}): samples would be repeated and lost. All workers must "
                "draw the same, also one that is replaced or resumed. Give the sampler a method "
                "set_epoch(epoch) from which its order follows, or let it draw from a torch.Generator, numpy "
                "Generator or random.Random that is an attribute of it: Paceline seeds those for every epoch."
            )

    def count(self, samples: int) -> None:
        """A script without a prepared loader has trained on so many samples."""
        self.totals.samples += samples

    def skip(self, worker: int, leases: Sequence[int], samples: int) -> None:
        """A worker's script read these leases, and samples without a lease, and made no step with them."""
        if self.speaks(worker):
            self.totals.skipped += samples + (self.book.skip(worker, leases) if self.book else 0)

    def snapshot(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold of the lead, as JSON."""
        return {
            "mode": str(self.mode),
            "machine": self.machine.snapshot(),
            "leases": self.book.snapshot() if self.book else None,
            "descent": self.descent.snapshot() if self.descent else None,
            "streamed": self._streamed,
            "orders": {str(epoch): fingerprint for epoch, (fingerprint, _) in self._orders.items()},
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
        self._streamed = snapshot["streamed"]
        self._orders = {int(e): (str(drawn), -1) for e, drawn in snapshot.get("orders", {}).items()}
        self.totals.samples = snapshot["samples"]
        self.totals.pushes = snapshot["pushes"]
        self.totals.skipped = snapshot.get("skipped", 0)
        self.totals.staleness = Counter({int(k): v for k, v in snapshot["staleness"].items()})

    def _note_early_end(self, worker: int, epoch: int | None = None) -> None:
        """Say once that a script ended while another worker goes on with an epoch (or, without a loader, a
        step) that it never began. Within its last epoch it may have left its loop early: the others do the
        rest of that one, and perhaps they end there, too."""
        if self.ballot.reason is not None:
            return
        for who, (clock, last) in sorted(self._finished.items()):
            if who in self._noted or (epoch is not None and last >= epoch):
                continue
            self._noted.add(who)
            done = f"{clock} step{'s' * (clock != 1)}" + (f", in epoch {last + 1}," if last >= 0 else "")
            step = f"step {self.machine.clocks.get(worker, 0) + 1}"
            where = step if epoch is None else f"epoch {epoch + 1}, {step}"
            self.news.append(
                f"worker:{who} ended its script after {done} while worker:{worker} goes on with {where}. The "
                "other workers train on without it, and all samples are theirs. If all workers are to end "
                "together, call paceline.should_stop(condition) on every worker."
            )

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
            self._late |= self._behind
        self.mode = mode
        if self.book:
            self.book.deal_by_round(mode.by_round, mode.copies)
        # Who is admitted from here on is told of the new mode.
        at = len(steps)
        while at and isinstance(steps[at - 1], AdmitStep):
            at -= 1
        return [*steps[:at], ModeStep(str(mode)), *steps[at:], *self._translated(more)]

    def _translated(self, instructions: Sequence[Instruction]) -> Steps:
        steps: Steps = []
        version = self.version - [type(instruction) for instruction in instructions].count(Apply)
        for instruction in instructions:
            match instruction:
                case Apply(pushes):
                    steps.append(self._apply(pushes, version))
                    if self._left_out:
                        steps += [DropStep(push) for push in pushes if push in self._left_out]
                        self._left_out.difference_update(pushes)
                    version += 1
                case Admit(worker):
                    keep: Literal["keep"] | None = "keep" if worker in self._keeping else None
                    steps.append(AdmitStep(worker, self.machine.version, keep))
                case Hold(push) if self.descent is not None:
                    steps.append(self._add(self.descent, push))
                case Hold(push):
                    self._held.add(push)
                    steps.append(HoldStep(push))
                case Drop(push):
                    dropped = self._pushes.pop(push, None)
                    self._held.discard(push)
                    self._left_out.discard(push)
                    self.totals.drop(push.worker)
                    self.fates.decided(push.worker, push.sequence, applied=False)
                    if dropped and self.book and push.worker in self.book.members:
                        self.book.give_back(push.worker, dropped.leases)
                    steps.append(DropStep(push))
                case _:
                    assert_never(instruction)
        return steps

    def _apply(self, ids: Sequence[PushId], before: int) -> Step:
        """One update, of the version `before` it."""
        pushes = [self._pushes.pop(p) for p in ids]
        if self._held:
            self._held.difference_update(ids)
        known = all(p.weighs > 0 for p in pushes if not p.void)
        parts = []
        for p in pushes:
            late = self._too_late(p)
            self.fates.decided(p.id.worker, p.id.sequence, applied=not (late or p.void))
            if late:
                continue
            if self.book:
                self.book.finish(p.id.worker, p.leases, refused=p.void)
            if p.void:
                self._refused(p.id.worker)
                continue
            staleness = self._record(p, before)
            weight = p.weighs if known else 1
            scale = self.mode.scale(staleness, len(self._team))
            if self.book and self.mode.batches == "speed" and p.weighs:
                scale *= self.book.part(p.id.worker, p.weighs)  # so that every sample counts the same
            parts.append(WeightedPush(*p.id, weight, scale))
        self._updates.made(before, {p.optimizer for p in pushes})
        update = tuple(parts)
        return ApplyStep(update) if self._clip_norm is None else ReduceStep(update, before)

    def _too_late(self, push: Push) -> bool:
        """Whether somebody else was first with these samples: a slow worker's last leases are out twice."""
        if self.book is None or not self.book.superseded(push.leases):
            return False
        self.totals.drop(push.id.worker)
        self._left_out.add(push.id)
        self.book.give_back(push.id.worker, push.leases)
        return True

    def _add(self, descent: Descent, push: PushId) -> Step:
        """The servers add a gradient to the epoch's sum, unless its samples are in it already: the last ones
        of an epoch are computed twice, and the first result counts."""
        p = self._pushes.pop(push)
        fresh = bool(p.leases) and self.book is not None and self.book.fresh(push.worker, p.leases)
        self.fates.decided(push.worker, push.sequence, applied=fresh and not p.void)
        if self.book is None or not fresh:
            self.totals.drop(push.worker)
            self.give_back(push.worker, p.leases)
            return DropStep(push)
        self.book.finish(push.worker, p.leases, refused=p.void)
        if p.void:
            self._refused(p.id.worker)
            self._left_out.discard(push)
            descent.spoil()
            return DropStep(push)
        self._record(p, self.version)
        descent.add(p.samples)
        return AddStep((WeightedPush(*push, p.samples, 1.0),))

    def _refused(self, worker: int) -> None:
        """A push was not finite or absurd. One worker's alone are its own fault, all workers' the model's."""
        self.totals.refused += 1
        self._refusals[worker] += 1
        self._finite_lately.setdefault(worker, deque(maxlen=_OF_LAST)).append(False)
        if self._refusals[worker] < QUARANTINE or worker not in self._others_well:
            return
        if not any(self._is_ill(other) for other in self._finite_lately if other != worker):
            self.sick.append(worker)
            self._recovered(worker)
            del self._finite_lately[worker]

    def _is_ill(self, worker: int) -> bool:
        """Whether several of a worker's last pushes were not finite."""
        return self._finite_lately[worker].count(False) >= _WITH_OTHERS

    def spoiled(self, worker: int) -> None:
        """The servers found NaN or Inf in a push that its worker thought finite, and left that part out."""
        self.totals.refused += 1
        count, last = self._spoiled.get(worker, (0, -1))
        at = self._applied_of[worker]
        count = count + 1 if at <= last + 1 else 1
        self._spoiled[worker] = (count, at)
        others = [n for other, (n, _) in self._spoiled.items() if other != worker]
        alone = max(others, default=0) < _WITH_OTHERS and self.machine.members - self._spoiled.keys()
        if count >= QUARANTINE and alone:
            self.sick.append(worker)
            del self._spoiled[worker]

    def _note_finite(self, worker: int) -> None:
        if (lately := self._finite_lately.get(worker)) is not None:
            lately.append(True)
            if all(lately):
                del self._finite_lately[worker]

    def _recovered(self, worker: int) -> None:
        del self._refusals[worker]
        self._others_well.discard(worker)

    def _record(self, push: Push, before: int) -> int:
        """Count a push that is in the update after version `before`; returns its staleness."""
        staleness = self._updates.staleness(push.read_version, before, push.optimizer)
        record = Applied(before, push, staleness)
        self.applied.append(record)
        self.totals.pushes += 1
        self.totals.samples += push.samples
        self._applied_of[push.id.worker] += 1
        if self._finite_lately:
            self._note_finite(push.id.worker)
        if self._refusals:
            self._recovered(push.id.worker)
            self._others_well.update(self._refusals)
        self.totals.staleness[staleness] += 1
        return staleness
