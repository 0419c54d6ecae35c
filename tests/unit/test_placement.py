"""Placements: every slice has its holders, and whoever is left has what is needed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.exceptions import FrameError
from paceline.params import Placement, describe


def layout(parts: int):
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))
    return describe(model, torch.optim.SGD(model.parameters(), lr=0.1), servers=parts)[0]


LAYOUT = layout(8)

servers = st.integers(1, 6)


@given(servers, st.integers(0, 5))
def test_every_slice_has_an_owner_and_its_copies_on_others(count, replicas):
    placement = Placement.over(LAYOUT, range(count), replicas)
    assert len(placement.holders) == len(LAYOUT.slices)
    for holders in placement.holders:
        assert len(set(holders)) == len(holders) == min(replicas, count - 1) + 1
    owned = [i for rank in range(count) for i in placement.owned(rank)]
    assert sorted(owned) == [*range(len(LAYOUT.slices))]
    assert Placement.from_json(placement.to_json()) == placement


@given(st.integers(2, 6), st.data())
def test_as_many_deaths_as_replicas_lose_nothing_and_one_more_may(count, data):
    replicas = data.draw(st.integers(1, count - 1))
    placement: Placement | None = Placement.over(LAYOUT, range(count), replicas)
    dying = data.draw(st.permutations(range(count)))
    for rank in dying[:replicas]:
        assert placement is not None
        before, placement = placement, placement.without(rank)
        assert placement is not None
        assert rank not in placement.servers
        assert placement.number == before.number + 1
        assert not any(before.gains(placement, other) for other in placement.servers), "nobody needs more"
    for rank in dying[replicas:]:
        placement = placement.without(rank) if placement is not None else None
    assert placement is None, "the last one has nobody to take its place"


@given(servers, servers, st.integers(0, 2))
def test_whoever_gains_slices_gets_them_from_those_that_owned_them(before, after, replicas):
    old, new = (
        Placement.over(LAYOUT, range(before), replicas),
        Placement.over(LAYOUT, range(after), replicas, 1),
    )
    for rank in new.servers:
        gains = old.gains(new, rank)
        assert {i for slices in gains.values() for i in slices} == {*new.held(rank)} - {*old.held(rank)}
        assert all(old.holders[i][0] == owner for owner, slices in gains.items() for i in slices)


def test_who_comes_back_gets_what_it_had():
    first = Placement.over(LAYOUT, range(3), 1)
    second = Placement.over(LAYOUT, range(3), 1, number=5)
    assert second.holders == first.holders
    lost = first.without(1)
    assert lost is not None
    assert {i for slices in lost.gains(second, 1).values() for i in slices} == {*first.held(1)}
    assert not lost.gains(second, 0)
    assert not lost.gains(second, 2)


@pytest.mark.parametrize("data", [None, [], [0, [0]], [0, [0], [[1]]], [0, [0], [[]]], ["x", [0], [[0]]]])
def test_nonsense_is_refused(data):
    with pytest.raises(FrameError):
        Placement.from_json(data)
