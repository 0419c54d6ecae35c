"""Workers keep to cores of their own, if asked."""

import os

import pytest

TRAIN = """
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.prepare(model, optimizer)
model(torch.ones(4, 6)).square().mean().backward()
optimizer.step()
result(sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux can pin processes")
def test_pinned_workers_have_cores_of_their_own(run):
    allowed = sorted(os.sched_getaffinity(0))
    ran = run(TRAIN, workers=2, threads=1, pin=True)
    assert ran.error is None, ran.error
    assert ran.results() == {rank: [allowed[rank % len(allowed)]] for rank in range(2)}


def test_others_may_use_every_core(run):
    ran = run(TRAIN, workers=2, threads=1)
    assert ran.error is None, ran.error
    assert ran.results() == {rank: sorted(os.sched_getaffinity(0)) for rank in range(2)}
