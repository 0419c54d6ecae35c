"""Batches that the script reads and makes no step with: counted as skipped, and in no gradient's weight.

Data come in order (no shuffling): in bsp worker r of w has batch r of each w.
"""

import pytest
import torch
from torch import nn

from paceline.observe.analyse import wording

SETUP = """
def build():
    torch.manual_seed(7)
    return nn.Linear(6, 3).double()

def samples(n):
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=g).double(), torch.randint(0, 3, (n,), generator=g))

loss_of = nn.functional.cross_entropy
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_a_batch_without_a_step_is_skipped_and_weighs_nothing(run):
    """Three rounds of two workers; worker 1 skips its first batch by `continue`, and worker 0 the step of its
    second one, as a gradient scaler does. The last round has 3 and 2 samples, and is weighed by those."""
    ran = run(
        SETUP
        + """
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(21), batch_size=4))
for i, (x, y) in enumerate(loader):
    if (RANK, i) == (1, 0):
        continue
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    if (RANK, i) != (0, 1):
        optimizer.step()
"""
    )
    assert ran.error is None, ran.error
    (account, *_) = ran.status.leases
    assert (account["applied"], account["skipped"], account["unused"]) == (13, 8, 0)
    assert ran.status.samples == 13 and ran.status.skipped == 8
    assert wording.trouble(ran.status) == ["8 samples skipped"]
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(21, 6, generator=g).double(), torch.randint(0, 3, (21,), generator=g)
    torch.manual_seed(7)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # A worker's n-th push meets the other's n-th: batches (0, 3), then (4, 5).
    for parts in ([(0, 4), (12, 16)], [(16, 19), (19, 21)]):
        optimizer.zero_grad()
        rows = [i for a, b in parts for i in range(a, b)]
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ran.model[name], value, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "mode, prefetch", [("asp", 0), ("asp", 2), ("allreduce", 0), ("local:2", 0)], ids=str
)
def test_skipped_and_applied_samples_are_all_samples_in_other_modes(run, mode, prefetch):
    """Every third batch has no step, on all workers at the same place (a group steps together)."""
    ran = run(
        SETUP
        + """
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(48), batch_size=4))
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        if i % 3 != 2:
            optimizer.step()
        optimizer.zero_grad()
""",
        mode=mode,
        threads=1,
        prefetch=prefetch,
    )
    assert ran.error is None, ran.error
    done = [a for a in ran.status.leases if a["applied"]]
    assert len(done) == 2
    for account in done:
        assert account["applied"] + account["skipped"] == 48 and account["skipped"] >= 8
    assert ran.status.samples == sum(a["applied"] for a in done)
    assert ran.status.skipped == sum(a["skipped"] for a in done)


def test_what_a_broken_off_loop_had_in_hand_goes_back_to_the_pool(run):
    """Worker 1 leaves its loop with a batch in hand that it has not trained on: worker 0 does it."""
    ran = run(
        SETUP
        + """
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(40), batch_size=4))
seen = 0
for i, (x, y) in enumerate(loader):
    if RANK == 1 and i == 1:
        break
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()
    seen += len(x)
result(seen)
""",
        mode="asp",
        threads=1,
    )
    assert ran.error is None, ran.error
    assert ran.status.leases[0]["applied"] == 40 and ran.status.skipped == 0
    assert ran.results()[0] + ran.results()[1] == 40


def test_a_stream_counts_what_it_skips(run):
    ran = run(
        SETUP
        + """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(*samples(24).tensors))

model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(Stream(), batch_size=4))
for i, (x, y) in enumerate(loader):
    if i == 1:
        continue
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()
"""
    )
    assert ran.error is None, ran.error
    assert ran.status.samples == 16 and ran.status.skipped == 8
