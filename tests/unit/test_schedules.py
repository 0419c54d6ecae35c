"""Schedulers follow the run where workers' steps are not the run's, and are torch's own elsewhere."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from paceline.worker.run_progress import RunPlace, RunProgress, fraction_done
from paceline.worker.schedules import Schedules, place

SAMPLES, BATCH, EPOCHS = 90, 4, 3


class FakeRun:
    """The data of a run that several workers share. 23 batches an epoch, the last one of 2 samples."""

    def __init__(self, workers: int, *, follows: bool = True, samples: int = SAMPLES) -> None:
        self.workers = workers
        self.done = 0
        self.samples = samples
        self.batches = math.ceil(math.ceil(samples / BATCH) / workers)
        self._follows = follows
        self.told: list[str] = []

    def place(self) -> RunPlace | None:
        return RunPlace(self.done, self.samples, self.batches)

    def follows(self) -> bool:
        return self._follows and self.workers > 1

    def has_others(self) -> bool:
        return self.workers > 1

    def skips(self, scheduler: Any) -> bool:
        return False

    def ahead(self) -> int | None:
        return 2 if self.workers > 1 else None

    def habits_known(self) -> None:
        self.told.append("habits")


class Worker:
    """A script with one scheduler, in a run."""

    def __init__(self, run: FakeRun, make: Callable[[torch.optim.Optimizer], Any]) -> None:
        self.run = run
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
        self.passed_over = 0
        self.schedules = Schedules(run, lambda: self.passed_over)
        self.scheduler = make(self.optimizer)
        self.optimizer.step()
        self.schedules.prepare([self.scheduler], [self.optimizer])
        self.rates: list[float] = []

    def batch(self, samples: int, *, step: bool = True) -> None:
        self.schedules.used()
        if step:
            self.optimizer.step()
            self.rates.append(self.rate)
        self.run.done += samples
        if step:
            self.step()

    def step(self) -> None:
        plain = functools.partial(type(self.scheduler).step, self.scheduler)
        self.schedules.step(self.scheduler, plain, (), {})

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def one_cycle(batches: int) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, epochs=EPOCHS, steps_per_epoch=batches)


def cosine(batches: int) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=EPOCHS * batches)


def warm_up(batches: int) -> Callable[[torch.optim.Optimizer], Any]:
    def make(o: torch.optim.Optimizer) -> Any:
        parts = [
            lr_scheduler.LinearLR(o, 0.1, total_iters=4),
            lr_scheduler.CosineAnnealingLR(o, T_max=EPOCHS * batches - 4),
        ]
        return lr_scheduler.SequentialLR(o, parts, milestones=[4])

    return make


def sizes() -> list[int]:
    return [min(BATCH, SAMPLES - at) for at in range(0, SAMPLES, BATCH)]


@pytest.mark.parametrize("make", [one_cycle, cosine, warm_up])
def test_with_a_straggler_all_workers_are_at_the_same_place_and_nobody_runs_past_the_end(make):
    """The fast worker makes five steps for each of the slow one's; a count of its own ran past the end."""
    run = FakeRun(2)
    fast, slow = Worker(run, make(run.batches)), Worker(run, make(run.batches))
    for _ in range(EPOCHS):
        for k, size in enumerate(sizes()):
            (slow if k % 6 == 5 else fast).batch(size)
    assert len(fast.rates) > EPOCHS * run.batches > len(slow.rates)
    slow.batch(0)
    fast.batch(0)
    reference = Worker(FakeRun(1), make(run.batches))
    for _ in range(EPOCHS * run.batches):
        reference.batch(0)
    assert fast.rate == slow.rate == pytest.approx(reference.rate)
    assert fast.rate < 0.01, "not at the end"
    # Each of the slow one's rates is where the fast one is at that time.
    for n in range(1, len(slow.rates)):
        assert slow.rates[n] in (fast.rates[5 * n - 4 :])


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("make", [one_cycle, cosine, warm_up])
def test_equally_fast_workers_have_torchs_rates_step_by_step(make, workers):
    run = FakeRun(workers, samples=SAMPLES if workers == 1 else 96)
    each = [Worker(run, make(run.batches)) for _ in range(workers)]
    reference = Worker(FakeRun(1), make(run.batches))
    for _ in range(EPOCHS):
        left = sizes() if workers == 1 else [BATCH] * 24
        while left:
            share, left = left[:workers], left[workers:]
            for worker, size in zip(each, share, strict=False):
                worker.batch(size)
    for _ in range(EPOCHS * run.batches):
        reference.batch(0)
    assert each[-1].rates == reference.rates, "the last one of a round has heard of the whole round"


def test_who_accumulates_gradients_is_where_its_own_plan_says():
    """A step for every second batch; the schedule has half as many steps."""
    run = FakeRun(2)
    make = lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5)  # noqa: E731
    fast, slow = Worker(run, make), Worker(run, make)
    for k in range(40):
        worker = slow if k % 8 >= 6 else fast
        worker.batch(BATCH, step=bool(k % 2))
    done = 40 * BATCH * run.batches // (2 * SAMPLES)
    assert fast.scheduler.last_epoch == done
    assert slow.scheduler.last_epoch == done


def test_calls_behind_the_loop_and_in_rounds_are_torchs():
    run = FakeRun(2)
    epochs = Worker(run, lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5))
    run.done = 80
    for n in range(1, 4):
        epochs.schedules.used()
        epochs.schedules.in_loop = False
        epochs.step()
        assert epochs.scheduler.last_epoch == n
    rounds = Worker(FakeRun(2, follows=False), lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5))
    for n in range(1, 4):
        rounds.batch(BATCH)
        assert rounds.scheduler.last_epoch == n


def test_in_rounds_counts_that_differ_after_a_death_are_brought_together():
    """One worker is alone for a while: it makes more rounds than planned, of half the samples."""
    run = FakeRun(2, follows=False, samples=96)
    first, second = (Worker(run, lambda o: lr_scheduler.StepLR(o, 1)) for _ in range(2))
    for k in range(12):
        run.done += BATCH  # the other one's push is in the same round
        first.batch(BATCH)
        assert first.scheduler.last_epoch == k + 1
    for _ in range(8):
        first.batch(BATCH)
    assert first.scheduler.last_epoch == 16 + 2, "20 steps, and the run is at its 16th"
    for _ in range(8):
        run.done += BATCH
        first.batch(BATCH)
    assert first.scheduler.last_epoch == 24 + 2
    second.batch(0)
    assert second.scheduler.last_epoch == 24


def test_in_rounds_too_a_run_of_several_workers_is_not_ended_by_a_step_too_many():
    """After a death an epoch may have a round more than planned. With one worker, torch's error stands."""
    worker = Worker(FakeRun(2, follows=False), one_cycle(2))
    for _ in range(EPOCHS * 2 + 2):
        worker.batch(BATCH)
    alone = Worker(FakeRun(1), one_cycle(2))
    with pytest.raises(ValueError, match="Tried to step"):
        for _ in range(EPOCHS * 2 + 2):
            alone.batch(BATCH)


def test_who_joins_late_is_where_the_others_are_before_its_first_step():
    run = FakeRun(2)
    first = Worker(run, cosine(run.batches))
    for _ in range(10):
        first.batch(BATCH)
    late = Worker(run, cosine(run.batches))
    assert not late.schedules.is_late
    late.schedules.join_late(first.schedules.paces())
    assert late.schedules.is_late
    late.schedules.catch_up(0)
    assert late.rate == first.rate < 1.0
    late.batch(BATCH)
    assert late.scheduler.last_epoch == 11 * BATCH * run.batches // SAMPLES


@pytest.mark.parametrize("empty", [0, 3])
def test_who_joins_late_has_missed_steps_behind_epochs_unless_its_script_made_them(empty):
    first = Worker(FakeRun(2), lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5))
    first.step()
    late = Worker(first.run, lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5))
    late.schedules.join_late(first.schedules.paces())
    for _ in range(empty):
        late.step()
    late.schedules.catch_up(3)
    assert late.scheduler.last_epoch == 3


@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_scheduler_goes_on_also_with_other_parts_of_an_epoch(kept):
    """Its own steps, and the number of them that it was made for, come back with it. Not from a checkpoint
    of an earlier version; there it goes on from where it was."""
    run = FakeRun(2)
    before = Worker(run, cosine(run.batches))
    for _ in range(20):
        before.batch(BATCH)
    again = Worker(FakeRun(3), cosine(run.batches))
    again.run.done = run.done
    again.scheduler.load_state_dict(before.scheduler.state_dict())
    again.schedules.put_back(before.schedules.paces() if kept else [])
    for size in sizes()[20:]:
        again.batch(size)
    assert again.scheduler.last_epoch == (run.batches if kept else 20 * BATCH * run.batches // SAMPLES)


@pytest.mark.parametrize("follows", [False, True])
def test_batches_that_the_script_skips_do_not_hold_its_scheduler_back(follows):
    """`continue` for every other batch: the run hears of those when the epoch is over."""
    run = FakeRun(2, follows=follows, samples=96)
    each = [Worker(run, cosine(run.batches)) for _ in range(2)]
    for k in range(run.batches):
        if k % 2:
            for worker in each:
                worker.schedules.used()
                worker.passed_over += 1
            continue
        run.done += 2 * BATCH
        for worker in each:
            worker.batch(0)
    assert [worker.scheduler.last_epoch for worker in each] == [run.batches // 2] * 2


def test_schedulers_are_known_from_when_they_are_made_and_their_parts_are_their_own():
    run = FakeRun(2)
    schedules = Schedules(run, lambda: 0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with schedules.watch():
        early = lr_scheduler.ExponentialLR(optimizer, 0.5)
        schedules.prepare([], [optimizer])
        whole = warm_up(run.batches)(optimizer)
        strange = lr_scheduler.StepLR(other, 1)
        optimizer.step()
        schedules.used()
        run.done = SAMPLES
        whole.step()
        early.step()
        other.step()
        strange.step()
    assert schedules.each() == [early, whole]
    assert early.last_epoch == whole.last_epoch == run.batches
    assert strange.last_epoch == 1
    early.step()  # nobody listens any more
    assert early.last_epoch == run.batches + 1
    assert "step" not in early.state_dict()


def test_where_a_scheduler_is():
    at = RunPlace(done=50, whole=100, batches=10)
    assert place(at, 10, 0, 7, 7) == 5
    assert place(at, 10, 20, 7, 7) == 3
    assert place(at, 10, 0, 7, 14) == 2, "a call for two batches"
    assert place(at, 10, 80, 7, 7) == 0


def test_the_fraction_that_is_done():
    at = RunPlace(done=50, whole=100, batches=10)
    assert fraction_done(at, 2) == 0.25
    assert fraction_done(at, 0) == 1.0 and fraction_done(RunPlace(250, 100, 1), 2) == 1.0
    assert fraction_done(None, 2) is fraction_done(at, None) is None
    with pytest.raises(AttributeError):
        RunProgress(updates=1, samples=2, epoch=0, fraction=None).updates = 3  # type: ignore[misc]
