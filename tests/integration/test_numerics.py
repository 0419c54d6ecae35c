"""What a script sets in torch, and what its optimizer knows before prepare(), is known to the servers."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SETUP = """
torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
model = nn.Linear(6, 3)
x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, (x.sum(1) > 0).long())
optimizer = {optimizer}
"""
BEFORE = """
for x, y in DataLoader(data, batch_size=8):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
AFTER = """
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=4))
for x, y in loader:
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def plain(text: str, *, before: bool) -> dict[str, torch.Tensor]:
    scope = {"torch": torch, "nn": nn, "DataLoader": DataLoader, "TensorDataset": TensorDataset}
    try:
        exec(SETUP.format(optimizer=text) + (BEFORE if before else ""), scope)
        for x, y in DataLoader(scope["data"], batch_size=4):
            nn.functional.cross_entropy(scope["model"](x), y).backward()
            scope["optimizer"].step()
            scope["optimizer"].zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    found: dict[str, torch.Tensor] = scope["model"].state_dict()
    return found


@pytest.mark.parametrize(
    ("optimizer", "before"),
    [
        ("torch.optim.ASGD(model.parameters(), lr=0.1, t0=2)", False),
        ("torch.optim.NAdam(model.parameters(), lr=0.01)", False),
        ("torch.optim.NAdam(model.parameters(), lr=0.01)", True),
        ("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)", True),
    ],
)
def test_one_worker_is_plain_torch_in_float64_to_the_bit(run, optimizer, before):
    """`before`: the optimizer has made steps before prepare(), and the servers go on from there."""
    script = SETUP.format(optimizer=optimizer) + (BEFORE if before else "") + AFTER
    ran = run(script, mode="asp", workers=1, servers=2)
    assert ran.error is None, ran.error
    for name, value in plain(optimizer, before=before).items():
        assert torch.equal(ran.model[name], value), name


LOADED = """
torch.manual_seed(3)
model = nn.Linear(6, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
nn.functional.cross_entropy(model(torch.ones(2, 6)), torch.tensor([0, 1])).backward()
optimizer.step()
optimizer.zero_grad()
old = optimizer.state_dict()
for values in old["state"].values():
    values["step"] = 1  # as torch 1.11 saved it
model, optimizer = paceline.prepare(model, optimizer)
optimizer.load_state_dict(old)
nn.functional.cross_entropy(model(torch.ones(2, 6)), torch.tensor([0, 1])).backward()
optimizer.step()
result([values["step"].item() for values in optimizer.state_dict()["state"].values()])
"""


def test_a_state_of_an_older_torch_is_loaded_as_torch_does(run):
    ran = run(LOADED, mode="asp", workers=1)
    assert ran.error is None, ran.error
    assert ran.results()[0] == [2.0, 2.0]
