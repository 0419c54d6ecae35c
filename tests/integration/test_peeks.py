"""A peek: a script reads batches of the prepared loader and makes no step. It changes nothing of the run."""

import pytest
import torch

SETUP = """
torch.manual_seed(7)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(44, 6, generator=g), torch.randint(0, 3, (44,), generator=g))
"""

TRAIN = """
seen = []
for epoch in range(2):
    peek("before")
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen.append(x[:, 0].tolist())
peek("after")
result(seen)
"""

PEEKS = """
kept = []
def peek(when):
    if not paceline.is_main():
        return
    x, y = next(iter(loader))
    assert x.shape == (4, 6)
    model(x)  # as if to draw its graph
    again = iter(loader)
    assert torch.equal(next(again)[0], x)
    kept.append(again)  # still there when the training begins
    for i, _ in enumerate(loader):
        if i == 2:
            break

def server_log():
    return (RUN_DIR / "logs" / "server-0.log").read_text()
"""

NO_PEEKS = "def peek(when): pass\n"


def script(peeks: str, loader: str = "DataLoader(data, batch_size=4, shuffle=True)") -> str:
    prepared = f"model, optimizer, loader = paceline.prepare(model, optimizer, {loader})\n"
    return SETUP + prepared + peeks + TRAIN


@pytest.mark.parametrize("mode", ["bsp", "allreduce", "hybrid:bsp"])
def test_a_peek_on_one_rank_changes_not_a_bit(run, mode):
    job = {"mode": mode, "workers": 2, "threads": 1}
    if mode.startswith("hybrid"):
        job |= {"workers": 4, "groups": 2}
    plain, peeked = (run(script(peeks), **job) for peeks in (NO_PEEKS, PEEKS))
    assert plain.error is None, plain.error
    assert peeked.error is None, peeked.error
    assert peeked.results() == plain.results()
    assert peeked.status.samples == plain.status.samples == 88 and peeked.status.skipped == 0
    assert all(torch.equal(peeked.model[name], value) for name, value in plain.model.items())


@pytest.mark.parametrize("mode", ["asp", "local:2", "sandblaster"])
def test_a_peek_costs_no_sample_in_other_modes(run, mode):
    ran = run(script(PEEKS), mode=mode, threads=1)
    assert ran.error is None, ran.error
    assert [a["applied"] for a in ran.status.leases if a["applied"]] == [44, 44]


def test_a_peek_at_a_loader_with_processes_of_its_own(run):
    ran = run(script(PEEKS, "DataLoader(data, batch_size=4, shuffle=True, num_workers=1)"), mode="bsp")
    assert ran.error is None, ran.error
    assert [a["applied"] for a in ran.status.leases if a["applied"]] == [44, 44]


def test_a_peek_at_a_stream(run):
    stream = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(*data.tensors))
"""
    ran = run(
        SETUP
        + stream
        + "loader = DataLoader(Stream(), batch_size=4)\n"
        + "model, optimizer, loader = paceline.prepare(model, optimizer, loader)\n"
        + PEEKS
        + TRAIN
    )
    assert ran.error is None, ran.error
    assert ran.status.samples == 88


def test_a_peek_after_the_others_have_ended(run):
    """It enters an epoch that nobody else will see; only a step in it would be wrong."""
    late = PEEKS.replace("    x, y = next(iter(loader))\n", WAIT_FOR_THE_OTHER, 1)
    ran = run(script(late), mode="asp", threads=1)
    assert ran.error is None, ran.error
    assert [a["applied"] for a in ran.status.leases if a["applied"]] == [44, 44]


WAIT_FOR_THE_OTHER = """
    while when == "after" and "worker:1 finished" not in server_log():
        pass
    x, y = next(iter(loader))
"""


def test_an_iterator_that_another_one_ended_says_so(run):
    ran = run(
        script(NO_PEEKS).replace("seen = []", "seen = []\nfor a, b in zip(loader, loader): pass"), workers=1
    )
    assert ran.error is not None and "has one iterator at a time" in ran.error
