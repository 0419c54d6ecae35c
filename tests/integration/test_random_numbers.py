"""Every worker draws random numbers of its own after prepare(), with and without a seed in the script."""

import json
import os
import subprocess
import sys

import pytest

from paceline.exceptions import UsageError
from paceline.worker.alone import order_seed
from tests.integration.conftest import PRELUDE

SOURCE = """
import random, numpy

torch.manual_seed(0)
model = nn.Linear(4, 2)
weight = model.weight.sum().item()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return torch.ones(4), torch.initial_seed()

def mask():
    return nn.functional.dropout(torch.ones(64), 0.5).tolist()

# Its processes draw from its own generator, which the script seeded the same on all workers.
loader = DataLoader(Data(), batch_size=2, num_workers=1, generator=torch.Generator().manual_seed(7))
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
drawn = [mask(), numpy.random.rand(), random.random()]
seeds = []
if RANK == 1 and (RUN_DIR / "killed").exists():
    (RUN_DIR / "back").touch()
for epoch in range(2):
    while RANK == 0 and epoch == 1 and not (RUN_DIR / "back").exists():
        os.sched_yield()  # so that whoever comes back finds something to do
    for x, seed in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seeds.append(int(seed[0]))
        if RANK == 1 and not (RUN_DIR / "killed").exists():
            (RUN_DIR / "killed").touch()
            (RUN_DIR / "result-9.json").write_text(json.dumps([drawn, seeds, weight]))
            os.kill(os.getpid(), signal.SIGKILL)
result([drawn, seeds, weight])
"""


def test_masks_and_loader_seeds_differ_by_worker_and_by_attempt_and_weights_do_not(run):
    """Worker 1 kills itself; who takes its place draws neither its numbers nor worker 0's."""
    ran = run(SOURCE, workers=2, mode="bsp", threads=1)
    assert ran.error is None, ran.error
    each = ran.results()
    assert sorted(each) == [0, 1, 9]
    for values in zip(*(drawn for drawn, _, _ in each.values()), strict=True):
        assert len({str(value) for value in values}) == 3
    seeds = [set(seeds) for _, seeds, _ in each.values()]
    assert all(seeds), "somebody read nothing"
    assert not seeds[0] & seeds[1] and not seeds[0] & seeds[2] and not seeds[1] & seeds[2]
    assert len({weight for _, _, weight in each.values()}) == 1


STREAM = """
import random

class Shuffled(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from torch.randperm(16).tolist()
        for _ in range(8):
            yield 100 + random.randrange(10**6)

torch.manual_seed(0)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(Shuffled(), batch_size=2))
epochs = []
for epoch in range(2):
    seen = []
    for x in loader:
        torch.rand(RANK + 1), random.random()
        model(x[:, None].float()).sum().backward()
        optimizer.step()
        seen.append(x.tolist())
    epochs.append(seen)
result(epochs)
"""


def test_a_stream_that_shuffles_is_the_same_on_all_workers(run):
    """Each takes its part by counting, so all must see one order, whatever else they draw meanwhile."""
    ran = run(STREAM, workers=2, mode="bsp", threads=1)
    assert ran.error is None, ran.error
    orders = []
    for epoch in range(2):
        whole = [
            batch for pair in zip(*(ran.results()[r][epoch] for r in (0, 1)), strict=True) for batch in pair
        ]
        samples = [i for batch in whole for i in batch]
        assert sorted(samples[:16]) == [*range(16)]
        assert len(samples) == len(set(samples)) == 24
        orders.append(samples)
    assert orders[0] != orders[1]


ORDER = """
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
loader = DataLoader(TensorDataset(torch.arange(16.0)[:, None]), batch_size=4, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
seen = []
for epoch in range(2):
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
        seen += x.flatten().tolist()
result(seen)
"""


@pytest.mark.slow
def test_a_script_alone_is_given_the_seed_of_the_order(run, tmp_path):
    ran = run(ORDER, workers=1, mode="asp", threads=1, seed=7)
    assert ran.error is None, ran.error
    (tmp_path / "script.py").write_text(PRELUDE + ORDER)
    alone = {**os.environ, "PACELINE_ORDER_SEED": "7", "TEST_RUN_DIR": str(tmp_path)}
    subprocess.run([sys.executable, tmp_path / "script.py"], env=alone, check=True, timeout=60)
    assert json.loads((tmp_path / "result-0.json").read_text()) == ran.results()[0]
    assert ran.results()[0][:16] != ran.results()[0][16:]


def test_the_seed_of_the_order_is_a_number_that_a_run_takes_too():
    assert order_seed({}) == order_seed({"PACELINE_ORDER_SEED": ""}) == 0
    assert order_seed({"PACELINE_ORDER_SEED": "12"}) == 12
    for wrong in ("-1", "x", "1.5", str(2**63)):
        with pytest.raises(UsageError, match="PACELINE_ORDER_SEED=.*as with --seed"):
            order_seed({"PACELINE_ORDER_SEED": wrong})
