"""Scripts that make their own batches (nanoGPT's get_batch): steps are counted, and samples as they say."""

import pytest

SOURCE = """
torch.manual_seed(7)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.prepare(model, optimizer)
for step in range(10):
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    COUNT
"""


@pytest.mark.parametrize("mode", ["bsp", "asp", "allreduce", "dogwild"])
def test_samples_are_those_that_the_script_counts(run, mode):
    ran = run(SOURCE.replace("COUNT", "paceline.log(loss=1.0, samples=4)"), mode=mode, threads=1)
    assert ran.error is None, ran.error
    status = ran.status
    assert not status.loader and status.samples == 2 * 10 * 4
    assert [worker.clock for worker in status.workers.values()] == [10, 10] and status.steps_per_s > 0
    assert status.metrics == {"loss": 1.0}


def test_without_a_count_there_are_steps_only(run):
    ran = run(SOURCE.replace("COUNT", ""), threads=1)
    assert ran.error is None, ran.error
    assert not ran.status.loader and ran.status.samples == 0 and ran.status.steps == 20


def test_a_count_that_is_none_is_refused(run):
    ran = run(SOURCE.replace("COUNT", "paceline.log(samples=0.5)"), workers=1, threads=1)
    assert ran.error is not None and "must be a whole number" in ran.error
