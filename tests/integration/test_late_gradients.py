"""Parameters whose first gradient comes late: stochastic depth, a mixture of experts, a second head."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.worker.alone import AloneSession

SETUP = """
class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(6, 40)
        self.heads = nn.ModuleList(nn.Linear(40, 3) for _ in range(3))

    def forward(self, x, step):  # the second head is used from step 2 on, the third never
        x = torch.tanh(self.trunk(x))
        return self.heads[0](x) + (self.heads[1](x) if step >= 2 else 0)

def samples():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(20, 6, generator=g), torch.randint(0, 3, (20,), generator=g))
"""
LOOP = """
model = TwoHeads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = prepare([model, optimizer, DataLoader(samples(), batch_size=4)])
for step, (x, y) in enumerate(loader):
    nn.functional.cross_entropy(model(x, step), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IMPORTS = "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"


def plain(scope: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same steps by torch's fused kernels, called for each parameter alone."""
    model = scope["TwoHeads"]()
    optimizers = [torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=True) for p in model.parameters()]
    for step, (x, y) in enumerate(DataLoader(scope["samples"](), batch_size=4)):
        nn.functional.cross_entropy(model(x, step), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


@pytest.mark.parametrize("mode", ["asp", "bsp", "hogwild", "allreduce", "alone"])
def test_a_head_that_is_used_late_has_momentum_from_then_on(run, mode):
    scope: dict[str, Any] = {"prepare": AloneSession().prepare}
    exec(IMPORTS + SETUP, scope)
    if mode == "alone":
        exec(LOOP, scope)
        ours = scope["model"].state_dict()
    else:
        script = SETUP + "prepare = lambda objects: paceline.prepare(*objects)\n" + LOOP
        ran = run(script, mode=mode, workers=1, servers=1 if mode == "allreduce" else 2)
        assert ran.error is None, ran.error
        ours = ran.model
    expected = plain(scope)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
