"""A bound on norms: what is usual is learnt, one worker's absurdity refused, everybody's followed."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.events import Push
from paceline.core.health import QUARANTINE
from paceline.core.leases import LeaseBook
from paceline.core.modes import PushId, parse_mode
from paceline.core.norms import LEAST, WINDOW, NormBound, SliceNorms
from paceline.worker import reporter
from tests.deciding import JsonDecider


def test_nothing_is_refused_before_something_is_usual():
    bound = NormBound(10)
    assert not any(bound.is_absurd(10.0**k) for k in range(LEAST))


def test_what_is_far_above_the_usual_is_refused_and_a_spike_is_not():
    bound, chance = NormBound(1000), random.Random(0)
    for _ in range(500):
        assert not bound.is_absurd(chance.lognormvariate(0, 1.5))
    assert not bound.is_absurd(100.0)
    assert bound.is_absurd(1e4)
    assert bound.is_absurd(float("inf"))
    assert not bound.is_absurd(1e-9)


def test_norms_that_shrink_as_training_goes_on_stay_within_it():
    bound = NormBound(1000)
    assert not any(bound.is_absurd(1.0 / (step + 1) ** 2) for step in range(1000))


def test_when_everybodys_norms_change_for_good_the_bound_follows():
    bound = NormBound(1000)
    for _ in range(WINDOW):
        bound.is_absurd(1.0)
    refused = [bound.is_absurd(1e5) for _ in range(WINDOW)]
    assert refused[0] and not refused[-1]
    assert sum(refused) <= WINDOW // 2 + 1


def test_where_all_is_zero_nothing_is_absurd():
    bound = NormBound(1000)
    for _ in range(WINDOW):
        bound.is_absurd(0.0)
    assert not bound.is_absurd(1.0)


class Pushing:
    """A lead with two workers that push gradients of a norm."""

    def __init__(self, mode: str) -> None:
        spec = parse_mode(mode)
        self.lead = JsonDecider(spec, norm_bound=1000.0)
        self.lead.book = LeaseBook(samples=4000, batch_size=4, drop_last=False, by_round=spec.by_round)
        self.sequences = [0, 0]
        for worker in range(2):
            self.lead.join(worker, 0)

    def push(self, worker: int, norm: float) -> list[list[Any]]:
        leases, _ = self.lead.take(worker, 0, 1, wait=False)
        assert leases
        push = Push(
            id=PushId(worker, 0, self.sequences[worker]),
            read_version=self.lead.version,
            samples=4,
            leases=tuple(lease.id for lease in leases),
            void=False,
            norm=norm,
        )
        self.sequences[worker] += 1
        return self.lead.push(push)


@pytest.mark.parametrize("mode", ["bsp", "asp", "asp+quorum=2"])
def test_an_absurd_push_is_refused_counted_and_its_worker_quarantined(mode):
    run = Pushing(mode)
    for _ in range(LEAST):
        run.push(0, 1.0)
        run.push(1, 1.0)
    version = run.lead.version
    for _ in range(QUARANTINE):
        steps = run.push(1, 1e4) + run.push(0, 1.0)
        applied = [push for step in steps if step[0] == "apply" for push in step[1]]
        assert all(push[0] == 0 for push in applied)
        mine = [step for step in steps if step[0] == "drop"]
        assert mine == [["drop", 1, 0, run.sequences[1] - 1]]  # no server keeps what will not be applied
    assert run.lead.version > version
    assert run.lead.totals.refused == QUARANTINE
    assert run.lead.sick == [1]
    account = run.lead.book.accounts()[0]
    assert account["refused"] == 4 * QUARANTINE


def test_a_push_that_says_no_norm_is_not_judged():
    run = Pushing("asp+damping=none")
    push = Push(id=PushId(0, 0, 0), read_version=0, samples=4, leases=(), void=False)
    for _ in range(LEAST):
        run.push(1, 1.0)
    assert ["apply", [[0, 0, 0, 4, 1.0]]] in run.lead.push(push)
    unbound = JsonDecider(parse_mode("asp"))
    unbound.join(0, 0)
    assert ["apply", [[0, 0, 0, 4, 1.0]]] in unbound.push(push._replace(norm=1e30))


# --- the norm of an update, from the norms of its slices ----------------------------------------------


def test_the_norm_of_an_update_is_known_when_every_slice_is():
    norms = SliceNorms()
    norms.expect(7)
    assert norms.add(7, [(0, 9.0), (2, 4.0)], 3) is None
    assert norms.add(7, [(2, 4.0)], 3) is None, "a copy of a slice that is known"
    assert norms.add(7, [(1, 12.0)], 3) == 5.0
    assert norms.add(7, [(2, 4.0)], 3) is None, "late: the other copy was enough"


@given(
    joined=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    orders=st.permutations(range(4)),
)
def test_it_does_not_matter_when_a_server_joined(joined, orders):
    """Ten updates; server k is there from update joined[k] on, and one from the first."""
    norms = SliceNorms()
    for number in range(10):
        there = [0, *(k + 1 for k, since in enumerate(joined) if since <= number)]
        norms.expect(number)
        slices = {i: there[i % len(there)] for i in range(8)}
        answers = [
            norms.add(number, [(i, 1.0) for i, holder in slices.items() if holder == server], len(slices))
            for server in sorted(there, key=lambda server: orders[server % 4])
        ]
        assert [a for a in answers if a is not None] == [8.0**0.5], number


# --- norms that nobody asked for ------------------------------------------------------------------------


def test_norms_are_told_now_and_then_by_scripts_that_log_no_loss(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(reporter.time, "perf_counter", lambda: now[0])

    def norm() -> float:
        now[0] += 0.005  # of a large model
        return 3.0

    sampling = reporter.NormSampling()
    told = 0
    for _ in range(1000):  # steps of 10 ms
        if sampling.due:
            assert sampling.measured(norm) == 3.0
            told += 1
        now[0] += 0.01
    assert told == 10  # a second apart: 5 ms in 1,005
    sampling.logged(["accuracy"])
    now[0] += 10
    assert sampling.due
    sampling.logged(["accuracy", "train_loss"])
    now[0] += 1e6
    assert not sampling.due
    sampling.measured(norm)  # for --norm-bound
    assert not sampling.due
