"""What a worker claims of its push is believed within what its leases allow."""

import pytest

from paceline.core.claims import MOST_OF_A_BATCH, believed
from paceline.core.events import Push
from paceline.core.leases import LeaseBook
from paceline.core.modes import PushId
from paceline.core.server.worker_requests import PushRequest
from tests.leading import Led


def book(batch_size: int = 4) -> LeaseBook:
    found = LeaseBook(samples=64, batch_size=batch_size, drop_last=False, by_round=False)
    found.joined(0, 1)
    found.joined(1, 1)
    return found


def push(samples: int, *leases: int, worker: int = 0) -> Push:
    return Push(PushId(worker, 0, 0), 0, samples, leases, False)


def test_a_push_has_at_most_the_samples_of_its_leases() -> None:
    found = book()
    ids = [lease.id for lease in found.take(0, 0, 3)]
    assert len(ids) == 3
    assert believed(push(12, *ids), found) == (push(12, *ids), None)
    for lie in (13, 10**17):
        counted, said = believed(push(lie, *ids), found)
        assert counted.samples == 12
        assert said is not None and said.startswith("worker:0 says")
    assert believed(push(9, ids[0], ids[0], ids[0]), found)[0].samples == 4, "a lease counts once"


def test_a_push_without_leases_of_its_own_has_at_most_a_batch() -> None:
    found = book()
    (theirs,) = [lease.id for lease in found.take(1, 0, 1)]
    for leases in ((), (theirs,), (10**9,)):
        assert believed(push(4, *leases), found)[1] is None
        assert believed(push(5, *leases), found)[0].samples == 4


def test_batches_of_a_scripts_own_sampler_may_be_large() -> None:
    found = book(batch_size=1)
    (lease,) = found.take(0, 0, 1)
    assert believed(push(32, lease.id), found)[1] is None
    assert believed(push(10**17, lease.id), found)[0].samples == MOST_OF_A_BATCH


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_totals_are_those_of_the_leases(mode: str) -> None:
    led = Led(mode, samples=16)
    assert led.decider.book is not None
    for worker in range(2):
        led.take(worker, 1, limit=1)
    mine, theirs = (led.decider.book.outstanding[worker][0].id for worker in range(2))
    lie = Push(PushId(0, 0, 0), 0, 10**15, (mine,), False)
    led.do(led.machine.request(PushRequest(0, 1, lie), led.now))
    led.push(1, 0, theirs)
    assert led.decider.totals.samples == 8
    assert led.decider.book.accounts()[0]["applied"] == 8
