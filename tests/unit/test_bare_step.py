"""A step without what stands around it is the same step, bit by bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.ps.bare_step import bare_step


def tensors() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape) for shape in ((5, 7), (33,), ())]


def stepped(optimizer: torch.optim.Optimizer, step: Any) -> list[Tensor]:
    """Six steps: one tensor has no gradient at first, and the rate changes."""
    (group,) = optimizer.param_groups
    torch.manual_seed(2)
    with torch.no_grad():
        for n in range(6):
            for i, p in enumerate(group["params"]):
                p.grad = None if i == 1 and n in (0, 1) else torch.randn_like(p)
            group["lr"] = 0.1 / (n + 1)
            step()
    kept = [v for p in group["params"] for v in optimizer.state[p].values() if isinstance(v, Tensor)]
    return [*group["params"], *kept]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.SGD, {"fused": True, "weight_decay": 0.1, "maximize": True}),
        (torch.optim.SGD, {"fused": False, "foreach": False, "momentum": 0.9}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
    ],
)
def test_a_bare_step_is_the_step(kind, settings):
    plain, bare = (kind(tensors(), lr=0.1, **settings) for _ in range(2))
    expected = stepped(plain, plain.step)
    found = stepped(bare, bare_step(bare))
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum(nesterov):
    """All tensors have a gradient from the first step on: torch's fused kernel wants it so."""
    results = []
    for bare in (False, True):
        optimizer = torch.optim.SGD(
            tensors(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov, fused=True
        )
        step = bare_step(optimizer) if bare else optimizer.step
        torch.manual_seed(3)
        with torch.no_grad():
            for n in range(6):
                for i, p in enumerate(optimizer.param_groups[0]["params"]):
                    p.grad = None if (i, n) == (1, 3) else torch.randn_like(p)
                step()
        results.append([*optimizer.param_groups[0]["params"]])
        results[-1] += [optimizer.state[p]["momentum_buffer"] for p in results[-1]]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_gradient_at_all_is_no_step():
    optimizer = torch.optim.SGD(tensors(), lr=0.1, fused=True)
    step = bare_step(optimizer)
    with torch.no_grad():
        step()
        step()
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], tensors()))


def test_an_optimizer_of_the_user_s_own_is_left_alone():
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["params"][0].fill_(7)

    optimizer = Own(tensors(), lr=0.1, fused=True)
    with torch.no_grad():
        bare_step(optimizer)()
    assert optimizer.param_groups[0]["params"][0].eq(7).all()
