"""What a script keeps beside its model, and which epochs it has left."""

import collections
import math

import numpy as np
import pytest
import torch

import paceline
from paceline.exceptions import UsageError
from paceline.worker.epochs import EpochCounter
from paceline.worker.script_state import KeptState


def kept_and_back(**values: object) -> KeptState:
    """Through a checkpoint, into the state of a script that was started again."""
    kept, again = KeptState(), KeptState()
    kept.ask(values)
    again.put_back(kept.tensors())
    return again


def test_values_come_back_as_what_they_were():
    values = {
        "best": math.inf,
        "count": 3,
        "score": np.float32(0.5),
        "name": "é",
        "nothing": None,
        "pairs": [(1, "a"), {2: [True]}],
        "seen": collections.Counter("aab"),
    }
    again = kept_and_back(**values)
    assert {name: getattr(again.bag, name) for name in again.bag} == values
    assert type(again.bag.pairs[0]) is tuple and type(again.bag.seen) is collections.Counter


def test_tensors_come_back_too_also_inside_a_state_dict():
    model = torch.nn.Linear(3, 2)
    again = kept_and_back(average=model.state_dict(), last=[torch.tensor(2.5)])
    torch.nn.Linear(3, 2).load_state_dict(again.bag.average)
    assert torch.equal(again.bag.average["weight"], model.weight)
    assert again.bag.last[0] == 2.5


def test_first_values_do_not_overwrite_what_was_kept_whichever_comes_first():
    again = kept_and_back(best=0.7)
    assert again.ask({"best": 0.0, "patience": 2}).best == 0.7
    assert again.bag.patience == 2
    later = KeptState()
    bag = later.ask({"best": 0.0})  # before prepare()
    later.put_back(kept_and_back(best=0.7).tensors())
    assert bag.best == 0.7


@pytest.mark.parametrize("value", [object(), lambda: None, torch.nn.Linear(1, 1), [{1, 2}]])
def test_what_cannot_be_kept_is_refused_where_it_is_assigned(value):
    bag = KeptState().ask({"best": 0.0})
    with pytest.raises(UsageError, match=r"paceline.state: best cannot be kept: \w+ is not kept"):
        bag.best = value
    assert bag.best == 0.0
    with pytest.raises(AttributeError, match="has no 'worst'; it has best"):
        bag.worst  # noqa: B018


def test_the_servers_are_sent_what_is_new_and_not_too_often():
    kept = KeptState()
    assert not kept.due and not kept.tensors()
    bag = kept.ask({"best": 0.0})
    assert kept.due
    kept.sent()
    assert not kept.due
    bag.best = 1.0
    assert not kept.due, "sent again at once"


def test_alone_all_epochs_are_left_and_state_is_the_scripts_own():
    assert [*paceline.epochs(3)] == [0, 1, 2]
    assert len(paceline.epochs(3)) == 3
    with pytest.raises(UsageError, match="how many"):
        paceline.epochs(-1)


class FakeLoader:
    def __init__(self) -> None:
        self.next_epoch = 0

    def begin_with(self, epoch: int) -> None:
        self.next_epoch = max(self.next_epoch, epoch)

    def read(self) -> int:
        self.next_epoch += 1
        return self.next_epoch - 1


def counter(start: int, loader: FakeLoader | None, **kept: int) -> EpochCounter:
    return EpochCounter(start, loader, KeptState(), ended=lambda: False)


@pytest.mark.parametrize("start", range(7))
def test_two_loops_one_after_the_other_are_each_given_what_is_left_of_them(start):
    loader = FakeLoader()
    epochs = counter(start, loader)
    done = [(loop, epoch, loader.read()) for loop, n in (("a", 2), ("b", 4)) for epoch in epochs.loop(n)]
    every = [("a", 0, 0), ("a", 1, 1), ("b", 0, 2), ("b", 1, 3), ("b", 2, 4), ("b", 3, 5)]
    assert done == every[start:]


def test_a_loop_that_is_left_early_is_followed_by_the_next_epoch_of_the_run():
    loader = FakeLoader()
    epochs = counter(0, loader)
    for _ in epochs.loop(5):
        if loader.read() == 1:
            break
    assert [(epoch, loader.read()) for epoch in epochs.loop(2)] == [(0, 2), (1, 3)]


def test_no_epoch_begins_once_the_run_ends_early():
    loader, stop = FakeLoader(), []
    epochs = EpochCounter(0, loader, KeptState(), ended=lambda: bool(stop))
    for epoch in epochs.loop(5):
        loader.read()
        if epoch == 2:
            stop.append(True)
    assert loader.next_epoch == 3


def test_without_a_loader_the_epoch_that_was_begun_last_is_done_again():
    kept = KeptState()
    epochs = iter(EpochCounter(0, None, kept, ended=lambda: False).loop(5))
    assert [next(epochs), next(epochs), next(epochs)] == [0, 1, 2]
    again = KeptState()
    again.put_back(kept.tensors())
    assert [*EpochCounter(0, None, again, ended=lambda: False).loop(5)] == [2, 3, 4]


def test_more_than_one_pass_an_epoch_is_warned_of_once(caplog):
    loader = FakeLoader()
    for _ in counter(0, loader).loop(4):
        loader.read()
        loader.read()
    assert [r.getMessage() for r in caplog.records] == [
        "paceline.epochs() counts passes over the prepared loader, and the script has made 2 of them in 1 "
        "epochs: a resume would begin with another epoch. Make one pass in each."
    ]
