"""optimizer.load_state_dict() is one event in the run's order: for all servers, copies and checkpoints."""

import pytest
import torch

from paceline.testing import faulty

SETUP = """
import time
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 2))
x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, (x.sum(1) > 0).long())

def step_once(batch):
    x, y = batch
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

CONCURRENT = (
    SETUP
    + """
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
model, optimizer, _ = paceline.prepare(model, optimizer, DataLoader(data, batch_size=4))
batch = next(iter(DataLoader(data, batch_size=4)))
step_once(batch)
done = RUN_DIR / "loaded"
if RANK:  # pushes without a pause, until the other one has loaded, and for a while longer
    while not done.exists():
        step_once(batch)
    for _ in range(5):
        step_once(batch)
    (RUN_DIR / "through").touch()
else:
    for _ in range(10):
        state = optimizer.state_dict()
        for values in state["state"].values():
            values["step"].fill_(1000.0)
        optimizer.load_state_dict(state)
    done.touch()
    while not (RUN_DIR / "through").exists():
        time.sleep(0.01)
    result([values["step"].item() for values in optimizer.state_dict()["state"].values()])
"""
)


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_all_servers_take_a_state_over_between_the_same_two_updates(run, link):
    """Every update counts up the step of every parameter, so all have the same one afterwards."""
    ran = run(CONCURRENT, workers=2, servers=3, mode="asp", link=link)
    assert ran.error is None, ran.error
    steps = ran.results()[0]
    assert len(set(steps)) == 1 and steps[0] >= 1005


RESET = (
    SETUP
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
fresh = {**optimizer.state_dict(), "state": {}}
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=8))
for epoch in range(int(sys.argv[1])):
    steps = 0
    for batch in loader:
        step_once(batch)
        steps += 1
    if steps:  # not in an epoch that is skipped
        optimizer.load_state_dict(fresh)
"""
)


def test_a_state_that_is_loaded_at_the_very_end_is_in_the_last_checkpoint(run):
    settings = {"workers": 2, "servers": 2, "checkpoint_every": 1}
    whole = run(RESET, args=("3",), **settings)
    half = run(RESET, args=("2",), **settings)
    resumed = run(RESET, args=("3",), resume=half, **settings)
    assert whole.error is None and half.error is None and resumed.error is None
    for name, value in whole.model.items():
        assert torch.equal(resumed.model[name], value), name


@pytest.mark.parametrize("server", [0, 1])
def test_a_killed_server_does_not_lose_it(run, server):
    settings = {"workers": 2, "servers": 2}
    with faulty(f"kill server:{server}@5"):
        ran = run(RESET, args=("3",), replicas=1, **settings)
    undisturbed = run(RESET, args=("3",), **settings)
    assert ran.error is None and undisturbed.error is None
    for name, value in undisturbed.model.items():
        assert torch.equal(ran.model[name], value), name
