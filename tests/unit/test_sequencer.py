"""Which steps are executed when: second halves of updates, checkpoints between updates, and catching up."""

import pytest

from paceline.core.modes import PushId
from paceline.core.placement import Placement
from paceline.core.sequencer import OrderLog, Sequencer
from paceline.core.steps import (
    AdmitStep,
    ApplyStep,
    AskStep,
    CheckpointStep,
    CommitStep,
    DropStep,
    PlaceStep,
    ReduceStep,
    Steps,
    VectorsStep,
)

CHECKPOINT = CheckpointStep(3, "there")


def due() -> Steps:
    return [CHECKPOINT]


def not_due() -> Steps:
    return []


def test_a_checkpoint_is_cut_behind_the_last_update_and_before_anybody_goes_on() -> None:
    steps: Steps = [ApplyStep(()), AdmitStep(0, 1), ApplyStep(()), AdmitStep(1, 2)]
    now, held = Sequencer().order(steps, 2, due)
    assert now == [*steps[:3], CHECKPOINT, steps[3]] and held == []


@pytest.mark.parametrize("step", [AdmitStep(0, 1), DropStep(PushId(0, 0, 1)), ReduceStep((), 1), AskStep([])])
def test_without_an_update_nobody_asks_whether_a_checkpoint_is_due(step: AdmitStep) -> None:
    def fail() -> Steps:
        raise AssertionError

    assert Sequencer().order([step], 1, fail).now == [step]


def test_what_follows_a_reduce_waits_until_the_norms_of_all_slices_are_known() -> None:
    sequencer = Sequencer(clip_norm=1.0)
    reduce, admit, drop = ReduceStep((), 7), AdmitStep(0, 8), DropStep(PushId(1, 0, 0))
    assert sequencer.order([reduce, admit], 2, not_due) == ([reduce], [admit])
    assert sequencer.waiting
    assert sequencer.order([drop], 2, not_due) == ([], [drop])
    assert sequencer.reduced(7, [(0, 4.0)], 2, due) is None
    assert sequencer.reduced(6, [(1, 1e9)], 2, due) is None, "of another update"
    steps = sequencer.reduced(7, [(1, 12.0)], 2, due)
    assert steps is not None
    commit, *rest = steps
    assert isinstance(commit, CommitStep) and commit.scale == pytest.approx(1 / 4)
    assert rest == [CHECKPOINT, admit, drop]
    assert not sequencer.waiting and sequencer.held == []
    assert sequencer.order(steps, 2, not_due) == (steps, [])


def test_between_the_halves_of_the_next_update_no_checkpoint_is_cut() -> None:
    sequencer = Sequencer(clip_norm=1.0)
    after = ReduceStep((), 8)
    sequencer.order([ReduceStep((), 7), after], 1, not_due)
    steps = sequencer.reduced(7, [(0, 0.0)], 1, due)
    assert steps == [CommitStep(1.0), after]


def test_what_follows_an_ask_waits_for_every_servers_answer() -> None:
    sequencer = Sequencer()
    ask, admit = AskStep([["dot", "g", "g"]]), AdmitStep(0, 1)
    assert sequencer.order([ask, admit], 2, not_due) == ([ask], [admit])
    assert sequencer.answered([1.0]) is None
    assert sequencer.answered([None]) == ([[1.0], [None]], [admit])
    assert not sequencer.waiting
    assert sequencer.order([VectorsStep([], ())], 2, due).now[-1] == CHECKPOINT


def test_a_follower_goes_on_with_an_update_that_is_half_done() -> None:
    sequencer = Sequencer(clip_norm=1.0)
    sequencer.take_over(7, [AdmitStep(0, 8)])
    assert sequencer.waiting
    assert sequencer.reduced(7, [(0, 0.0)], 1, not_due) == [CommitStep(1.0), AdmitStep(0, 8)]
    other = Sequencer()
    other.take_over(None, [])
    assert not other.waiting


def test_a_server_that_is_behind_gets_what_it_lacks() -> None:
    log = OrderLog(kept=4)
    steps: Steps = [AdmitStep(0, version) for version in range(30)]
    for step in steps:
        log.extend([step])
    assert log.position == 30
    for missing in range(5):
        assert log.since(30 - missing) == steps[30 - missing :]
    assert log.since(31) is None and log.since(10) is None
    late = OrderLog(kept=4)
    late.begin_at(7)
    late.extend(steps[:2])
    assert late.since(8) == steps[1:2] and late.since(6) is None


def test_a_checkpoint_has_the_slices_of_a_server_that_died_between_the_halves_of_an_update() -> None:
    """Servers save the slices that they answer for: the placement without the dead server comes first."""
    sequencer = Sequencer(clip_norm=1.0)
    admit, place, drop = (
        AdmitStep(0, 8),
        PlaceStep(Placement(1, frozenset({0}), ((0,),))),
        DropStep(PushId(1, 0, 0)),
    )
    sequencer.order([ReduceStep((), 7), admit], 2, not_due)
    sequencer.order([place, drop], 1, not_due)
    assert sequencer.reduced(7, [(0, 0.0)], 1, due) == [CommitStep(1.0), admit, place, CHECKPOINT, drop]
