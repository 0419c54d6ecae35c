"""Pushes on their way, and what becomes of each: applied, held, dropped or refused.

Turns the mode machine's instructions into steps, finishes or returns the leases of every push in the same
breath, and keeps the run's counts.
"""

from collections.abc import Sequence
from typing import NamedTuple, assert_never

from paceline.core.descent import Descent
from paceline.core.events import Push
from paceline.core.fates import Fates
from paceline.core.health import Health
from paceline.core.leases import LeaseBook
from paceline.core.modes.machine import Admit, Apply, Drop, Hold, Instruction, PushId
from paceline.core.modes.mode_spec import ModeSpec
from paceline.core.norms import NormBounds
from paceline.core.staleness import RecentUpdates
from paceline.core.steps import (
    AddStep,
    AdmitStep,
    ApplyStep,
    DropStep,
    HoldStep,
    ReduceStep,
    Step,
    Steps,
    WeightedPush,
)
from paceline.core.totals import Applied, Totals

__all__ = ["Pushes", "PushesState", "Terms"]


class Terms(NamedTuple):
    """What decides, beside the push itself, how it counts."""

    mode: ModeSpec
    version: int
    """After the instructions."""
    book: LeaseBook | None
    descent: Descent | None
    team: int
    """Number of workers that the run trains with."""


class PushesState(NamedTuple):
    """All that is known of pushes, for a follower that begins here."""

    under_way: dict[PushId, Push]
    held: set[PushId]
    left_out: set[PushId]
    fates: Fates
    health: Health
    norms: NormBounds
    totals: Totals
    updates: RecentUpdates


class Pushes:
    """One owner.

    Args:
        clip_norm: bound on the norm of the averaged gradient: updates are in two halves.
        norm_bound: how many times the usual norm of a push is absurd.
    """

    def __init__(self, *, clip_norm: float | None, norm_bound: float | None) -> None:
        self.totals = Totals()
        self.fates = Fates()
        self.health = Health()
        self.applied: list[Applied] = []
        """Records of the last event; to be cleared."""
        self.sick: list[int] = []
        """Workers that are to be replaced, by the last event; to be cleared."""
        self.refused_norm: tuple[float, float] | None = None
        """The norm of the last push, if it was refused for that, and the usual one."""
        self._clip_norm = clip_norm
        self._norms = NormBounds(norm_bound)
        self._updates = RecentUpdates()
        self._under_way: dict[PushId, Push] = {}
        self._held: set[PushId] = set()
        self._left_out: set[PushId] = set()
        """Pushes that are not applied though workers and servers think them sound: their norm is absurd, or
        another worker was first with their samples."""

    @property
    def holds(self) -> bool:
        """Whether servers hold pushes for an update to come."""
        return bool(self._held)

    @property
    def begun(self) -> bool:
        """Whether a push has arrived since the run started or was resumed."""
        return bool(self._under_way) or self.health.begun

    @property
    def workers(self) -> set[int]:
        """Workers with a push under way."""
        return {push.worker for push in self._under_way}

    def arrive(self, push: Push) -> Push:
        """A push is here. Returns it, void if its norm is absurd."""
        self.refused_norm = None
        if not push.void and (usual := self._norms.absurd(push.optimizer, push.norm)) is not None:
            self._left_out.add(push.id)
            self.refused_norm = (push.norm or 0.0, usual)
            push = push._replace(void=True)
        self.fates.arrived(push.id.worker, push.id.sequence)
        self._under_way[push.id] = push
        return push

    def forget(self, worker: int, book: LeaseBook | None) -> None:
        """A worker is gone. What the servers hold of it will be applied all the same."""
        for push in [p for p in self._under_way if p.worker == worker]:
            if push not in self._held:
                del self._under_way[push]
                self._left_out.discard(push)
            elif book:
                known = self._under_way[push]
                book.finish(worker, known.leases, refused=known.void)

    def spoiled(self, worker: int, members: set[int]) -> None:
        """The servers found NaN or Inf in a push that its worker thought finite, and left that part out."""
        self.totals.refused += 1
        if self.health.push_spoiled(worker, members):
            self.sick.append(worker)

    def steps(self, instructions: Sequence[Instruction], terms: Terms, keeping: set[int]) -> Steps:
        """What the servers do about the machine's instructions.

        Args:
            keeping: workers that keep the parameters that they have.
        """
        steps: Steps = []
        version = terms.version - [type(instruction) for instruction in instructions].count(Apply)
        for instruction in instructions:
            match instruction:
                case Apply(pushes):
                    steps.append(self._apply(pushes, version, terms))
                    if self._left_out:
                        steps += [DropStep(push) for push in pushes if push in self._left_out]
                        self._left_out.difference_update(pushes)
                    version += 1
                case Admit(worker):
                    steps.append(AdmitStep(worker, terms.version, "keep" if worker in keeping else None))
                case Hold(push):
                    if terms.descent is not None:
                        steps.append(self._add(push, terms.descent, terms))
                    else:
                        self._held.add(push)
                        steps.append(HoldStep(push))
                case Drop(push):
                    self._drop(push, terms.book)
                    steps.append(DropStep(push))
                case _:
                    assert_never(instruction)
        return steps

    def state(self) -> PushesState:
        """All that it knows. It is shared: encode it before the next event."""
        return PushesState(
            under_way=self._under_way,
            held=self._held,
            left_out=self._left_out,
            fates=self.fates,
            health=self.health,
            norms=self._norms,
            totals=self.totals,
            updates=self._updates,
        )

    def load_state(self, state: PushesState) -> None:
        """The inverse of `state`."""
        self._under_way = state.under_way
        self._held = state.held
        self._left_out = state.left_out
        self.fates = state.fates
        self.health = state.health
        self._norms = state.norms
        self.totals = state.totals
        self._updates = state.updates

    def _drop(self, push: PushId, book: LeaseBook | None) -> None:
        dropped = self._under_way.pop(push, None)
        self._held.discard(push)
        self._left_out.discard(push)
        self.totals.drop(push.worker)
        self.fates.decided(push.worker, push.sequence, applied=False)
        if dropped and book and push.worker in book.members:
            book.give_back(push.worker, dropped.leases)

    def _apply(self, ids: Sequence[PushId], before: int, terms: Terms) -> Step:
        """One update, of the version `before` it."""
        mode, book = terms.mode, terms.book
        pushes = [self._under_way.pop(p) for p in ids]
        if self._held:
            self._held.difference_update(ids)
        known = all(p.weighs > 0 for p in pushes if not p.void)
        parts = []
        for p in pushes:
            late = self._too_late(p, book)
            self.fates.decided(p.id.worker, p.id.sequence, applied=not (late or p.void))
            if late:
                continue
            if book:
                book.finish(p.id.worker, p.leases, refused=p.void)
            if p.void:
                self._refuse(p.id.worker)
                continue
            staleness = self._record(p, before)
            weight = p.weighs if known else 1
            scale = mode.scale(staleness, terms.team)
            if book and mode.deals_by_speed and p.weighs:
                scale *= book.part(p.id.worker, p.weighs)  # so that every sample counts the same
            parts.append(WeightedPush(*p.id, weight, scale))
        self._updates.made(before, {p.optimizer for p in pushes})
        update = tuple(parts)
        return ApplyStep(update) if self._clip_norm is None else ReduceStep(update, before)

    def _too_late(self, push: Push, book: LeaseBook | None) -> bool:
        """Whether another worker was first with these samples: a slow worker's last leases are out twice."""
        if book is None or not book.superseded(push.leases):
            return False
        self.totals.drop(push.id.worker)
        self._left_out.add(push.id)
        book.give_back(push.id.worker, push.leases)
        return True

    def _add(self, push: PushId, descent: Descent, terms: Terms) -> Step:
        """The servers add a gradient to the epoch's sum, unless its samples are in it already: the last ones
        of an epoch are computed twice, and the first result counts."""
        p, book = self._under_way.pop(push), terms.book
        fresh = bool(p.leases) and book is not None and book.fresh(push.worker, p.leases)
        self.fates.decided(push.worker, push.sequence, applied=fresh and not p.void)
        if book is None or not fresh:
            self.totals.drop(push.worker)
            if book is not None:
                book.give_back(push.worker, p.leases)
            return DropStep(push)
        book.finish(push.worker, p.leases, refused=p.void)
        if p.void:
            self._refuse(p.id.worker)
            self._left_out.discard(push)
            descent.spoil()
            return DropStep(push)
        self._record(p, terms.version)
        descent.add(p.samples)
        return AddStep((WeightedPush(*push, p.samples, 1.0),))

    def _refuse(self, worker: int) -> None:
        self.totals.refused += 1
        if self.health.push_refused(worker):
            self.sick.append(worker)

    def _record(self, push: Push, before: int) -> int:
        """Count a push that is in the update after version `before`; returns its staleness."""
        staleness = self._updates.staleness(push.read_version, before, push.optimizer)
        self.applied.append(Applied(before, push, staleness))
        self.totals.pushes += 1
        self.totals.samples += push.samples
        self.health.push_applied(push.id.worker)
        self.totals.staleness[staleness] += 1
        return staleness
