"""When a worker sends its buffers to the servers: worker/buffers.py."""

import pytest
from torch import nn

from paceline.worker import buffers
from paceline.worker.buffers import BufferSchedule
from paceline.worker.prepared import Models


class Clock:
    """Stands in for the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(buffers, "time", fake)
    return fake


def test_a_model_without_buffers_never_sends_any(clock):
    frozen = nn.Linear(2, 2).requires_grad_(False)
    schedule = BufferSchedule(
        Models([nn.Sequential(nn.Linear(2, 2), frozen)]), {"0.weight", "0.bias"}, workers=1
    )
    assert not schedule.due


def test_the_first_shipment_is_due_at_once_and_then_the_workers_take_turns(clock):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    schedule = BufferSchedule(Models([model]), {name for name, _ in model.named_parameters()}, workers=4)
    assert schedule.due
    part = schedule.collect()
    assert set(part) == {"buffer:0.running_mean", "buffer:0.running_var", "buffer:0.num_batches_tracked"}
    model[0].running_mean.fill_(7)
    assert part["buffer:0.running_mean"].tolist() == [0, 0], "a copy: the model goes on"
    schedule.sent()
    assert not schedule.due
    clock.now += 4 * buffers.EVERY_S
    assert schedule.due


def test_buffers_that_take_long_to_send_are_sent_less_often(clock):
    schedule = BufferSchedule(Models([nn.BatchNorm1d(2)]), {"weight", "bias"}, workers=1)
    schedule.collect()
    clock.now += 0.1
    schedule.sent()
    clock.now += 9.9
    assert not schedule.due
    clock.now += 0.2
    assert schedule.due
