"""Copies of a prepared model and its optimizer, in memory and in files, are plain PyTorch's."""

import subprocess
import sys
from typing import Any

import pytest

from tests.speed import first

CLASSES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(8, 4, bias=False))
        self.last = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
    def forward(self, x):
        return self.norm(self.last(self.body(self.first(x))))
"""

SOURCE = """
import copy, pickle, sys
sys.path.insert(0, str(RUN_DIR.parent))
from classes import Net
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 4))
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=8))
average = torch.optim.swa_utils.AveragedModel(model)
ema = copy.deepcopy(model)
steps = 0
for x, y in loader:
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    with torch.no_grad():
        for mine, theirs in zip(ema.parameters(), model.parameters()):
            mine.mul_(0.5).add_(theirs, alpha=0.5)
    steps += 1
def same(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)
with paceline.run_parameters():
    copied = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    torch.save(model, RUN_DIR / f"model-{RANK}.pt")
    torch.save(model.state_dict(), RUN_DIR / f"state-{RANK}.pt")
    found = [same(copied, model), same(again, model)]
    for each in (ema, copied, again):
        assert type(each) is Net
        assert not (each._forward_hooks or each._forward_pre_hooks or each._load_state_dict_post_hooks)
        assert not hasattr(each, "no_sync")
    ema.load_state_dict(copied.state_dict())  # is no assignment to the run's model
    both = copy.deepcopy((model, optimizer))
    assert both[1].param_groups[0]["params"][0] is both[0].first.weight
    torch.save((model, optimizer), RUN_DIR / f"both-{RANK}.pt")
    moments = [v["momentum_buffer"] for v in optimizer.state_dict()["state"].values()]
    theirs = [both[1].state[p]["momentum_buffer"] for p in both[0].parameters()]
    found.append(all(map(torch.equal, moments, theirs)))
# A copy trains by itself, without the run.
plain, own = both
before = [p.clone() for p in plain.parameters()]
((plain(x) - y) ** 2).mean().backward()
own.step()
found.append(type(own) is torch.optim.SGD and not any(map(torch.equal, before, plain.parameters())))
found.append(same(copied, model) or paceline.mode().startswith(("local", "asp")))
result([*found, steps, int(average.n_averaged)])
"""

LOADS = """
import sys
sys.modules["paceline"] = None  # there is none
sys.path.insert(0, sys.argv[1])
import torch
model = torch.load(f"{sys.argv[2]}/model-0.pt", weights_only=False)
state = torch.load(f"{sys.argv[2]}/state-0.pt", weights_only=True)
assert all(map(torch.equal, model.state_dict().values(), state.values()))
both, optimizer = torch.load(f"{sys.argv[2]}/both-0.pt", weights_only=False)
assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["params"][0] is both.first.weight
both(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""

RUNS = [
    {"mode": "bsp", "workers": 2},
    {"mode": "bsp", "workers": 2, "link": "tcp", "overlap": True},
    {"mode": "asp", "workers": 2},
    {"mode": "local:4", "workers": 2},
    {"mode": "allreduce", "workers": 2},
    {"mode": "hogwild", "workers": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", first(1, RUNS, ids=[str(n) for n in range(len(RUNS))]))
def test_copies(run: Any, tmp_path: Any, settings: dict[str, Any]) -> None:
    (tmp_path / "classes.py").write_text(CLASSES)
    ran = run(SOURCE, threads=1, **settings)
    assert ran.error is None
    for *found, steps, averaged in ran.results().values():
        assert all(found) and averaged == steps, (settings, found)
    command = [sys.executable, "-c", LOADS, str(tmp_path), str(ran.run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
