"""Staleness is of an optimizer's own parameters: updates of other optimizers do not count."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.events import Push
from paceline.core.modes import PushId, parse_mode
from paceline.core.staleness import RecentUpdates
from tests.deciding import JsonDecider


@given(of=st.lists(st.sets(st.integers(0, 2), min_size=1), max_size=30), data=st.data())
def test_only_updates_of_the_same_optimizer_count(of: list[set[int]], data: st.DataObject) -> None:
    updates, start = RecentUpdates(), data.draw(st.integers(0, 5))
    for before, optimizers in enumerate(of, start):
        updates.made(before, optimizers)
    now = start + len(of)
    read = data.draw(st.integers(start, now))
    for optimizer in range(3):
        expected = sum(optimizer in each or len(each) > 1 for each in of[read - start :])
        assert updates.staleness(read, now, optimizer) == expected


def test_memory_is_bounded_and_what_is_forgotten_counts() -> None:
    updates = RecentUpdates()
    for before in range(10_000):
        updates.made(before, {before % 2})
    assert len(updates.stretches) <= 2048
    assert updates.staleness(9_000, 10_000, 0) == 500
    assert 5_000 < updates.staleness(0, 10_000, 0) <= 10_000


def test_an_update_of_one_optimizer_shortens_no_step_of_another() -> None:
    lead = JsonDecider(parse_mode("asp+period=2"))
    lead.several_optimizers = True
    lead.join(0, 0)
    for sequence in range(6):  # each optimizer fetched at its own last push
        read = max(0, sequence - 1)
        lead.push(Push(PushId(0, 0, sequence), read, 4, (), False, optimizer=sequence % 2))
    assert lead.totals.staleness == {0: 6}
