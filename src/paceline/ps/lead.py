"""The brain of server 0: mode machine, lease book, and the run's one order of instructions.

What it returns is a list of *steps*, plain JSON, which server 0 executes and forwards, in order, to the
other servers. So all servers apply the same pushes in the same order, every checkpoint is a consistent
cut, and a lease is finished in the same breath as the update computed from it is applied.

No sockets, no torch, no clock: tests drive it directly.

Steps: ["apply", [[worker, incarnation, sequence, weight], …]]   ["reduce", […the same]]
       ["commit", scale]   ["admit", worker, version]   ["drop", worker, incarnation, sequence]
       ["assign", worker, incarnation, sequence]   ["left", worker, incarnation]
       ["checkpoint", version, directory]   (added by the server)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.data.leases import Lease, LeaseBook
from paceline.exceptions import PacelineError
from paceline.modes import Admit, Apply, Drop, Instruction, ModeSpec, PushId

__all__ = ["EarlyExit", "Lead", "Push", "Steps"]

Steps = list[list[Any]]


class EarlyExit(PacelineError):
    """A worker's script ended while the others go on."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """What the lead knows of a push. The gradient itself is the servers' business."""

    id: PushId
    read_version: int
    samples: int
    """How many samples it was computed from; 0 if unknown."""
    leases: tuple[int, ...]
    void: bool
    """The worker found NaN or Inf in it: it keeps its place in the order but is not applied."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The record kept of every applied push."""

    version: int
    push: Push

    @property
    def staleness(self) -> int:
        return self.version - self.push.read_version


@dataclass
class Totals:
    """Counts of a run."""

    samples: int = 0
    pushes: int = 0
    dropped: int = 0
    refused: int = 0
    staleness: Counter[int] = field(default_factory=Counter)


class Lead:
    """Turns what workers do into the run's order.

    Args:
        clip_norm: bound on the norm of the averaged gradient (bsp only).
    """

    def __init__(self, mode: ModeSpec, *, clip_norm: float | None = None) -> None:
        self.mode = mode
        self.machine = mode.machine()
        self.book: LeaseBook | None = None
        self.totals = Totals()
        self.applied: list[Applied] = []
        """Records since the server last took them."""
        self._clip_norm = clip_norm
        self._pushes: dict[PushId, Push] = {}
        self._parked: dict[int, int] = {}
        self._streamed = 0
        self._assigns: dict[int, PushId] = {}
        # Clock and last epoch of those whose script ended in order; the epochs of the others.
        self._finished: dict[int, tuple[int, int]] = {}
        self._entered: dict[int, int] = {}
        self._incarnations: dict[int, int] = {}

    @property
    def version(self) -> int:
        return self.machine.version

    @property
    def epoch(self) -> int:
        return self.book.epoch if self.book else self._streamed

    def join(self, worker: int, incarnation: int) -> Steps:
        """A worker attached."""
        self._incarnations[worker] = incarnation
        self._parked.pop(worker, None)
        self._finished.pop(worker, None)
        self._entered.pop(worker, None)
        if self.book:
            self.book.left(worker)
            self.book.joined(worker)
        return self._steps(self.machine.joined(worker, incarnation))

    def leave(self, worker: int, incarnation: int, *, finished: bool) -> Steps:
        """A worker is gone, in order (`finished`) or not. Its unfinished leases go back."""
        if self._incarnations.get(worker) != incarnation:
            return []  # a late notice of a worker that was replaced already
        del self._incarnations[worker]
        if finished:
            self._finished[worker] = (self.machine.clocks[worker], self._entered.get(worker, -1))
        self._parked.pop(worker, None)
        steps = self._steps(self.machine.left(worker))
        for push in [p for p in self._pushes if p.worker == worker]:
            del self._pushes[push]
        if self.book:
            self.book.left(worker)
        self._assigns.pop(worker, None)
        return [*steps, ["left", worker, incarnation], *self._assigned()]

    def push(self, push: Push) -> Steps:
        """A gradient arrived whole.

        Raises:
            EarlyExit: in a mode that waits for everybody, a worker's script ended before the others'.
        """
        if self.mode.bound == 0 and push.id.worker not in self._entered:
            self._check_nobody_finished(push.id.worker)
        self._parked.pop(push.id.worker, None)
        self._pushes[push.id] = push
        return [*self._steps(self.machine.pushed(push.id, push.read_version)), *self._assigned()]

    def take(
        self, worker: int, epoch: int, limit: int, *, wait: bool
    ) -> tuple[tuple[Lease, ...] | None, Steps]:
        """A worker wants leases. None means: no answer yet, it is parked until `granted` has one.

        Args:
            wait: it has used up all it had, so it may be parked; else an empty answer comes at once.

        Raises:
            EarlyExit: another worker's script ended in an earlier epoch.
        """
        if not self.over(epoch):
            self._entered[worker] = max(epoch, self._entered.get(worker, 0))
            self._check_nobody_finished(worker, epoch)
        leases = self.book.take(worker, epoch, limit) if self.book else ()
        if leases or self.over(epoch) or not wait:
            return leases, []
        self._parked[worker] = epoch
        return None, [*self._steps(self.machine.rested(worker)), *self._assigned()]

    def assign(self, push: PushId) -> Steps:
        """A worker sent parameters to take over.

        Where workers read one memory, that must not change while another one computes on it, or computes
        what it will itself assign: it changes when all have assigned (the lowest rank's values count) or
        wait for something else.
        """
        if not self.mode.in_place:
            return [["assign", *_listed(push)], ["admit", push.worker, self.version]]
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
        drops = [["drop", *_listed(push)] for push in rest]
        admits = [["admit", push.worker, self.version] for push in (first, *rest)]
        return [*drops, ["assign", *_listed(first)], *admits]

    def over(self, epoch: int) -> bool:
        """Whether an epoch is finished for everybody."""
        return self.epoch > epoch

    def granted(self, limit: int) -> tuple[list[tuple[int, tuple[Lease, ...], bool]], Steps]:
        """Answers for parked workers that are possible now: (worker, leases, epoch over), and steps."""
        if not self._parked:
            return [], []
        if self.book:
            # Who waits for a later epoch left its loop early; who waits in this one may get more of it.
            self.book.turn_if_over({w for w, e in self._parked.items() if e > self.book.epoch})
        elif set(self._parked) >= self.machine.members:
            # Of a stream only its readers know where it ends; some may have left an epoch early.
            self._streamed = max(self._streamed, min(self._parked.values()) + 1)
        answers: list[tuple[int, tuple[Lease, ...], bool]] = []
        instructions: list[Instruction] = []
        for worker, epoch in sorted(self._parked.items()):
            leases = self.book.take(worker, epoch, limit) if self.book else ()
            if leases or self.over(epoch):
                answers.append((worker, leases, self.over(epoch)))
        for worker, _, _ in answers:
            del self._parked[worker]
            instructions += self.machine.woke(worker)
        return answers, self._steps(instructions)

    def carry(self, worker: int, leases: Sequence[int]) -> None:
        """A worker has read these, and the step that covers them comes after the epoch's end."""
        if self.book:
            self.book.carry(worker, leases)

    def give_back(self, worker: int, leases: Sequence[int]) -> None:
        """A worker will not use these leases."""
        if self.book:
            self.book.give_back(worker, leases)

    def snapshot(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold of the lead, as JSON."""
        return {
            "mode": str(self.mode),
            "machine": self.machine.snapshot(),
            "leases": self.book.snapshot() if self.book else None,
            "streamed": self._streamed,
            "samples": self.totals.samples,
            "pushes": self.totals.pushes,
            "staleness": {str(k): v for k, v in self.totals.staleness.items()},
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a checkpoint; the book must have been made already."""
        self.machine.restore(snapshot["machine"])
        if self.book and snapshot["leases"]:
            self.book.restore(snapshot["leases"])
        self._streamed = snapshot["streamed"]
        self.totals.samples = snapshot["samples"]
        self.totals.pushes = snapshot["pushes"]
        self.totals.staleness = Counter({int(k): v for k, v in snapshot["staleness"].items()})

    def _check_nobody_finished(self, worker: int, epoch: int | None = None) -> None:
        """A script that ended is missing from every later epoch. Within its last one it may have left its
        loop early: the others do the rest of that one."""
        for who, (clock, last) in sorted(self._finished.items()):
            if epoch is not None and last >= epoch:
                continue
            where = "step" if epoch is None else f"epoch {epoch + 1}, step"
            raise EarlyExit(
                f"worker:{who} ended its script after {clock} steps while worker:{worker} goes on with "
                f"{where} {self.machine.clocks.get(worker, 0) + 1}. All workers must run the same number of "
                "epochs: let every worker finish the loop, whatever its rank."
            )

    def _steps(self, instructions: Sequence[Instruction]) -> Steps:
        steps: Steps = []
        for instruction in instructions:
            match instruction:
                case Apply(pushes):
                    steps.append(self._apply(pushes))
                case Admit(worker):
                    steps.append(["admit", worker, self.machine.version])
                case Drop(push):
                    dropped = self._pushes.pop(push, None)
                    self.totals.dropped += 1
                    if dropped and self.book and push.worker in self.book.members:
                        self.book.give_back(push.worker, dropped.leases)
                    steps.append(["drop", push.worker, push.incarnation, push.sequence])
        return steps

    def _apply(self, ids: Sequence[PushId]) -> list[Any]:
        pushes = [self._pushes.pop(p) for p in ids]
        before = self.machine.version - 1
        known = all(p.samples > 0 for p in pushes if not p.void)
        parts = []
        for p in pushes:
            if self.book:
                self.book.finish(p.id.worker, p.leases, refused=p.void)
            if p.void:
                self.totals.refused += 1
                continue
            record = Applied(version=before, push=p)
            self.applied.append(record)
            self.totals.pushes += 1
            self.totals.samples += p.samples
            self.totals.staleness[record.staleness] += 1
            weight = p.samples if known else 1
            parts.append([p.id.worker, p.id.incarnation, p.id.sequence, weight])
        return ["reduce" if self._clip_norm is not None else "apply", parts]


def _listed(push: PushId) -> list[int]:
    return [push.worker, push.incarnation, push.sequence]
