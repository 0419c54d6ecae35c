"""Servers that come and go: when the next placement is ordered, and who is told of it."""

from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.layout import Layout
from paceline.core.placement import Placement
from paceline.core.placement_changes import PlacementChanges
from paceline.params import describe


@pytest.fixture
def layout() -> Layout:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    groups = [{"params": layer.parameters()} for layer in model]
    found, _ = describe(model, torch.optim.SGD(groups, lr=0.1), servers=3)
    return found


def come(changes: PlacementChanges, rank: int) -> None:
    changes.newcomers[rank] = {"port": rank}
    changes.adopted.add(rank)


def test_a_placement_with_a_new_server_waits_until_every_worker_is_ready(layout: Layout) -> None:
    changes, latest = PlacementChanges(replicas=1), Placement.over(layout, [0, 1], 1)
    assert not changes.needed(latest)
    come(changes, 2)
    assert changes.needed(latest)
    changes.plan(layout, latest, {0, 1})
    assert changes.take_ready({0, 1}) is None
    body: dict[str, Any] = {}
    changes.inform(0, latest, body)
    assert body["next"][0][0] == 1 and body["next"][1] == {"2": {"port": 2}}
    again: dict[str, Any] = {}
    changes.inform(0, latest, again)
    assert again == {}, "it is told once"
    assert not changes.ready(0, 7) and not changes.ready(0, None), "of another placement"
    assert changes.ready(0, 1)
    assert changes.attached(3) is not None, "who attaches meanwhile is told, and waited for"
    changes.left(1)
    assert changes.take_ready({0, 3}) is None
    changes.ready(3, 1)
    change = changes.take_ready({0, 3})
    assert change is not None and change.placement.servers == {0, 1, 2}
    assert changes.change is None and not changes.newcomers and not changes.adopted


def test_a_newer_plan_takes_the_place_of_one_and_has_another_number(layout: Layout) -> None:
    changes, latest = PlacementChanges(replicas=0), Placement.over(layout, [0], 0)
    come(changes, 1)
    changes.plan(layout, latest, {0})
    come(changes, 2)
    changes.plan(layout, latest, {0})
    assert not changes.ready(0, 1), "of the plan before"
    assert changes.ready(0, 2)
    changes.gone(1)
    changes.gone(2)
    assert not changes.needed(latest) and changes.take_ready({0}) is None


def test_a_server_that_leaves_may_end_when_it_gave_all_and_every_worker_knows(layout: Layout) -> None:
    changes, latest = PlacementChanges(replicas=0), Placement.over(layout, [0, 1, 2], 0)
    changes.departing.add(2)
    assert changes.needed(latest)
    changes.plan(layout, latest, set())
    change = changes.take_ready(set())
    assert change is not None and change.placement.servers == {0, 1}
    changes.settling = {1, 2}
    changes.outdated = {0, 5}
    assert not changes.placed(2, leaves=True)
    assert changes.free_to_end({0}, lambda worker: True) == []
    assert changes.free_to_end({0}, lambda worker: False) == [2], "a group's root tells the others"
    body: dict[str, Any] = {}
    changes.inform(0, change.placement, body)
    assert body == {"placement": change.placement.to_json()}
    assert changes.free_to_end({0}, lambda worker: True) == [2], "worker 5 is gone"
    assert changes.placed(1, leaves=False) and not changes.placed(1, leaves=False)


def test_copies_that_are_missing_need_a_change(layout: Layout) -> None:
    changes = PlacementChanges(replicas=1)
    whole = Placement.over(layout, [0, 1, 2], 1)
    less = whole.without(1)
    assert less is not None
    assert changes.complete(whole) and not changes.complete(less)
    assert changes.needed(less)
    changes.highest = 40
    changes.plan(layout, less, {0})
    assert changes.change is not None and changes.change.placement.number == 41


def test_a_server_that_is_to_leave_and_is_in_no_placement_has_nothing_to_give_away(layout: Layout) -> None:
    changes, latest = PlacementChanges(replicas=0), Placement.over(layout, [0, 1], 0)
    come(changes, 2)
    changes.departing = {1, 2}
    assert changes.release_idle(latest) == [2]
    assert changes.departing == {1} and not changes.newcomers and not changes.adopted
    assert changes.free_to_end({0}, lambda worker: True) == [2]
    assert changes.release_idle(latest) == []
