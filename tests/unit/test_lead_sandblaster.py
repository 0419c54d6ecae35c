"""Sandblaster's order: an epoch is one gradient of all samples, whoever computes, dies, or comes late."""

import json
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.descent import Descent
from paceline.core.events import Push
from paceline.core.leases import Lease, LeaseBook
from paceline.core.modes import Admit, Drop, Hold, PushId, WholeEpochs, parse_mode
from paceline.core.modes.lbfgs import Lbfgs
from paceline.ps.vectors import run_on
from tests.deciding import JsonDecider

# A quadratic: every sample has a place and a curvature of its own.
SIZE = 6
GENERATOR = torch.Generator().manual_seed(2)
PLACES = torch.randn(80, SIZE, generator=GENERATOR, dtype=torch.float64)
CURVATURES = 0.2 + torch.rand(80, SIZE, generator=GENERATOR, dtype=torch.float64)


def gradient(w: Tensor, samples: list[int]) -> Tensor:
    """Of the mean loss of these samples."""
    return (CURVATURES[samples] * (w - PLACES[samples])).mean(0)


def sequential(samples: int, epochs: int, **options: Any) -> Tensor:
    """torch's own L-BFGS, a step an epoch, on all samples."""
    w = torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=1, **options)

    def closure() -> Tensor:
        w.grad = gradient(w.detach(), list(range(samples)))
        return (CURVATURES[:samples] * (w.detach() - PLACES[:samples]) ** 2).sum(1).mean() / 2

    for _ in range(epochs):
        optimizer.step(closure)
    return w.detach()


class Servers:
    """Execute the order on real vectors, each on its part; what follows an `ask` waits, as it does live."""

    def __init__(self, lead: JsonDecider, count: int) -> None:
        self.lead = lead
        zeros = torch.zeros(SIZE, dtype=torch.float64)
        self.shards = [{"w": part.clone()} for part in zeros.tensor_split(count)]
        self.pushed: dict[PushId, Tensor] = {}
        self.steps: list[str] = []
        self.asked: list[Any] | None = None
        self.waiting: list[list[Any]] = []
        self.admitted: list[tuple[int, int]] = []

    @property
    def w(self) -> Tensor:
        return torch.cat([vectors["w"] for vectors in self.shards])

    def execute(self, steps: list[list[Any]]) -> None:
        self.waiting += json.loads(json.dumps(steps, allow_nan=False))
        while self.waiting and self.asked is None:
            step = self.waiting.pop(0)
            self.steps.append(step[0])
            match step:
                case ["add", [[*push, weight, 1.0]]]:
                    whole = self.pushed.pop(PushId(*push)) * weight
                    for vectors, part in zip(self.shards, whole.tensor_split(len(self.shards)), strict=True):
                        vectors["g"] = vectors["g"] + part if "g" in vectors else part.clone()
                case ["drop", *push]:
                    self.pushed.pop(PushId(*push), None)
                case ["assign", *push]:
                    value = self.pushed.pop(PushId(*push))
                    for vectors, part in zip(self.shards, value.tensor_split(len(self.shards)), strict=True):
                        vectors["w"] = part.clone()
                case ["ask", ops]:
                    self.asked = ops
                case ["vectors", ops, kept]:
                    for vectors in self.shards:
                        assert run_on(vectors, ops) == []
                        for name in vectors.keys() - {"w", *kept}:
                            del vectors[name]
                case ["admit", worker, version, *_]:
                    self.admitted.append((worker, version))
                case ["left", *_]:
                    pass
                case _:
                    raise AssertionError(step)

    def answer(self) -> None:
        """All servers answer what they were asked."""
        assert self.asked is not None
        parts = [run_on(vectors, self.asked) for vectors in self.shards]
        self.asked = None
        held, self.waiting = self.waiting, []
        self.execute(self.lead.answered(json.loads(json.dumps(parts, allow_nan=False))) + held)

    def snapshot(self) -> list[dict[str, Tensor]]:
        return [{name: vector.clone() for name, vector in vectors.items()} for vectors in self.shards]


class Run:
    """A lead, its servers, and workers that are driven one event at a time."""

    def __init__(
        self, *, samples: int = 24, batch: int = 4, workers: int = 2, servers: int = 2, **options: Any
    ) -> None:
        self.samples = samples
        self.lead = JsonDecider(parse_mode("sandblaster"))
        self.lead.book = LeaseBook(
            samples=samples, batch_size=batch, drop_last=False, by_round=False, copies="any"
        )
        self.lead.descent = Descent(Lbfgs(**options))
        self.servers = Servers(self.lead, servers)
        self.workers: dict[int, Worker] = {}
        self.incarnations: Counter[int] = Counter()
        for rank in range(workers):
            self.join(rank)

    def join(self, rank: int) -> "Worker":
        worker = self.workers[rank] = Worker(self, rank, self.incarnations[rank])
        self.incarnations[rank] += 1
        self.servers.execute(self.lead.join(rank, worker.incarnation))
        worker.fetch()
        return worker

    def leave(self, rank: int, *, finished: bool = False) -> None:
        worker = self.workers.pop(rank)
        self.servers.execute(self.lead.leave(rank, worker.incarnation, finished=finished))
        self.grant()

    def grant(self) -> None:
        """Answer whoever waits for leases, as the server does."""
        while True:
            answers, steps = self.lead.granted(2)
            if not answers and not steps:
                return
            self.servers.execute(steps)
            for rank, leases, over in answers:
                self.workers[rank].hear(leases, over=over)

    def answer(self) -> None:
        self.servers.answer()
        self.grant()

    def applied(self, epoch: int) -> int:
        assert self.lead.book is not None
        return self.lead.book.accounts()[epoch]["applied"]


class Worker:
    """A worker's side: a copy of w, fetched when the lead is at another version, and leases to push."""

    def __init__(self, run: Run, rank: int, incarnation: int) -> None:
        self.run, self.rank, self.incarnation = run, rank, incarnation
        self.epoch = 0
        self.sequence = 0
        self.leases: list[Lease] = []
        self.parked = False

    def fetch(self) -> None:
        self.w, self.version = self.run.servers.w, self.run.lead.version

    def take(self, *, wait: bool = True, limit: int = 1) -> None:
        leases, steps = self.run.lead.take(self.rank, self.epoch, limit, wait=wait)
        self.parked = leases is None
        if leases is not None:
            self.hear(leases, over=self.run.lead.over(self.epoch))
        self.run.servers.execute(steps)
        self.run.grant()

    def hear(self, leases: tuple[Lease, ...], *, over: bool) -> None:
        self.parked = False
        if self.version != self.run.lead.version:
            self.fetch()
        self.leases += leases
        self.epoch += over

    def push(self, *, void: bool = False, repeat: bool = False) -> None:
        lease = self.leases.pop(0)
        samples = [i for start, stop in lease.ranges for i in range(start, stop)]
        push = Push(
            id=PushId(self.rank, self.incarnation, self.sequence),
            read_version=self.version,
            samples=len(samples),
            leases=(lease.id,),
            void=void,
        )
        self.sequence += 1
        for _ in range(1 + repeat):
            self.run.servers.pushed[push.id] = gradient(self.w, samples)
            self.run.servers.execute(self.run.lead.push(push))
        self.run.grant()


def test_the_machine_takes_in_what_is_of_this_version_and_never_waits() -> None:
    machine = parse_mode("sandblaster").machine()
    assert isinstance(machine, WholeEpochs)
    machine.joined(0, 0)
    machine.joined(1, 0)
    first, second = PushId(0, 0, 0), PushId(1, 0, 0)
    assert machine.pushed(first, 0) == [Hold(first), Admit(0)]
    assert machine.pushed(first, 0) == [Drop(first), Admit(0)]
    machine.changed()
    assert machine.version == 1 and not machine.waiting
    assert machine.pushed(second, 0) == [Drop(second), Admit(1)]
    assert machine.clocks == {0: 1, 1: 1}
    assert machine.rested(0) == machine.left(0) == []


def test_an_epoch_is_a_sum_a_question_and_a_move_before_anybody_reads_on() -> None:
    run = Run(samples=8, batch=4)
    a, b = run.workers.values()
    a.take()
    b.take()
    a.push()
    b.push()
    assert run.lead.version == 0, "the parameters are the same"
    a.take()
    assert run.servers.steps == ["add", "admit", "add", "admit", "ask"]
    # Until the move is made the epoch is not over, and there is nothing of the next one.
    assert a.parked and run.lead.epoch == 0
    b.take(wait=False)
    assert not b.leases and b.epoch == 0
    b.epoch = 1  # as if it had left its loop
    b.take(wait=False)
    assert not b.leases
    b.epoch = 0
    b.take()
    assert b.parked
    run.answer()
    assert run.servers.steps[-1] == "vectors"
    assert (a.parked, b.parked, a.epoch, b.epoch) == (False, False, 1, 1)
    assert (run.lead.version, run.lead.epoch, a.version, b.version) == (1, 1, 1, 1)
    assert [(r.version, r.staleness) for r in run.lead.applied] == [(0, 0), (0, 0)]
    assert dict(run.lead.totals.staleness) == {0: 2}
    assert run.lead.totals.samples == 8


def finish(run: Run, epochs: int) -> Tensor:
    """Everybody works in turns to the end of these epochs."""
    for _ in range(10_000):
        if run.servers.asked is not None:
            run.answer()
        todo = [w for w in run.workers.values() if w.epoch < epochs and not w.parked]
        if not todo and run.servers.asked is None:
            return run.servers.w
        for worker in todo:
            if worker.leases:
                worker.push()
            elif not worker.parked and worker.epoch < epochs:
                worker.take()
    raise AssertionError("it never ends")


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("workers", [1, 3])
def test_it_takes_the_steps_of_torchs_own_on_the_whole_batch(workers: int, servers: int) -> None:
    run = Run(samples=30, batch=4, workers=workers, servers=servers, line_search=None, history=3)
    expected = sequential(30, 6, history_size=3)
    assert (finish(run, 6) - expected).abs().max() < 1e-10
    assert [run.applied(epoch) for epoch in range(6)] == [30] * 6
    assert run.lead.version == 6


def test_the_first_of_two_twins_counts_and_the_other_is_dropped() -> None:
    run = Run(samples=8, batch=4, line_search=None)
    slow, fast = run.workers.values()
    slow.take()
    fast.take()
    fast.push()
    fast.take()  # nothing is left: a copy of what the slow one has
    assert fast.leases and fast.leases[0].ranges == slow.leases[0].ranges
    fast.push()
    fast.take()
    run.answer()  # nobody waited for the slow one
    assert fast.epoch == 1 and run.lead.version == 1
    slow.push()
    assert (run.lead.totals.dropped, run.lead.totals.samples, run.applied(0)) == (1, 8, 8)
    slow.take()
    assert (slow.epoch, slow.version) == (1, 1)
    # It computed on old parameters, and yet the result is that of the whole batch.
    assert (finish(run, 3) - sequential(8, 3)).abs().max() < 1e-10


def test_a_twin_that_is_second_within_the_epoch_is_dropped_too() -> None:
    run = Run(samples=12, batch=4, workers=3)
    slow, fast, other = run.workers.values()
    for worker in (slow, fast, other):
        worker.take()
    fast.push()
    fast.take()
    fast.push()
    slow.push()
    assert (run.lead.totals.dropped, run.applied(0)) == (1, 8)
    assert run.lead.version == 0 and run.servers.asked is None, "the third one's samples are still due"


def test_an_assign_waits_until_nobody_computes() -> None:
    run = Run(samples=8, batch=4, workers=3)
    ones = torch.ones(SIZE, dtype=torch.float64)
    a, b, c = run.workers.values()
    for worker in (a, b):
        run.servers.pushed[PushId(worker.rank, 0, 0)] = ones * (1 + worker.rank)
        run.servers.execute(run.lead.assign(PushId(worker.rank, 0, 0)))
        worker.sequence = 1
    c.take()
    c.push()
    assert run.lead.version == 0 and run.lead.missing_assigns == {2}
    c.take()
    c.push()
    c.take()
    assert c.epoch == 1  # an epoch of other parameters, which led nowhere
    assert torch.equal(run.servers.w, ones), "the lowest rank's values count"
    assert run.servers.admitted[-2:] == [(0, 1), (1, 1)] and run.lead.version == 2
    assert (run.lead.totals.samples, run.lead.totals.dropped) == (8, 0)


def test_parameters_that_are_assigned_begin_a_new_minimisation() -> None:
    run = Run(samples=8, batch=4, workers=1, line_search=None)
    finish(run, 3)
    worker = run.workers[0]
    start = torch.full((SIZE,), 3.0, dtype=torch.float64)
    run.servers.pushed[PushId(0, 0, worker.sequence)] = start
    run.servers.execute(run.lead.assign(PushId(0, 0, worker.sequence)))
    worker.sequence += 1
    fresh = Run(samples=8, batch=4, workers=1, line_search=None)
    fresh.servers.shards = [{"w": part.clone()} for part in start.tensor_split(2)]
    fresh.workers[0].fetch()
    assert torch.equal(finish(run, 5), finish(fresh, 2))


@pytest.mark.parametrize("asking", [False, True])
def test_what_was_added_up_before_an_assign_leads_to_no_step(asking: bool) -> None:
    run = Run(samples=8, batch=4, workers=2)
    finish(run, 1)
    a, b = run.workers.values()
    a.take()
    b.take()
    a.push()
    if asking:
        b.push()
        a.take()
        assert run.servers.asked is not None
    start = torch.full((SIZE,), 3.0, dtype=torch.float64)
    for worker in (b,) if asking else (a, b):
        run.servers.pushed[PushId(worker.rank, 0, 9)] = start
        run.servers.execute(run.lead.assign(PushId(worker.rank, 0, 9)))
        worker.sequence = 10
    if not asking:
        a.fetch()
        b.fetch()
    w = finish(run, 2)
    assert torch.equal(w, start) and run.lead.descent is not None and run.lead.descent.outcome == ""
    assert not torch.equal(finish(run, 3), start)


def test_a_refused_gradient_makes_a_point_unusable_and_no_sample_comes_twice() -> None:
    run = Run(samples=8, batch=4, workers=1)
    worker = run.workers[0]
    descent = run.lead.descent
    assert descent is not None
    worker.take()
    worker.push(void=True)
    worker.take()
    worker.push()
    worker.take()
    # There is no step to shorten yet: the point stays, nobody is asked, and the user is told.
    assert run.servers.asked is None and descent.outcome == "stuck" and "NaN" in descent.news
    assert torch.equal(run.servers.w, torch.zeros(SIZE, dtype=torch.float64))
    assert worker.epoch == 1 and run.lead.totals.refused == 1
    finish(run, 2)
    trial = run.servers.w
    worker.take()
    worker.push(void=True)
    worker.take()
    worker.push()
    worker.take()
    assert descent.outcome == "searching" and descent.news == ""
    assert torch.allclose(run.servers.w, 0.1 * trial)
    account = run.lead.book.accounts()[0] if run.lead.book else {}
    assert (account["applied"], account["refused"]) == (4, 4)


def test_a_minimum_is_said_and_kept() -> None:
    run = Run(samples=16, batch=4)
    w = finish(run, 25)
    assert run.lead.descent is not None and "converged" in run.lead.descent.news
    assert torch.equal(finish(run, 27), w)
    expected = (CURVATURES[:16] * PLACES[:16]).sum(0) / CURVATURES[:16].sum(0)
    assert (w - expected).abs().max() < 1e-4  # as near as a slope of 1e-9 tells


def test_an_epoch_that_all_leave_without_a_step_changes_nothing() -> None:
    run = Run(samples=8, batch=4)
    finish(run, 2)
    w, version = run.servers.w, run.lead.version
    for worker in run.workers.values():
        worker.take()
        run.lead.give_back(worker.rank, [lease.id for lease in worker.leases])
        worker.leases.clear()
        worker.epoch += 1
    for worker in run.workers.values():
        worker.take()
    assert run.lead.epoch == 3 and run.lead.version == version and torch.equal(run.servers.w, w)


def test_an_epoch_cut_short_is_the_mean_of_what_was_read() -> None:
    run = Run(samples=24, batch=4, workers=1, line_search=None)
    worker = run.workers[0]
    worker.take()
    worker.push()
    worker.epoch = 1  # it left its loop
    worker.take()
    run.answer()
    assert (run.servers.w - sequential(4, 1)).abs().max() < 1e-12


def test_a_step_without_a_batch_of_the_loader_is_left_out() -> None:
    run = Run()
    push = Push(id=PushId(0, 0, 0), read_version=0, samples=4, leases=(), void=False)
    assert run.lead.push(push) == [["drop", 0, 0, 0], ["admit", 0, 0]]
    assert run.lead.totals.dropped == 1


@pytest.mark.parametrize("pushes", [0, 1, 3, 5, 7, 10])
def test_a_restored_lead_goes_on_in_the_middle_of_an_epoch(pushes: int) -> None:
    whole = finish(Run(samples=16, batch=4, workers=1, history=2), 6)
    run = Run(samples=16, batch=4, workers=1, history=2)
    finish(run, 3)
    worker = run.workers[0]
    while pushes:
        if worker.leases:
            worker.push()
            pushes -= 1
        else:
            worker.take()
            if run.servers.asked is not None:
                run.answer()
    snapshot, vectors = json.loads(json.dumps(run.lead.snapshot())), run.servers.snapshot()
    again = Run(samples=16, batch=4, workers=0, history=2)
    again.lead.restore(snapshot)
    again.servers.shards = vectors
    again.join(0).epoch = again.lead.epoch
    assert (finish(again, 6) - whole).abs().max() < 1e-12
    assert [again.applied(epoch) for epoch in range(6)] == [16] * 6
    assert again.lead.totals.samples == 96


@settings(max_examples=150)
@given(
    samples=st.integers(5, 40),
    batch=st.integers(1, 7),
    count=st.integers(1, 4),
    servers=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_whoever_dies_comes_late_or_leaves_every_epoch_is_the_gradient_of_all_samples(
    samples: int, batch: int, count: int, servers: int, seed: int
) -> None:
    run = Run(samples=samples, batch=batch, workers=count, servers=servers, line_search=None)
    rng, epochs = random.Random(seed), 3
    seen: list[Tensor] = [run.servers.w]
    done: set[int] = set()
    for _ in range(4000):
        if run.lead.version == len(seen):
            seen.append(run.servers.w)
        able = [w for w in run.workers.values() if not w.parked]
        if done >= set(range(count)):
            break
        # Somebody can always go on: a server that was asked, or a worker.
        assert able or run.servers.asked is not None
        if run.servers.asked is not None and (not able or rng.random() < 0.3):
            run.answer()
            continue
        worker = rng.choice(able)
        event = rng.random()
        if event < 0.05:
            victim = rng.choice(list(run.workers))
            run.leave(victim)
            if rng.random() < 0.8 or done >= run.workers.keys():
                run.join(victim)
            else:
                done.add(victim)  # for good
        elif worker.epoch >= epochs:
            done.add(worker.rank)
            run.leave(worker.rank, finished=True)
        elif worker.leases:
            worker.push(repeat=event > 0.95)
        else:
            worker.take(wait=rng.random() < 0.7, limit=rng.randint(1, 3))
    assert done >= set(range(count)), "somebody hangs"
    assert run.lead.book is not None
    applied = [account["applied"] for account in run.lead.book.accounts()]
    assert set(applied[:-1]) <= {samples} and sum(applied) == run.lead.totals.samples
    # Every version is where L-BFGS on the whole batch is after so many steps.
    for version, w in enumerate(seen):
        assert (w - sequential(samples, version)).abs().max() < 1e-7
