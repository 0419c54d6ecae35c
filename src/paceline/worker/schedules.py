"""Learning-rate schedulers in a run: they follow the run, not one worker's count of its own steps.

Where workers go in rounds, a worker's steps are the run's, and `scheduler.step()` is torch's; only after a
death, when rounds are missed and smaller ones made, is it brought back to where the run is. Elsewhere a
fast worker makes more steps than it was planned to and a slow one fewer. There `scheduler.step()` in the
training loop brings the scheduler to where it would be if all workers had been equally fast: `place` says
where. It makes as many of torch's steps as that takes, often none, so every scheduler stays what it is.

A call behind the loop, once an epoch, is torch's in every mode: workers have their epochs in common.

In a worker of a run, schedulers are known from when they are made (`Schedules.watch`), whether prepare() gets
them or not. A script that runs alone has torch's own.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch.optim import lr_scheduler

from paceline.worker.run_progress import RunPlace

__all__ = ["SchedulePace", "Schedules", "place"]


def place(at: RunPlace, batches: int, since: int, calls: int, read: int) -> int:
    """How often a scheduler would have been stepped by now if all workers had been equally fast.

    Args:
        batches: a worker's part of an epoch, when the scheduler was made.
        since: `at.done` then.
        calls: how often this worker's script has stepped it,
        read: and with how many batches, of those that `at.done` may hold. (Who accumulates gradients reads
            several for each call.)
    """
    return max(0, at.done - since) * batches * calls // (at.whole * max(read, 1))


@dataclass
class SchedulePace:
    """How a script steps one scheduler. Kept in checkpoints, and worker 0's by the servers."""

    since: int = 0
    """How far the run was when the scheduler was made."""
    batches: int = 0
    """A worker's part of an epoch then; 0: it is not known yet."""
    calls: int = 0
    """Calls within the training loop, …"""
    read: int = 0
    """… and batches that this worker had read for them."""
    made: int = 0
    """Steps that torch's scheduler has made for them."""
    behind: int = 0
    """Calls behind the loop."""


class ScheduleView(Protocol):
    """What schedules must know of the run."""

    def place(self) -> RunPlace | None:
        """How far the run is; None if nobody counts it (a stream, no loader)."""

    def follows(self) -> bool:
        """Whether the workers' steps are not the run's."""

    def ahead(self) -> int | None:
        """Where workers count: how many steps a count may be ahead of what the run has told. (Who dies, and
        who takes its place, makes counts differ.) None: counts are all that there is."""

    def has_others(self) -> bool:
        """Whether there are other workers."""

    def skips(self, scheduler: Any) -> bool:
        """Whether the script is in an epoch that the run has finished, and the scheduler will be put back."""

    def habits_known(self) -> None:
        """Workers that join later should hear how this script steps its schedulers."""


class Schedules:
    """All schedulers of a worker's script.

    Args:
        passed_over: how many of the batches that the script has read it has made no step with, and not told
            the run so either. The run's count lacks them.
    """

    def __init__(self, run: ScheduleView, passed_over: Callable[[], int]) -> None:
        self._run = run
        self._passed_over = passed_over
        self._made: list[weakref.ref[Any]] = []
        self._given: list[Any] = []
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._paces: weakref.WeakKeyDictionary[Any, SchedulePace] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Batches that the script had read when the scheduler was made, put back, or stepped last."""
        self._stepping = False
        self.in_loop = False
        """Whether the script has a batch, and has not asked for the next one in vain."""
        self.read = 0
        """Batches that the script has read."""
        self._late: list[SchedulePace] = []

    def watch(self) -> contextlib.ExitStack:
        """Know every scheduler that is made in this process from now on, and hear when it is stepped.

        Returns:
            What ends it when it is closed.
        """
        undo = contextlib.ExitStack()
        root: type = lr_scheduler.LRScheduler
        composed: tuple[type, ...] = (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler)
        for kind in (root, *composed):  # the composed ones do not call root's
            undo.callback(setattr, kind, "__init__", vars(kind)["__init__"])
            setattr(kind, "__init__", self._hearing_of(vars(kind)["__init__"]))  # noqa: B010
        for kind in (root, *_subclasses(root)):
            if "step" in vars(kind):
                undo.callback(setattr, kind, "step", vars(kind)["step"])
                setattr(kind, "step", self._followed(vars(kind)["step"]))  # noqa: B010
        return undo

    def _hearing_of(self, make: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(make)
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            make(scheduler, *args, **kwargs)
            self._hear_of(scheduler)

        return init

    def _followed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def followed(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            return self.step(scheduler, functools.partial(step, scheduler), args, kwargs)

        return followed

    def _hear_of(self, scheduler: Any) -> None:
        parts = getattr(scheduler, "_schedulers", ())  # their steps are its business
        self._made = [r for r in self._made if (one := r()) is not None and not any(one is p for p in parts)]
        self._made.append(weakref.ref(scheduler))
        at = self._run.place() if self.read else None
        self._paces[scheduler] = SchedulePace(since=0 if at is None else at.done)
        self._seen[scheduler] = self.read

    def prepare(self, given: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """What prepare() got, in all calls."""
        self._given, self._optimizers = list(given), tuple(optimizers)

    def each(self) -> list[Any]:
        """Schedulers of prepared optimizers: those that prepare() got, then all others as they were made."""
        made = [one for r in self._made if (one := r()) is not None and self._is_prepared(one)]
        return [*self._given, *(one for one in made if not any(one is given for given in self._given))]

    def _is_prepared(self, scheduler: Any) -> bool:
        return any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in self._optimizers)

    def used(self) -> None:
        """The script got a batch."""
        self.read += 1
        self.in_loop = True

    def peeked(self, read: int) -> None:
        """The script only looked at its batches since it had read so many."""
        self.read = read

    # --- stepping ---------------------------------------------------------------------------------

    def step(self, scheduler: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What scheduler.step() does."""
        if self._stepping or not self._is_prepared(scheduler):
            return step(*args, **kwargs)
        if self._run.skips(scheduler):
            return None
        self._stepping = True
        try:
            if args or kwargs or isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                return step(*args, **kwargs)  # the script says where it is, or the metric does
            pace = self._pace(scheduler)
            if self.in_loop:
                self._step_in_loop(scheduler, step, pace)
            else:
                self._step_behind(step, pace)
        finally:
            self._stepping = False
        return None

    def _pace(self, scheduler: Any) -> SchedulePace:
        return self._paces.setdefault(scheduler, SchedulePace())

    def _step_behind(self, step: Callable[[], Any], pace: SchedulePace) -> None:
        step()
        pace.behind += 1
        if pace.behind == 1:
            self._run.habits_known()

    def _step_in_loop(self, scheduler: Any, step: Callable[[], Any], pace: SchedulePace) -> None:
        pace.calls += 1
        pace.read += max(0, self.read - self._seen.get(scheduler, 0))
        self._seen[scheduler] = self.read
        at, wanted = self._run.place(), pace.made + 1
        if at is not None:
            pace.batches = pace.batches or at.batches
            there = place(at, pace.batches, pace.since, pace.calls, pace.read - self._passed_over())
            if self._run.follows():
                wanted = there
            elif (ahead := self._run.ahead()) is not None:
                wanted = max(there, min(wanted, there + ahead))
        self._go_to(scheduler, step, pace, wanted)
        if pace.calls == 1:
            self._run.habits_known()

    def _go_to(self, scheduler: Any, step: Callable[[], Any], pace: SchedulePace, wanted: int) -> None:
        """Have torch's scheduler make steps, but none that it would refuse in a run of several workers."""
        while pace.made < wanted:
            if self._run.has_others() and _is_through(scheduler):
                pace.made = wanted
                return
            step()
            pace.made += 1

    # --- started again ----------------------------------------------------------------------------

    def paces(self) -> list[dict[str, int]]:
        """How the script steps its schedulers, in the order of `each`, as JSON."""
        return [asdict(self._pace(scheduler)) for scheduler in self.each()]

    def put_back(self, paces: Sequence[dict[str, int]]) -> None:
        """On a resume: this worker's own, with the schedulers themselves.

        Checkpoints of earlier versions have none; torch's schedulers know how many steps they have made.
        """
        for k, scheduler in enumerate(self.each()):
            known = paces[k] if k < len(paces) else {"made": max(0, getattr(scheduler, "last_epoch", 0))}
            self._paces[scheduler] = SchedulePace(**known)
            self._seen[scheduler] = self.read

    def join_late(self, paces: Sequence[dict[str, int]]) -> None:
        """The run is under way: before the first step, be where worker 0's schedulers are.

        Args:
            paces: worker 0's.
        """
        self._late = [SchedulePace(**pace) for pace in paces]

    def catch_up(self, epoch: int) -> None:
        """The script makes its first step, in this epoch, in a run that is under way."""
        late, self._late = self._late, []
        at = self._run.place()
        self._stepping = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch wants to see the optimizer's step first
                for scheduler, known in zip(self.each(), late, strict=False):
                    self._catch_up_one(scheduler, known, at, epoch)
        finally:
            self._stepping = False

    def _catch_up_one(self, scheduler: Any, known: SchedulePace, at: RunPlace | None, epoch: int) -> None:
        pace = self._pace(scheduler)
        if known.calls and at is not None:
            pace.since, pace.batches = known.since, at.batches
            wanted = place(at, at.batches, known.since, known.calls, known.read)
            self._go_to(scheduler, scheduler.step, pace, wanted)
        while known.behind and pace.behind < epoch:
            scheduler.step()
            pace.behind += 1

    @property
    def is_late(self) -> bool:
        """Whether `catch_up` is due."""
        return bool(self._late)


def _is_through(scheduler: Any) -> bool:
    """Whether torch's scheduler would refuse another step."""
    total = getattr(scheduler, "total_steps", None)
    return isinstance(total, int) and scheduler.last_epoch >= total


def _subclasses(kind: type) -> set[type]:
    below: list[type] = kind.__subclasses__()
    return {each for sub in below for each in (sub, *_subclasses(sub))}
