"""The lead's order, driven directly: joins, pushes, leases, deaths; no sockets and no torch."""

import random
from typing import Any

import pytest

from paceline.core.events import Push
from paceline.core.health import QUARANTINE
from paceline.core.leases import LeaseBook
from paceline.core.modes import PushId, parse_mode
from paceline.exceptions import PlanError
from tests.deciding import JsonDecider, replay


def lead_of(mode: str, *, samples: int = 32, batch: int = 4, workers: int = 2, **more: Any) -> JsonDecider:
    """A lead with a book and members 0 … workers-1."""
    spec = parse_mode(mode)
    lead = JsonDecider(spec, **more)
    lead.book = LeaseBook(samples=samples, batch_size=batch, drop_last=False, by_round=spec.by_round)
    for worker in range(workers):
        lead.join(worker, 0)
    return lead


class Worker:
    """A worker's side of the conversation: takes leases one at a time and pushes each."""

    def __init__(self, lead: JsonDecider, rank: int, incarnation: int = 0) -> None:
        self.lead, self.rank, self.incarnation = lead, rank, incarnation
        self.sequence = 0
        self.leases: list[int] = []
        self.samples = 0

    def take(self, epoch: int = 0, limit: int = 1, *, wait: bool = False) -> Any:
        leases, steps = self.lead.take(self.rank, epoch, limit, wait=wait)
        self.leases += [lease.id for lease in leases or ()]
        self.samples += sum(lease.samples for lease in leases or ())
        return leases, steps

    def push(self, *, void: bool = False, version: int | None = None, fetch: bool = True) -> list[list[Any]]:
        push = Push(
            id=PushId(self.rank, self.incarnation, self.sequence),
            read_version=self.lead.version if version is None else version,
            samples=self.samples,
            leases=tuple(self.leases),
            void=void,
            fetch=fetch,
        )
        self.sequence += 1
        self.leases, self.samples = [], 0
        return self.lead.push(push)

    def go_ahead(self) -> None:
        """As far as the mode allows."""
        while self.rank not in self.lead.machine.waiting:
            self.take()
            self.push()


def test_in_bsp_an_epoch_ends_after_the_last_step_of_every_optimizer():
    lead = lead_of("bsp", samples=1)
    lead.several_optimizers = True
    first, second = Worker(lead, 0), Worker(lead, 1)
    first.take()
    assert second.take(wait=True)[0] is None  # the last round has no part for it
    first.push()
    assert lead.granted(1) == ([], []), "a step of another optimizer may follow"
    first.push()
    assert first.take(wait=True)[0] is None
    answers, _ = lead.granted(1)
    assert [(worker, over) for worker, _, over in answers] == [(0, True), (1, True)]
    assert lead.version == 2


def test_in_bsp_a_round_is_one_update_in_rank_order_weighted_by_samples():
    lead = lead_of("bsp", samples=6)
    a, b = Worker(lead, 0), Worker(lead, 1)
    b.take()
    a.take()
    assert b.push() == []
    assert a.push() == [["apply", [[0, 0, 0, 3, 1.0], [1, 0, 0, 3, 1.0]]], ["admit", 0, 1], ["admit", 1, 1]]
    assert [(r.version, r.push.id.worker, r.staleness) for r in lead.applied] == [(0, 0, 0), (0, 1, 0)]
    assert lead.totals.samples == 6
    assert lead.book.accounts()[0]["applied"] == 6


def test_with_a_bound_on_the_norm_an_update_is_reduced_first():
    lead = lead_of("bsp", workers=1, clip_norm=1.0)
    worker = Worker(lead, 0)
    worker.take()
    assert worker.push()[0] == ["reduce", [[0, 0, 0, 4, 1.0]], 0]


def test_asp_applies_at_once_and_records_staleness():
    lead = lead_of("asp")
    a, b = Worker(lead, 0), Worker(lead, 1)
    a.take()
    b.take()
    assert a.push(version=0) == [["apply", [[0, 0, 0, 4, 1.0]]], ["admit", 0, 1]]
    assert b.push(version=0) == [["apply", [[1, 0, 0, 4, 0.5]]], ["admit", 1, 2]]
    assert dict(lead.totals.staleness) == {0: 1, 1: 1}


def test_plain_asp_applies_a_stale_push_in_full():
    lead = lead_of("asp+damping=none")
    a, b = Worker(lead, 0), Worker(lead, 1)
    a.take()
    b.take()
    a.push(version=0)
    assert b.push(version=0) == [["apply", [[1, 0, 0, 4, 1.0]]], ["admit", 1, 2]]


def test_in_backup_a_late_pushs_samples_go_back_to_the_pool():
    lead = lead_of("backup:1", samples=8)
    a, b = Worker(lead, 0), Worker(lead, 1)
    a.take()
    b.take()
    assert a.push(version=0)[0][0] == "apply"
    assert b.push(version=0) == [["drop", 1, 0, 0], ["admit", 1, 1]]
    assert lead.book.remaining == 4
    assert (lead.totals.dropped, lead.totals.samples) == (1, 4)
    assert sum(lead.totals.dropped_of.values()) == 1


def test_a_void_push_keeps_its_place_but_is_not_applied():
    lead = lead_of("bsp")
    a, b = Worker(lead, 0), Worker(lead, 1)
    a.take()
    b.take()
    a.push(void=True)
    assert b.push() == [["apply", [[1, 0, 0, 4, 1.0]]], ["admit", 0, 1], ["admit", 1, 1]]
    assert lead.totals.refused == 1
    account = lead.book.accounts()[0]
    assert (account["applied"], account["refused"]) == (4, 4)


def test_a_repeated_push_is_applied_once():
    lead = lead_of("asp")
    worker = Worker(lead, 0)
    worker.take()
    worker.push()
    worker.sequence = 0
    assert worker.push() == [["drop", 0, 0, 0], ["admit", 0, 1]]
    assert (lead.totals.pushes, lead.totals.dropped) == (1, 1)


@pytest.mark.parametrize("mode", ["bsp", "backup:1", "ssp:0", "ssp:1", "asp"])
def test_a_dead_workers_leases_go_back_and_its_pending_push_is_dropped(mode):
    lead = lead_of(mode, samples=8, workers=3)
    dead = Worker(lead, 1)
    dead.take()
    before = lead.book.remaining
    steps = lead.leave(1, 0, finished=False)
    assert steps[-1] == ["left", 1, 0]
    assert lead.book.remaining > before
    assert lead.book.members == {0, 2}
    assert lead.machine.members == {0, 2}


def test_a_death_in_a_round_lets_the_others_go_on_without_it():
    lead = lead_of("bsp", workers=2)
    a, b = Worker(lead, 0), Worker(lead, 1)
    a.take()
    b.take()
    assert a.push() == []
    steps = lead.leave(1, 0, finished=False)
    assert steps == [["apply", [[0, 0, 0, 4, 1.0]]], ["admit", 0, 1], ["left", 1, 0]]


def test_a_death_after_its_push_drops_it_and_returns_its_samples():
    lead = lead_of("bsp", samples=8, workers=2)
    a, b = Worker(lead, 0), Worker(lead, 1)
    a.take()
    b.take()
    b.push()
    assert lead.leave(1, 0, finished=False) == [["drop", 1, 0, 0], ["left", 1, 0]]
    assert lead.book.remaining == 4
    assert a.push()[0] == ["apply", [[0, 0, 0, 4, 1.0]]]


def test_late_news_of_a_replaced_worker_changes_nothing():
    lead = lead_of("asp")
    lead.leave(1, 0, finished=False)
    lead.join(1, 1)
    new = Worker(lead, 1, incarnation=1)
    new.take()
    assert lead.leave(1, 0, finished=False) == []
    assert lead.book.outstanding[1]
    assert new.push()[0] == ["apply", [[1, 1, 0, 4, 1.0]]]


def test_a_push_of_a_replaced_incarnation_is_dropped_and_finishes_nothing():
    lead = lead_of("asp")
    old = Worker(lead, 1)
    old.take()
    lead.leave(1, 0, finished=False)
    lead.join(1, 1)
    assert old.push() == [["drop", 1, 0, 0]]
    assert lead.totals.samples == 0


def test_who_has_used_up_its_leases_waits_and_gets_those_of_the_dead():
    lead = lead_of("asp", samples=8)
    a, b = Worker(lead, 0), Worker(lead, 1)
    a.take()
    b.take()
    a.push()
    assert a.take(wait=True) == (None, [])
    assert lead.granted(8) == ([], [])
    lead.leave(1, 0, finished=False)
    (answer,), _ = lead.granted(8)
    worker, leases, over = answer
    assert (worker, sum(lease.samples for lease in leases), over) == (0, 4, False)


def test_a_death_while_parked_turns_the_epoch_for_the_others():
    lead = lead_of("asp", samples=8)
    a, b = Worker(lead, 0), Worker(lead, 1)
    a.take()
    b.take()
    b.push()
    b.take(wait=True)
    a.push()
    a.take(wait=True)
    lead.leave(1, 0, finished=False)
    assert lead.granted(8) == ([(0, (), True)], [])
    assert lead.epoch == 1


@pytest.mark.parametrize("does", ["push", "wait"])
@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_script_that_ended_in_an_earlier_epoch_is_named(mode, does):
    """Not when the other one takes leases: it may only look at a batch."""
    lead = lead_of(mode, samples=8)
    a, b = Worker(lead, 0), Worker(lead, 1)
    for worker in (a, b):
        worker.take()
    for worker in (a, b):
        worker.push()
        worker.take(wait=True)
    assert {w for w, _, over in lead.granted(8)[0] if over} == {0, 1}
    lead.leave(1, 0, finished=True)
    assert a.take(epoch=1)[0]
    assert not lead.news  # it may only look at a batch
    a.push() if does == "push" else a.take(epoch=1, wait=True)
    (said,) = lead.news
    assert "worker:1 ended its script after 1 step, in epoch 1, while worker:0 goes on with epoch 2" in said
    assert "paceline.should_stop(condition)" in said
    a.take(epoch=1)
    assert lead.news == [said]  # it is said once


def test_a_script_that_left_its_last_loop_early_does_not_fail_the_others():
    lead = lead_of("bsp", samples=16)
    a, b = Worker(lead, 0), Worker(lead, 1)
    for worker in (a, b):
        worker.take()
    for worker in (a, b):
        worker.push()
    lead.leave(1, 0, finished=True)
    done = 0
    while a.take()[0]:
        done += a.samples
        a.push()
    assert done == 8


def test_without_a_loader_a_script_that_ended_is_noticed_at_the_next_push_in_bsp():
    lead = JsonDecider(parse_mode("bsp"))
    a, b = Worker(lead, 0), Worker(lead, 1)
    lead.join(0, 0)
    lead.join(1, 0)
    a.push()
    b.push()
    lead.leave(1, 0, finished=True)
    a.push()
    (said,) = lead.news
    assert "worker:1 ended its script after 1 step while worker:0 goes on with step 2" in said
    assert lead.version == 2


def test_a_replacement_of_a_finished_worker_is_no_longer_finished():
    lead = lead_of("asp", samples=8)
    a = Worker(lead, 0)
    lead.leave(1, 0, finished=True)
    lead.join(1, 1)
    assert a.take()[0]


def test_a_stream_turns_when_all_readers_are_at_its_end():
    lead = JsonDecider(parse_mode("asp"))
    lead.join(0, 0)
    lead.join(1, 0)
    assert lead.take(0, 0, 0, wait=True)[0] is None
    assert lead.granted(8) == ([], [])
    lead.take(1, 0, 0, wait=True)
    assert [(w, over) for w, _, over in lead.granted(8)[0]] == [(0, True), (1, True)]
    assert lead.epoch == 1


def test_a_snapshot_goes_on_where_it_was_with_what_was_outstanding_back_in_the_pool():
    lead = lead_of("asp", samples=16)
    a, b = Worker(lead, 0), Worker(lead, 1)
    a.take()
    b.take()
    a.push()
    again = lead_of("asp", samples=16, workers=0)
    again.restore(lead.snapshot())
    assert (again.version, again.totals.samples, again.book.remaining) == (1, 4, 12)


@pytest.mark.parametrize("mode", ["bsp", "backup:1", "ssp:0", "ssp:2", "asp"])
def test_whoever_dies_and_comes_back_every_sample_is_applied_exactly_once(mode):
    """Random orders of taking, pushing, dying, replacing and finishing, to the end of every epoch."""
    for seed in range(60):
        _check_random_run(mode, random.Random(seed))


def _check_random_run(mode: str, rng: random.Random) -> None:
    count, samples, epochs = rng.randint(2, 4), rng.randint(9, 60), 3
    lead = lead_of(mode, samples=samples, batch=rng.randint(1, 5), workers=count)
    workers = {rank: Worker(lead, rank) for rank in range(count)}
    epoch = dict.fromkeys(workers, 0)
    # What each worker does next; None: it waits for an answer.
    state: dict[int, str | None] = dict.fromkeys(workers, "take")
    read = dict.fromkeys(workers, 0)
    seen: set[tuple[int, int, int]] = set()

    def hear(steps: list[list[Any]]) -> None:
        for step in steps:
            if step[0] == "apply":
                ids = {tuple(p[:3]) for p in step[1]}
                assert not ids & seen
                seen.update(ids)
            elif step[0] == "admit" and state.get(step[1], "gone") is None:
                state[step[1]], read[step[1]] = "take", step[2]

    def answer() -> None:
        while True:
            answers, steps = lead.granted(4)
            hear(steps)
            if not answers and not steps:
                return
            for rank, leases, over in answers:
                workers[rank].leases += [lease.id for lease in leases]
                workers[rank].samples += sum(lease.samples for lease in leases)
                read[rank] = lead.version
                epoch[rank] += over
                state[rank] = "push" if leases else "take"

    for _ in range(5000):
        if not state:
            break
        able = [rank for rank, what in state.items() if what is not None]
        assert able, f"nobody can go on: {lead.machine.waiting}"
        rank = rng.choice(able)
        worker = workers[rank]
        if rng.random() < 0.03:
            victim = rng.choice(list(state))
            hear(lead.leave(victim, workers[victim].incarnation, finished=False))
            workers[victim] = Worker(lead, victim, workers[victim].incarnation + 1)
            hear(lead.join(victim, workers[victim].incarnation))
            state[victim], read[victim], epoch[victim] = "take", lead.version, 0
        elif epoch[rank] == epochs:
            del state[rank]
            hear(lead.leave(rank, worker.incarnation, finished=True))
        elif state[rank] == "take":
            leases, steps = worker.take(epoch[rank], rng.randint(1, 3), wait=True)
            if leases is None:
                state[rank] = None
            elif leases:
                state[rank] = "push"
            else:
                epoch[rank] += 1
            hear(steps)
        else:
            state[rank] = None
            hear(worker.push(version=read[rank]))
        answer()
    assert not state
    accounts = lead.book.accounts()[:epochs]
    assert [a["applied"] for a in accounts] == [samples] * epochs
    assert lead.totals.samples == samples * epochs


@pytest.mark.parametrize("mode", ["asp", "ssp:40"])
def test_of_two_pushes_of_the_same_samples_the_first_is_applied_and_the_other_dropped(mode):
    lead = JsonDecider(parse_mode(mode))
    lead.book = LeaseBook(samples=60, batch_size=2, drop_last=False, by_round=False, copies="slow")
    sequences = {0: 0, 1: 0}

    def push(worker, lease):
        sequences[worker] += 1
        return lead.push(
            Push(
                id=PushId(worker, 0, sequences[worker]),
                read_version=lead.version,
                samples=2,
                leases=(lease.id,),
                void=False,
            )
        )

    lead.join(0, 0)
    lead.join(1, 0)
    ((slow,), _) = lead.take(0, 0, 1, wait=True)
    steps = []
    for _ in range(30):
        ((lease,), _) = lead.take(1, 0, 1, wait=True)
        steps += push(1, lease)
    late = push(0, slow)
    applied = [tuple(p[:3]) for step in steps + late if step[0] == "apply" for p in step[1]]
    assert len(applied) == len(set(applied)) == 30
    assert all(worker == 1 for worker, _, _ in applied)
    assert ["drop", 0, 0, 1] in late
    assert any(step[:2] == ["admit", 0] for step in late), "its worker goes on all the same"
    assert lead.book.accounts()[0]["applied"] == 60
    assert lead.totals.dropped == 1


def test_the_order_says_who_gets_fresh_parameters():
    """Not the request: a server may be told to answer one that it has not got yet."""
    lead = lead_of("downpour:1,2", workers=1)
    worker = Worker(lead, 0)
    for fetch in (False, True, False):
        worker.take()
        assert worker.push(fetch=fetch)[-1][3:] == ([] if fetch else ["keep"])
    assert worker.push(fetch=False, void=True)[-1][3:] == ["keep"]


def test_with_batches_by_speed_who_is_waited_for_gets_less_and_each_sample_counts_the_same():
    """One worker makes a step in the time in which the other could make many."""
    lead = lead_of("ssp:1+batches=speed", samples=4000, batch=8)
    slow, fast = Worker(lead, 0), Worker(lead, 1)
    sizes = []
    slow.take()
    for _ in range(12):
        fast.go_ahead()
        sizes.append(slow.samples)
        (pushed,) = (step for step in slow.push() if step[0] == "apply")
        assert pushed[1][0][4] == sizes[-1] / 8
        slow.take()
    assert sizes[0] == 8 and sizes == sorted(sizes, reverse=True) and sizes[-1] == 1
    # Now the other one is slow: who waits gets whole batches again.
    fast.take()
    for _ in range(60):
        while 0 not in lead.machine.waiting:
            slow.push()
            slow.take()
        fast.push()
        fast.take()
    assert slow.samples == 8 and fast.samples == 1


def test_batches_are_equal_unless_asked_for_and_after_a_switch():
    for mode in ("ssp:1", "ssp:1+batches=speed"):
        lead = lead_of(mode, samples=4000, batch=8)
        slow, fast = Worker(lead, 0), Worker(lead, 1)
        slow.take()
        for _ in range(5):
            fast.go_ahead()
            slow.push()
            slow.take()
        assert (slow.samples == 8) == (mode == "ssp:1")
        lead.switch(parse_mode("asp"))
        slow.push()
        slow.take()
        assert slow.samples == 8


def test_nobody_falls_behind_by_more_than_an_epoch_also_when_the_mode_changes():
    lead = lead_of("asp", samples=100)
    assert lead.book is not None
    lead.book.deal_by_round(False, copies="slow")
    slow, fast = Worker(lead, 0), Worker(lead, 1)
    slow.take()
    epoch = 0
    for _ in range(60):
        leases, _ = fast.take(epoch, wait=True)
        if leases is None:  # parked
            answers, _ = lead.granted(1)
            if not answers:
                break
            ((_, leases, over),) = answers
            epoch += over
            fast.leases, fast.samples = [each.id for each in leases], sum(each.samples for each in leases)
        if fast.leases:
            fast.push()
    assert epoch == 1 and lead.epoch == 1  # it did the other's last lease in its place, and now it waits
    lead.switch(parse_mode("bsp"))
    assert lead.granted(1)[0] == [] and lead.epoch == 1
    slow.push()
    assert slow.take(0) == ((), [])  # it hears that its epoch is over
    slow.take(1, wait=True)
    assert {who for who, _, _ in lead.granted(1)[0]} == {0, 1} and lead.epoch == 2


def test_workers_that_draw_different_orders_are_named_and_so_is_the_sampler():
    lead = lead_of("asp", workers=3)
    replay(lead, ["order", 0, 0, "abc", "Mine"])
    replay(lead, ["order", 1, 0, "abc", "Mine"])
    replay(lead, ["order", 1, 1, "def", "Mine"])  # it is ahead
    with pytest.raises(PlanError, match=r"worker:2 draws another order .* epoch 1 than worker:0 did, .*Mine"):
        replay(lead, ["order", 2, 0, "other", "Mine"])


def test_a_resumed_run_draws_the_order_that_it_had():
    lead = lead_of("asp")
    replay(lead, ["order", 0, 0, "abc", "Mine"])
    again = lead_of("asp")
    again.restore(lead.snapshot())
    replay(again, ["order", 1, 0, "abc", "Mine"])
    with pytest.raises(PlanError, match="than the run did before it was resumed"):
        replay(again, ["order", 0, 0, "other", "Mine"])


# --- elastic modes ------------------------------------------------------------------------------------


def exchanged(worker: Worker) -> float:
    """The alpha of a worker's exchange, as the order says it."""
    worker.take()
    (pushes,) = (step[1] for step in worker.push() if step[0] == "apply")
    return float(pushes[0][4])


def test_easgds_alpha_follows_the_number_of_workers():
    """With a fixed alpha a run scaled from 2 to 8 workers would have beta = 3.6: the centre overshoots."""
    lead = lead_of("easgd:1,0.9", workers=2, samples=400)
    workers = [Worker(lead, rank) for rank in range(8)]
    assert exchanged(workers[0]) == 0.45
    for rank in range(2, 8):
        lead.join(rank, 0)
    assert exchanged(workers[1]) == exchanged(workers[7]) == 0.9 / 8
    for rank in range(4, 8):
        replay(lead, ["retire", rank])
    assert exchanged(workers[0]) == 0.9 / 4
    lead.leave(5, 0, finished=False)
    assert exchanged(workers[0]) == 0.9 / 4
    # Workers that have died are replaced, and those that have ended their script belong to the run.
    lead.leave(1, 0, finished=False)
    assert exchanged(workers[0]) == 0.9 / 4
    lead.join(1, 1)
    workers[2].take()
    lead.leave(2, 0, finished=True)
    assert exchanged(workers[0]) == 0.9 / 4


def test_easgds_alpha_is_at_most_one():
    """A worker goes to the centre, and not beyond."""
    lead = lead_of("easgd:1,1.8", workers=2)
    worker = Worker(lead, 0)
    assert exchanged(worker) == 0.9
    replay(lead, ["retire", 1])
    assert exchanged(worker) == 1.0


# --- optimizer states ---------------------------------------------------------------------------------


def test_an_optimizer_state_has_one_place_in_the_order():
    lead = lead_of("asp")
    assert replay(lead, ["load", 0, 0, 1]) == [["load", 0, 0, 1]]
    assert replay(lead, ["load", 0, 0, 1]) == [], "said again after a lead has died"
    assert replay(lead, ["load", 1, 0, 1]) == [["load", 1, 0, 1]]
    assert replay(lead, ["load", 0, 0, 2]) == [["load", 0, 0, 2]]
    lead.leave(0, 0, finished=False)
    assert replay(lead, ["load", 0, 0, 3]) == []
    lead.join(0, 1)
    assert replay(lead, ["load", 0, 1, 1]) == [["load", 0, 1, 1]]


def refused_in_turn(fates: str) -> JsonDecider:
    """Pushes of four asp workers: `.` is finite, `x` is not. One word a round, one column a worker."""
    lead = JsonDecider(parse_mode("asp"))
    for worker in range(4):
        lead.join(worker, 0)
    for sequence, line in enumerate(fates.split()):
        for worker, fate in enumerate(line):
            push = PushId(worker, 0, sequence)
            lead.push(Push(push, lead.version, samples=4, leases=(), void=fate == "x"))
    return lead


def test_nan_of_several_workers_at_a_time_is_the_models_fault():
    """A run that diverges: one after the other computes NaN, and now and then one still does not."""
    assert refused_in_turn(".... x... x.x. xxx. xx.x xxxx xxx. x.xx xxxx xxx. xxxx xxxx").sick == []
    assert refused_in_turn(".... .x.. .x.. .x.. .x.. .x..").sick == [1]
    # A single batch of another one is no sign of more.
    assert refused_in_turn(".... x... .x.. .x.x .x.. .x.. .x..").sick == [1]
    # What was so long ago says nothing about now.
    assert refused_in_turn(" ".join(["xx.."] * 4 + ["...."] * 12 + [".x.."] * 5)).sick == [1]


def test_nan_that_servers_find_in_pushes_of_several_workers_is_the_models_fault():
    alone, several = refused_in_turn("...."), refused_in_turn("....")
    for _ in range(QUARANTINE):
        alone.pushes.spoiled(2, alone.machine.members)
        for worker in range(3):
            several.pushes.spoiled(worker, several.machine.members)
    assert (alone.sick, several.sick) == ([2], [])
