"""Models whose frozen weights or buffers share memory: LoRA on a model with tied embeddings, say."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

SETUP = """
class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)  # tied, frozen, and not in the optimizer
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(20.0))
        self.register_buffer("window", self.table[5:11])
        self.register_buffer("positions", torch.arange(6.0).expand(3, 6))

    def forward(self, x):
        x = self.embed(x) + self.window * 0.01 + self.positions[1] * 0.01
        return self.head(self.norm(x + self.up(self.down(x))))

def samples():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, 12, (24,), generator=g), torch.randint(0, 12, (24,), generator=g))

def trained(model):
    return [p for p in model.parameters() if p.requires_grad]
"""
SCRIPT = (
    SETUP
    + """
model = Lora()
if RANK:
    with torch.no_grad():  # all start from worker 0's
        model.embed.weight.fill_(7)
        model.table.fill_(7)
optimizer = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(), batch_size=4))
assert model.head.weight is model.embed.weight and model.window.data_ptr() == model.table[5:].data_ptr()
assert model.table[3] in (3, 4) and model.positions.stride() == (0, 1)
for epoch in range(EPOCHS):
    steps = 0
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    if epoch == 0 and steps:  # not when it is skipped
        with torch.no_grad():
            model.table.add_(1)
    if RELOAD:
        loaded = {k: v.clone() for k, v in model.state_dict().items() if k != "positions"}
        model.load_state_dict(loaded, strict=False)  # torch itself refuses to load an expanded buffer
"""
)


def script(epochs: int, *, reload: bool = False) -> str:
    return f"EPOCHS, RELOAD = {epochs}, {reload}\n" + SCRIPT


def plain(epochs: int) -> dict[str, torch.Tensor]:
    from torch.utils.data import TensorDataset

    scope: dict[str, Any] = {"torch": torch, "nn": nn, "TensorDataset": TensorDataset}
    exec(SETUP, scope)
    model = scope["Lora"]()
    optimizer = torch.optim.SGD(scope["trained"](model), lr=0.1, momentum=0.9, fused=True)
    for epoch in range(epochs):
        for x, y in DataLoader(scope["samples"](), batch_size=4):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            model.table.add_(1)
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("reload", [False, True])
def test_one_worker_trains_and_exports_as_plain_torch(run, reload):
    ran = run(script(2, reload=reload), mode="asp", workers=1, servers=2)
    assert ran.error is None, ran.error
    same(ran.model, plain(2))


def test_all_workers_start_from_worker_0_and_a_resumed_run_goes_on(run):
    """With a replica, and a resume: memory that is shared stays shared, and values come back."""
    settings = {"mode": "bsp", "workers": 2, "servers": 2, "replicas": 1}
    whole = run(script(3), **settings)
    assert whole.error is None, whole.error
    half = run(script(2), **settings)
    assert half.error is None, half.error
    resumed = run(script(3), resume=half, **settings)
    assert resumed.error is None, resumed.error
    same(resumed.model, whole.model)


def test_loading_by_replacing_the_parameters_is_refused_by_name(run):
    ran = run(
        script(1)
        .replace("model.load_state_dict(loaded, strict=False)", "model.load_state_dict(loaded, False, True)")
        .replace("RELOAD = 1, False", "RELOAD = 1, True"),
        workers=1,
    )
    assert ran.error is not None
    assert "UsageError: parameter 'down.weight' was replaced" in ran.error and "assign=True" in ran.error


@pytest.mark.parametrize("buffer", ["torch.eye(3).to_sparse()", "torch.zeros(2, dtype=torch.complex128)"])
def test_a_buffer_without_a_place_in_a_checkpoint_is_refused_by_name(run, buffer):
    ran = run(
        f"""
model = nn.Linear(2, 2)
model.register_buffer("adjacency", {buffer})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
paceline.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
""",
        workers=1,
    )
    assert ran.error is not None
    assert "UsageError: buffer 'adjacency'" in ran.error and "persistent=False" in ran.error
