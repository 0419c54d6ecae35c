"""What a server needs to execute a step, which slices it sends, and for which process an answer is."""

from types import SimpleNamespace
from typing import Any

from paceline.core.modes import PushId
from paceline.core.placement import Placement
from paceline.core.server.departures import Departures
from paceline.core.server.slice_transfers import SliceTransfers
from paceline.core.server.step_needs import can_execute
from paceline.core.steps import AdmitStep, ApplyStep, HoldStep, LoadStep, PlaceStep, Step, WeightedPush

PUSH = PushId(0, 1, 5)


def ready(
    step: Step, *, here: tuple[PushId, ...] = (), incarnation: int | None = 1, slices: bool = False
) -> bool:
    worker: Any = SimpleNamespace(incarnation=incarnation)
    workers = {} if incarnation is None else {0: worker}
    return can_execute(step, pushes=here, loads=here, workers=workers, has_slices=lambda placement: slices)


def test_an_update_waits_for_a_push_unless_its_worker_is_gone() -> None:
    for step in (ApplyStep((WeightedPush(*PUSH, 1.0, 1.0),)), HoldStep(PUSH), LoadStep(PUSH)):
        assert not ready(step) and ready(step, here=(PUSH,))
        assert ready(step, incarnation=None) and ready(step, incarnation=2)
    assert ready(AdmitStep(0, 1))


def test_a_placement_waits_for_the_slices_that_change_hands() -> None:
    before = Placement(1, frozenset({0}), ((0,), (0,)))
    after = Placement(2, frozenset({0, 1}), ((1, 0), (0, 1)))
    assert not ready(PlaceStep(after)) and ready(PlaceStep(after), slices=True)
    giver: SliceTransfers[str] = SliceTransfers()
    assert giver.due(before, after, 0) == [(1, [0, 1])] and giver.due(before, after, 0) == []
    assert giver.complete(before, after, 0)
    taker: SliceTransfers[str] = SliceTransfers()
    assert taker.due(before, after, 1) == [] and not taker.complete(before, after, 1)
    taker.receive(2, "both")
    assert taker.complete(before, after, 1) and taker.take(2) == ["both"]


def test_answers_to_a_process_that_is_gone_are_not_for_the_next_one() -> None:
    """The next one would take them for answers to its own requests, and push before its last push is
    applied."""
    departures = Departures()
    assert departures.answers_present(0)
    departures.gone(0, 0)
    assert not departures.answers_present(0) and departures.answers_present(1)
    departures.left(0, 0)
    assert departures.answers_present(0)
    departures.gone(0, 0)
    assert departures.answers_present(0), "the order said it first"
    departures.gone(0, 1)
    departures.left(0, 2)
    assert departures.answers_present(0), "one that the leader has never seen"
