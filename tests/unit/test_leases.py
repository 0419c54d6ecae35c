"""Leases by example."""

import json

import pytest

from paceline.core.leases import KEPT_EPOCHS, Copies, Lease, LeaseBook
from paceline.exceptions import UsageError


def book_of(
    samples: int,
    batch_size: int,
    workers: int,
    *,
    by_round: bool = False,
    drop_last: bool = False,
    copies: Copies = "none",
) -> LeaseBook:
    book = LeaseBook(
        samples=samples,
        batch_size=batch_size,
        drop_last=drop_last,
        by_round=by_round,
        copies=copies,
    )
    for worker in range(workers):
        book.joined(worker)
    return book


def ranges(leases: tuple[Lease, ...]) -> list[tuple[tuple[int, int], ...]]:
    return [lease.ranges for lease in leases]


def ids(leases: tuple[Lease, ...]) -> list[int]:
    return [lease.id for lease in leases]


def test_first_come_first_served() -> None:
    book = book_of(10, 4, 2)
    assert book.take(1, 0, 1) == (Lease(0, 0, ((0, 4),)),)
    assert book.take(0, 0, 1) == (Lease(1, 0, ((4, 8),)),)
    (last,) = book.take(0, 0, 5)
    assert (last.ranges, last.samples) == (((8, 10),), 2)
    assert book.take(1, 0, 5) == ()
    assert book.remaining == 0
    assert {worker: ids(leases) for worker, leases in book.outstanding.items()} == {
        0: [1, 2],
        1: [0],
    }


def test_takes_shrink_towards_the_end() -> None:
    book = book_of(80, 1, 2)
    assert len(book.take(0, 0, 100)) == 80 // 4
    assert len(book.take(0, 0, 7)) == 7
    assert len(book.take(0, 0, 100)) == 53 // 4


def test_a_round_is_dealt_in_rank_order_whoever_asks_first() -> None:
    book = book_of(12, 2, 3, by_round=True)
    assert ranges(book.take(2, 0, 1)) == [((4, 6),)]
    assert ranges(book.take(0, 0, 2)) == [((0, 2),), ((6, 8),)]
    assert ranges(book.take(1, 0, 5)) == [((2, 4),), ((8, 10),)]
    assert ranges(book.take(2, 0, 5)) == [((10, 12),)]
    assert book.take(0, 0, 1) == ()


def test_a_short_last_round_is_split_evenly() -> None:
    book = book_of(5, 4, 3, by_round=True)
    shares = [ranges(book.take(worker, 0, 1)) for worker in (2, 1, 0)]
    assert shares == [[((4, 5),)], [((2, 4),)], [((0, 2),)]]


def test_an_empty_share_is_skipped() -> None:
    book = book_of(2, 4, 3, by_round=True)
    assert book.take(2, 0, 3) == ()
    assert ranges(book.take(0, 0, 3)) == [((0, 1),)]
    assert ranges(book.take(1, 0, 3)) == [((1, 2),)]


@pytest.mark.parametrize(("by_round", "unused"), [(False, 2), (True, 6)])
def test_drop_last_leaves_the_short_end_unused(by_round: bool, unused: int) -> None:
    book = book_of(14, 4, 2, by_round=by_round, drop_last=True)
    while leases := book.take(0, 0, 1) + book.take(1, 0, 1):
        for worker in (0, 1):
            book.finish(worker, ids(leases))
    assert book.remaining == unused
    assert book.turn_if_over(set())
    assert book.accounts()[0] == {
        "epoch": 0,
        "samples": 14,
        "applied": 14 - unused,
        "refused": 0,
        "skipped": 0,
        "unused": unused,
    }


def test_what_a_leaver_had_is_dealt_next_in_order() -> None:
    book = book_of(20, 2, 2)
    book.take(0, 0, 2)
    book.take(1, 0, 1)
    book.left(0)
    assert book.remaining == 18
    assert ranges(book.take(1, 0, 4)) == [((0, 2),), ((2, 4),), ((6, 8),), ((8, 10),)]


def test_a_lease_may_be_of_several_ranges() -> None:
    book = book_of(9, 3, 2)
    book.take(0, 0, 1)
    (kept,) = book.take(1, 0, 1)
    book.finish(1, [kept.id])
    (rest,) = book.take(1, 0, 1)
    book.left(0)
    book.give_back(1, [rest.id])
    larger = LeaseBook(samples=9, batch_size=5, drop_last=False, by_round=False)
    larger.restore(book.snapshot())
    larger.joined(0)
    assert ranges(larger.take(0, 0, 1)) == [((0, 3), (6, 8))]


def test_a_leavers_dealt_shares_go_to_the_others() -> None:
    book = book_of(8, 2, 2, by_round=True)
    book.take(0, 0, 2)
    book.left(1)
    assert ranges(book.take(0, 0, 5)) == [((2, 4),), ((6, 8),)]


def test_joining_again_gives_back_what_the_earlier_one_had() -> None:
    book = book_of(4, 4, 1)
    book.take(0, 0, 1)
    book.joined(0)
    assert book.outstanding == {}
    assert ranges(book.take(0, 0, 1)) == [((0, 4),)]


def test_nothing_counts_twice() -> None:
    book = book_of(4, 2, 2)
    (lease,) = book.take(0, 0, 1)
    assert book.finish(1, [lease.id]) == 0
    assert book.finish(0, [lease.id, lease.id]) == 2
    assert book.finish(0, [lease.id]) == 0
    book.give_back(0, [lease.id])
    assert book.accounts()[0]["applied"] == book.remaining == 2


def test_epochs_turn_when_all_is_finished() -> None:
    book = book_of(4, 2, 1)
    first = book.take(0, 0, 1)
    second = book.take(0, 0, 1)
    book.finish(0, ids(first), refused=True)
    assert not book.turn_if_over(set())
    assert book.take(0, 1, 1) == ()
    assert not book.done(0)
    book.finish(0, ids(second))
    assert book.turn_if_over(set())
    assert book.done(0)
    assert book.take(0, 0, 1) == ()
    (third,) = book.take(0, 1, 1)
    assert (third.epoch, third.ranges) == (1, ((0, 2),))
    assert [(a["applied"], a["refused"], a["unused"]) for a in book.accounts()] == [
        (2, 2, 0),
        (0, 0, 0),
    ]


@pytest.mark.parametrize("by_round", [False, True])
def test_all_may_stop_early(by_round: bool) -> None:
    book = book_of(100, 2, 2, by_round=by_round)
    book.finish(0, ids(book.take(0, 0, 1)))
    (held,) = book.take(1, 0, 1)
    assert not book.turn_if_over({0, 1})
    book.give_back(1, [held.id])
    assert not book.turn_if_over({0})
    assert book.turn_if_over({0, 1})
    assert book.accounts()[0]["unused"] == 98


def test_who_stops_early_leaves_the_rest_of_the_rounds_to_the_others() -> None:
    book = book_of(8, 2, 2, by_round=True)
    book.finish(1, ids(book.take(1, 0, 1)))
    assert book.take(0, 1, 1) == ()
    leases = book.take(1, 0, 9)
    assert ranges(leases) == [((0, 2),), ((4, 6),), ((6, 8),)]
    book.finish(1, ids(leases))
    assert book.turn_if_over({0})
    assert ranges(book.take(0, 1, 1)) == [((0, 2),)]


def test_who_stopped_early_and_left_is_forgotten() -> None:
    book = book_of(7, 2, 3, by_round=True, drop_last=True)
    book.take(0, 1, 1)
    book.left(0)
    book.finish(1, ids(book.take(1, 0, 9)))
    book.finish(2, ids(book.take(2, 0, 9)))
    assert book.remaining == 3
    assert book.turn_if_over(set())


def test_an_epoch_does_not_turn_while_everybody_is_being_replaced() -> None:
    book = book_of(4, 2, 1)
    book.left(0)
    assert not book.turn_if_over(set())
    assert book.members == set()


def test_strangers_and_no_limit_get_nothing() -> None:
    book = book_of(4, 2, 1)
    assert book.take(7, 0, 1) == book.take(0, 0, 0) == ()
    book.left(7)
    book.give_back(7, [0])
    assert book.remaining == 4


def test_a_restored_book_has_the_unfinished_in_its_pool() -> None:
    book = book_of(12, 2, 3, by_round=True)
    book.finish(0, ids(book.take(0, 0, 1)))
    book.take(1, 0, 2)
    restored = LeaseBook(samples=12, batch_size=5, drop_last=False, by_round=True)
    restored.restore(json.loads(json.dumps(book.snapshot())))
    assert (restored.remaining, restored.members, restored.outstanding) == (10, set(), {})
    assert restored.accounts() == book.accounts()
    restored.joined(0)
    (lease,) = restored.take(0, 0, 1)
    assert lease.ranges == ((2, 7),)
    assert lease.id not in ids(book.outstanding[1])


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="data set is empty"):
        book_of(0, 1, 1)
    with pytest.raises(UsageError, match="batch_size=0"):
        book_of(1, 0, 1)
    with pytest.raises(UsageError, match=r"has 5 samples, .* on 4"):
        book_of(5, 1, 1).restore(book_of(4, 1, 1).snapshot())


def test_an_epoch_does_not_wait_for_carried_leases_and_counts_them_where_they_belong():
    """Gradient accumulation over the end of an epoch: the step comes in the next one."""
    book = book_of(4, 2, 1)
    first, second = book.take(0, 0, 1) + book.take(0, 0, 1)
    book.finish(0, [first.id])
    assert not book.turn_if_over(set())
    book.carry(0, [second.id])
    assert book.turn_if_over(set())
    (third,) = book.take(0, 1, 1)
    assert book.finish(0, [second.id, third.id]) == 4
    assert [account["applied"] for account in book.accounts()] == [4, 2]


@pytest.mark.parametrize("how", ["left", "given back", "restored"])
def test_a_carried_lease_whose_worker_is_gone_is_unused_in_its_own_epoch(how):
    book = book_of(4, 2, 2)
    (applied,), (carried,) = book.take(0, 0, 1), book.take(1, 0, 1)
    book.finish(0, [applied.id])
    book.carry(1, [carried.id])
    assert book.turn_if_over(set())
    if how == "left":
        book.left(1)
    elif how == "given back":
        book.give_back(1, [carried.id])
    else:
        snapshot = json.loads(json.dumps(book.snapshot()))
        book = book_of(4, 2, 0)
        book.restore(snapshot)
    assert book.accounts()[0] == {
        "epoch": 0,
        "samples": 4,
        "applied": 2,
        "refused": 0,
        "skipped": 0,
        "unused": 2,
    }
    assert book.remaining == 4


def test_a_carried_lease_of_an_epoch_that_goes_on_returns_to_the_pool():
    book = book_of(6, 2, 2)
    (lease,) = book.take(1, 0, 1)
    book.carry(1, [lease.id])
    book.left(1)
    assert book.remaining == 6 and ranges(book.take(0, 0, 1)) == [((0, 2),)]


# Twins


def twins(samples: int = 2, workers: int = 3) -> tuple[LeaseBook, Lease, Lease]:
    """A book with all samples in one lease, held by worker 0, and its copy, held by worker 1."""
    book = book_of(samples, samples, workers, copies="any")
    (original,), (copy,) = book.take(0, 0, 5), book.take(1, 0, 5)
    assert copy.ranges == original.ranges and copy.id != original.id
    return book, original, copy


def test_an_idle_worker_gets_a_copy_of_the_oldest_lease_that_is_out() -> None:
    book = book_of(6, 2, 4, copies="any")
    taken = [book.take(worker, 0, 1)[0] for worker in (0, 0, 1)]
    assert book.take(0, 0, 5) == book.take(1, 0, 5) == ()  # they have work
    assert book.take(2, 0, 0) == ()
    assert ranges(book.take(2, 0, 5)) == [taken[0].ranges]
    assert book.take(2, 0, 5) == ()
    assert ranges(book.take(3, 0, 5)) == [taken[1].ranges]
    assert book.finish(1, [taken[2].id]) == 2
    assert book.take(1, 0, 5) == ()  # what is out is out twice
    assert book.remaining == 0


def test_without_the_option_or_by_rounds_there_are_no_copies() -> None:
    for copies, by_round in (("none", False), ("any", True)):
        book = book_of(4, 2, 2, copies=copies, by_round=by_round)
        book.take(0, 0, 1)
        book.finish(1, ids(book.take(1, 0, 1)))
        assert book.take(1, 0, 5) == ()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("refused", [False, True])
def test_the_first_of_two_twins_counts_and_the_other_is_void(first: int, refused: bool) -> None:
    book, *leases = twins()
    assert book.fresh(0, [leases[0].id]) and book.fresh(1, [leases[1].id])
    assert not book.fresh(0, [leases[1].id])
    assert book.finish(first, [leases[first].id], refused=refused) == 2
    late = 1 - first
    assert not book.fresh(late, [leases[late].id])
    assert book.outstanding == {}
    assert book.turn_if_over(set())
    assert book.finish(late, [leases[late].id]) == 0
    book.give_back(late, [leases[late].id])
    account = book.accounts()[0]
    assert (account["applied"], account["refused"], account["unused"]) == (
        (0, 2, 0) if refused else (2, 0, 0)
    )
    assert book.remaining == 2


def test_a_push_is_void_if_one_of_its_leases_is_done() -> None:
    book = book_of(4, 2, 2, copies="any")
    (first,), (second,) = book.take(0, 0, 1), book.take(0, 0, 1)
    (copy,) = book.take(1, 0, 1)
    book.finish(1, [copy.id])
    assert not book.fresh(0, [first.id, second.id])
    book.give_back(0, [first.id, second.id])
    assert ranges(book.take(1, 0, 1)) == [second.ranges]
    assert book.fresh(0, []) and not book.fresh(7, [first.id])


@pytest.mark.parametrize("gone", [0, 1])
def test_one_twin_is_enough(gone: int) -> None:
    book, *leases = twins()
    if gone:
        book.left(gone)
    else:
        book.give_back(gone, [leases[gone].id])
    assert book.remaining == 0
    assert not book.turn_if_over(set())
    (again,) = book.take(2, 0, 1)  # single again, so it may be copied again
    assert book.finish(2, [again.id]) == 2
    assert book.outstanding == {}


def test_when_both_twins_are_gone_their_samples_are_free() -> None:
    book, *_ = twins(workers=2)
    book.left(0)
    book.joined(1)
    assert book.remaining == 2
    assert ranges(book.take(1, 0, 1)) == [((0, 2),)]


def test_a_short_rest_that_is_dropped_does_not_keep_from_copying() -> None:
    book = book_of(5, 2, 3, copies="any", drop_last=True)
    book.take(0, 0, 1)
    book.take(1, 0, 1)
    assert ranges(book.take(2, 0, 1)) == [((0, 2),)]
    assert book.remaining == 1


def test_a_carried_lease_is_not_copied_and_may_lose_to_its_twin() -> None:
    book, original, copy = twins()
    book.carry(0, [original.id])
    assert not book.turn_if_over(set())  # the twin is waited for
    book.carry(1, [copy.id])
    assert book.take(2, 0, 1) == ()
    assert book.turn_if_over(set())
    assert book.finish(1, [copy.id]) == 2
    assert not book.fresh(0, [original.id])
    assert book.accounts()[0]["applied"] == 2


def test_nobody_helps_with_a_carried_lease() -> None:
    """Its gradient is there already: its worker waits with it for the next epoch."""
    book = book_of(2, 2, 2, copies="any")
    book.carry(0, ids(book.take(0, 0, 1)))
    assert book.take(1, 0, 1) == ()


def test_going_back_to_an_older_snapshot_forgets_twins() -> None:
    book = book_of(2, 2, 2, copies="any")
    older = book.snapshot()
    book.take(0, 0, 1)
    book.take(1, 0, 1)
    book.restore(older)
    book.joined(0)
    book.take(0, 0, 1)
    book.left(0)
    assert book.remaining == 2


@pytest.mark.parametrize("carried", [False, True])
def test_twins_are_in_a_snapshot_once(carried: bool) -> None:
    book, original, copy = twins()
    if carried:
        book.carry(0, [original.id])
        book.carry(1, [copy.id])
        book.turn_if_over(set())
    restored = book_of(2, 2, 0)
    restored.restore(json.loads(json.dumps(book.snapshot())))
    assert restored.remaining == 2
    assert restored.accounts()[0]["unused"] == (2 if carried else 0)
    restored.joined(0)
    assert ids(restored.take(0, restored.epoch, 1)) == [copy.id + 1]


# Changing between rounds and first come, first served


def test_what_was_dealt_by_rounds_and_not_taken_is_dealt_again() -> None:
    book = book_of(12, 2, 3, by_round=True)
    book.take(1, 0, 1)
    book.deal_by_round(False)
    assert book.remaining == 10
    assert ranges(book.take(0, 0, 1)) == [((0, 2),)]
    assert ranges(book.take(0, 0, 1)) == [((4, 6),)]
    book.deal_by_round(True)
    assert ranges(book.take(2, 0, 1)) == [((10, 12),)]
    assert ranges(book.take(0, 0, 9)) == [((6, 8),)]
    assert ranges(book.take(1, 0, 9)) == [((8, 10),)]
    book.deal_by_round(True)
    assert book.remaining == 0


def test_twins_outlive_a_change_to_rounds() -> None:
    book, original, copy = twins()
    book.deal_by_round(True)
    assert book.take(2, 0, 1) == ()
    assert book.finish(1, [copy.id]) == 2
    assert book.finish(0, [original.id]) == 0
    assert book.turn_if_over(set())


# --- copies of what the slow hold -------------------------------------------------------------------


def test_whoever_is_twice_as_fast_gets_a_copy_of_a_slow_workers_last_lease():
    book = LeaseBook(samples=60, batch_size=2, drop_last=False, by_round=False, copies="slow")
    for worker in (0, 1):
        book.joined(worker)
    (slow,) = book.take(0, 0, 1)
    done = 0
    while leases := book.take(1, 0, 1):
        if leases[0].ranges == slow.ranges:
            break
        book.finish(1, [leases[0].id])
        done += 1
    assert done == 29 and leases[0].ranges == slow.ranges
    assert book.take(1, 0, 1) == (), "one copy of it"
    assert book.finish(1, [leases[0].id]) == 2
    assert not book.fresh(0, [slow.id])
    assert book.finish(0, [slow.id]) == 0, "the other one was first"
    assert book.turn_if_over(set())
    assert book.accounts()[0]["applied"] == 60


def test_workers_of_about_one_speed_wait_for_each_other():
    book = LeaseBook(samples=12, batch_size=2, drop_last=False, by_round=False, copies="slow")
    for worker in (0, 1):
        book.joined(worker)
    for _ in range(2):
        for worker in (0, 1):
            (lease,) = book.take(worker, 0, 1)
            book.finish(worker, [lease.id])
    (last,) = book.take(0, 0, 1)
    (mine,) = book.take(1, 0, 1)
    book.finish(1, [mine.id])
    assert book.take(1, 0, 1) == ()
    book.finish(0, [last.id])
    assert book.accounts()[0]["applied"] == 12


def test_smaller_batches_add_up_to_the_part_that_they_are():
    book = LeaseBook(samples=1000, batch_size=8, drop_last=False, by_round=False)
    book.joined(0)
    book.joined(1)
    taken = [lease.id for lease in book.take(0, 0, 2)]
    book.resize(0, taken, 0.3125)
    book.resize(0, taken, 0.3125)  # these cannot show the change before
    sizes = [book.take(0, 0, 1)[0].samples for _ in range(40)]
    assert set(sizes) == {2, 3} and sum(sizes) == 2.5 * 40
    assert book.take(1, 0, 1)[0].samples == 8
    book.resize(0, [10**6], 1e-9)
    assert [lease.samples for lease in book.take(0, 0, 3)] == [1, 1]  # few, so that a change is soon seen
    book.resize(0, [10**6], 1e9)
    assert book.take(0, 0, 1)[0].samples == 8
    book.resize(7, [10**6], 0.5)  # nobody
    assert book.part(0, 2) == 0.25 and book.part(0, 9) == 1.0


@pytest.mark.parametrize("drop_last", [False, True])
def test_with_smaller_batches_an_epoch_still_counts_every_sample(drop_last):
    book = LeaseBook(samples=101, batch_size=8, drop_last=drop_last, by_round=False)
    book.joined(0)
    book.joined(1)
    book.resize(0, [0], 0.4)
    while not book.done(0):
        for worker in (0, 1):
            for lease in book.take(worker, 0, 2):
                book.finish(worker, [lease.id])
        book.turn_if_over(set())
    account = book.accounts()[0]
    assert account["applied"] + account["unused"] == 101
    assert account["unused"] < (8 if drop_last else 1)


def epochs_of(book: LeaseBook, count: int) -> None:
    for _ in range(count):
        epoch = book.epoch
        while not book.done(epoch):
            for lease in book.take(0, epoch, 4):
                book.finish(0, [lease.id], refused=lease.ranges[0][0] == 0)
            book.turn_if_over(set())


def test_a_book_does_not_grow_with_the_epochs_and_their_sums_stay_right():
    book = LeaseBook(samples=40, batch_size=8, drop_last=False, by_round=False)
    book.joined(0)
    epochs_of(book, 2 * KEPT_EPOCHS)
    before = len(json.dumps(book.snapshot()))
    epochs_of(book, 1000)
    assert book.epoch == 2 * KEPT_EPOCHS + 1000
    assert len(json.dumps(book.snapshot())) < before + 300  # longer numbers
    accounts, earlier = book.accounts(), book.earlier()
    assert [account["epoch"] for account in accounts] == list(range(book.epoch + 1))[-KEPT_EPOCHS:]
    assert earlier["epochs"] + len(accounts) == book.epoch + 1
    for what, each in (("applied", 32), ("refused", 8), ("unused", 0)):
        assert sum(account[what] for account in [earlier, *accounts]) == each * book.epoch
    again = LeaseBook(samples=40, batch_size=8, drop_last=False, by_round=False)
    again.restore(json.loads(json.dumps(book.snapshot())))
    assert (again.accounts(), again.earlier(), again.epoch) == (accounts, earlier, book.epoch)


def test_what_is_carried_out_of_an_epoch_of_long_ago_is_still_counted():
    book = LeaseBook(samples=40, batch_size=8, drop_last=False, by_round=False)
    book.joined(0)
    book.joined(1)
    (carried,) = book.take(1, 0, 1)
    book.carry(1, [carried.id])
    epochs_of(book, KEPT_EPOCHS + 10)
    assert book.snapshot()["earlier"]["unused"] == 8
    assert book.finish(1, [carried.id]) == 8
    earlier = book.earlier()
    assert earlier["applied"] + earlier["refused"] == earlier["samples"] == 40 * earlier["epochs"]


def test_a_snapshot_with_an_account_of_every_epoch_can_be_restored():
    """As books wrote them before they kept sums."""
    book = LeaseBook(samples=40, batch_size=8, drop_last=False, by_round=False)
    accounts = [
        {"epoch": e, "samples": 40, "applied": 39, "refused": 1, "unused": 0} for e in range(3 * KEPT_EPOCHS)
    ]
    book.restore({"samples": 40, "accounts": accounts, "pool": [[0, 40]], "next_id": 7})
    assert book.epoch == 3 * KEPT_EPOCHS - 1
    assert book.earlier() == {
        "epochs": 2 * KEPT_EPOCHS,
        "samples": 80 * KEPT_EPOCHS,
        "applied": 78 * KEPT_EPOCHS,
        "refused": 2 * KEPT_EPOCHS,
        "skipped": 0,
        "unused": 0,
    }


def test_skipped_samples_are_not_dealt_again_and_count_as_skipped() -> None:
    book = book_of(8, 4, 2)
    (first,) = book.take(0, 0, 1)
    (second,) = book.take(1, 0, 1)
    assert book.skip(0, [first.id, second.id]) == 4, "the second is not its own"
    assert book.skip(0, [first.id]) == 0, "it counts once"
    assert book.take(0, 0, 1) == ()
    book.finish(1, [second.id])
    assert book.turn_if_over(set())
    account = book.accounts()[0]
    assert (account["applied"], account["skipped"], account["unused"]) == (4, 4, 0)


def test_a_skipped_lease_with_a_twin_is_still_the_twins() -> None:
    book = book_of(4, 4, 2, copies="any")
    (lease,) = book.take(0, 0, 1)
    (copy,) = book.take(1, 0, 1)
    assert book.skip(1, [copy.id]) == 0 and book.finish(0, [lease.id]) == 4


def test_a_snapshot_of_before_there_were_skipped_samples_can_be_read() -> None:
    book = book_of(8, 4, 1)
    snapshot = book.snapshot()
    for account in snapshot["accounts"]:
        del account["skipped"]
    book.restore(snapshot)
    assert book.accounts()[0]["skipped"] == 0
