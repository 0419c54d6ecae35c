"""Rows: every member of a group reads its part of the same leases, whenever it comes for them."""

from paceline.core.events import Push
from paceline.core.leases import LeaseBook
from paceline.core.modes import PushId, parse_mode
from paceline.core.rows import Rows
from tests.deciding import JsonDecider


def book(samples: int, *, by_round: bool = True, **widths: int) -> LeaseBook:
    made = LeaseBook(samples=samples, batch_size=2, drop_last=False, by_round=by_round)
    for worker, width in widths.items():
        made.joined(int(worker[1:]), width)
    return made


# --- the book ---------------------------------------------------------------------------------------


def test_a_wide_member_is_dealt_as_many_batches_as_it_has_workers():
    """w0 stands for two workers, w2 for three: the round is what five workers would get."""
    deal = book(13, w0=2, w2=3)
    (first,), (second,) = deal.take(0, 0, 1), deal.take(2, 0, 1)
    assert (first.ranges, second.ranges) == (((0, 4),), ((4, 10),))
    # 3 samples are left for 5 workers: the first three seats get one each.
    assert [lease.ranges for lease in deal.take(0, 0, 1)] == [((10, 12),)]
    assert [lease.ranges for lease in deal.take(2, 0, 1)] == [((12, 13),)]


def test_a_group_without_a_sample_in_a_short_round_gets_none():
    deal = book(11, w0=2, w2=3)
    deal.take(0, 0, 1)
    deal.take(2, 0, 1)
    assert [lease.samples for lease in deal.take(0, 0, 1)] == [1]
    assert deal.take(2, 0, 1) == ()


def test_first_come_rows_are_as_wide_as_who_comes():
    deal = book(30, by_round=False, w0=2, w2=3)
    assert [lease.samples for lease in deal.take(2, 0, 1)] == [6]
    assert [lease.samples for lease in deal.take(0, 0, 1)] == [4]


def test_drop_last_drops_a_round_that_is_short_for_all_workers():
    deal = LeaseBook(samples=19, batch_size=2, drop_last=True, by_round=True)
    deal.joined(0, 2)
    deal.joined(2, 3)
    assert [lease.samples for lease in deal.take(0, 0, 8)] == [4]
    assert [lease.samples for lease in deal.take(2, 0, 8)] == [6]
    assert deal.remaining == 9


# --- rows -------------------------------------------------------------------------------------------


def test_members_get_the_same_rows_in_the_same_order_whoever_comes_first():
    deal, rows = book(60, w0=3), Rows([0, 1, 2])
    ahead = rows.take(deal, 2, 0, 4)
    behind = rows.take(deal, 0, 0, 2) + rows.take(deal, 0, 0, 8)
    rest = rows.take(deal, 1, 0, 8)
    assert [lease.id for lease in ahead] == [0, 1, 2, 3]
    assert behind == rest == ahead
    assert deal.outstanding == {0: ahead}  # in the book it is the root's


def test_rows_that_everybody_has_are_forgotten():
    deal, rows = book(6000, w0=2), Rows([0, 1])
    for _ in range(500):
        for worker in (0, 1):
            rows.take(deal, worker, 0, 1)
        assert len(rows._drawn) <= 1


def test_when_the_root_stops_early_what_others_drew_goes_back_too():
    deal, rows = book(40, w0=2, w2=2), Rows([0, 1])
    mine = rows.take(deal, 0, 0, 2)
    rows.take(deal, 1, 0, 4)
    deal.finish(0, [mine[0].id])
    rows.give_back(deal, [mine[1].id])
    assert rows.take(deal, 0, 1, 8) == ()
    assert deal.outstanding == {}
    # Its members get no more of this epoch, whatever their loaders still ask for.
    assert rows.take(deal, 1, 0, 8) == ()
    other = deal.take(2, 0, 8)
    assert deal.finish(2, [lease.id for lease in other]) + 4 <= 40


def test_a_member_that_is_ahead_of_its_root_does_not_end_the_epoch_for_it():
    deal, rows = book(16, w0=2), Rows([0, 1])
    assert rows.take(deal, 1, 1, 8) == ()
    assert [lease.samples for lease in rows.take(deal, 0, 0, 1)] == [4]


def test_a_new_epoch_begins_with_its_own_rows():
    deal, rows = book(4, w0=2), Rows([0, 1])
    (only,) = rows.take(deal, 0, 0, 8)
    assert rows.take(deal, 1, 0, 8) == (only,)
    deal.finish(0, [only.id])
    assert deal.turn_if_over({0})
    (new,) = rows.take(deal, 1, 1, 8)
    assert new.epoch == 1
    assert rows.take(deal, 0, 1, 8) == (new,)
    assert rows.take(deal, 0, 0, 8) == ()


# --- the lead ---------------------------------------------------------------------------------------


def lead_of(mode: str, groups: list[list[int]], samples: int = 24) -> JsonDecider:
    lead = JsonDecider(parse_mode(mode), groups=groups)
    lead.book = LeaseBook(samples=samples, batch_size=2, drop_last=False, by_round=parse_mode(mode).by_round)
    for group in groups:
        for worker in group:
            lead.join(worker, 0)
    return lead


def push(worker: int, sequence: int, version: int, leases: list[int], samples: int) -> Push:
    return Push(
        id=PushId(worker, 0, sequence),
        read_version=version,
        samples=samples,
        leases=tuple(leases),
        void=False,
    )


def test_only_roots_are_members_of_the_mode():
    lead = lead_of("hybrid:bsp", [[0, 1], [2, 3]])
    assert lead.machine.members == lead.book.members == {0, 2}
    assert [lead.speaks(w) for w in range(4)] == [True, False, True, False]
    assert lead.leave(3, 0, finished=False) == [["left", 3, 0]]
    assert lead.machine.members == {0, 2}


def test_an_epoch_ends_for_all_members_when_the_roots_pushes_are_applied():
    lead = lead_of("allreduce", [[0, 1, 2]], samples=12)
    taken = {w: lead.take(w, 0, 8, wait=False)[0] for w in (1, 0, 2)}
    assert taken[0] == taken[1] == taken[2] and len(taken[0]) == 2
    # Another member has used up its rows before the root has: it waits, and nothing rests.
    assert lead.take(1, 0, 8, wait=True) == (None, [])
    for sequence, lease in enumerate(taken[0]):
        assert lead.granted(8) == ([], [])
        lead.push(push(0, sequence, sequence, [lease.id], lease.samples))
    assert lead.granted(8) == ([(1, (), True)], [])
    assert lead.take(0, 0, 8, wait=True) == ((), [])
    assert lead.totals.samples == 12 and lead.epoch == 1


def test_rows_that_come_back_reach_a_resting_group_and_all_its_members():
    """backup between groups: the late push's row is drawn again by whoever is free."""
    lead = lead_of("hybrid:backup:1", [[0, 1], [2, 3]], samples=8)
    ((mine,), _), ((late,), _) = (lead.take(root, 0, 1, wait=False) for root in (0, 2))
    assert [lead.take(w, 0, 1, wait=False)[0] for w in (1, 3)] == [(mine,), (late,)]
    lead.push(push(0, 0, 0, [mine.id], 4))
    assert lead.take(1, 0, 8, wait=True)[0] is None
    assert lead.take(0, 0, 8, wait=True)[0] is None
    lead.push(push(2, 0, 0, [late.id], 4))  # version 0 is complete already: dropped
    answers, _ = lead.granted(8)
    assert [(w, [r.ranges for r in rows]) for w, rows, _ in answers] == [
        (0, [late.ranges]),
        (1, [late.ranges]),
    ]


def test_a_step_that_was_not_finite_is_refused_once_with_its_samples():
    lead = lead_of("hybrid:local:2", [[0, 1]], samples=12)
    rows, _ = lead.take(0, 0, 8, wait=False)
    lead.refuse(0, [rows[0].id])
    assert lead.totals.refused == 1
    assert lead.book.accounts()[0]["refused"] == rows[0].samples


def test_groups_in_bsp_assign_together():
    """The lowest root's values count, as with single workers."""
    lead = lead_of("hybrid:bsp", [[0, 1], [2, 3]])
    assert lead.assign(PushId(2, 0, 0)) == []
    assert lead.assign(PushId(0, 0, 0)) == [
        ["drop", 2, 0, 0],
        ["assign", 0, 0, 0],
        ["admit", 0, 0],
        ["admit", 2, 0],
    ]
