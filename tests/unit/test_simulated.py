"""The simulator: the live state machines, shards and steppers, in virtual time."""

import pytest
import torch
from torch import nn

from paceline.testing import SimulatedRun

MODES = [
    "bsp",
    "backup:1",
    "ssp:1",
    "asp",
    "asp+quorum=2",
    "asp+damping=none",
    "asp+damping=staleness",
    "asp+damping=dc",
    "asp+damping=gap",
    "ssp:2+period=2",
    "downpour:2,3",
    "easgd:3",
    "eamsgd:3",
    "local:3",
    "diloco:3",
    "dogwild",
    "sandblaster",
]
SAMPLES = 50
INPUTS = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = INPUTS @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)


def model() -> nn.Module:
    net = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        net.weight.fill_(0.1)
        net.bias.zero_()
    return net


def loss(net: nn.Module, indices: list[int]) -> torch.Tensor:
    return nn.functional.mse_loss(net(INPUTS[indices]), TARGETS[indices])


def simulated(mode: str, *, workers: int = 3, seed: int = 0, batch_size: int = 4) -> SimulatedRun:
    return SimulatedRun(
        mode=mode,
        model=model,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.01),
        backward=lambda net, indices: loss(net, indices).backward(),
        samples=SAMPLES,
        batch_size=batch_size,
        step_s=[1.0 + rank for rank in range(workers)],
        seed=seed,
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_uses_every_sample_once_an_epoch_and_learns(mode: str) -> None:
    run = simulated(mode)
    ends: list[int] = []
    before = loss(run.model, list(range(SAMPLES))).item()
    run.train(6, on_epoch=ends.append)
    assert ends == [1, 2, 3, 4, 5, 6]
    assert [a["applied"] for a in run.accounts[:6]] == [SAMPLES] * 6
    assert loss(run.model, list(range(SAMPLES))).item() < 0.95 * before


def test_a_seed_is_a_run() -> None:
    one, same, other = simulated("asp"), simulated("asp"), simulated("asp", seed=1)
    for run in (one, same, other):
        run.train(2)
    assert torch.equal(one.model.weight, same.model.weight)
    assert not torch.equal(one.model.weight, other.model.weight)


def test_bsp_is_one_worker_with_the_joint_batch() -> None:
    many = simulated("bsp", workers=2, batch_size=5)
    alone = simulated("bsp", workers=1, batch_size=10)
    many.train(3)
    alone.train(3)
    assert torch.allclose(many.model.weight, alone.model.weight, atol=1e-12)
    assert many.staleness == 0


def test_unequal_workers_make_staleness_in_asp_and_idleness_in_bsp() -> None:
    free, tied = simulated("asp"), simulated("bsp")
    free.train(3)
    tied.train(3)
    assert free.staleness > 1
    assert free.idleness < 0.2 < tied.idleness
    assert free.time < tied.time
