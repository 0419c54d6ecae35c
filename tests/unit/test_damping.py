"""damping=momentum: less momentum, then a shorter step; the default of ssp, asp and downpour."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.core.modes import damped_rates
from paceline.params import OptimizerSpec, describe, tensor_views
from paceline.ps.shard import Contribution, Gradients, Shard
from paceline.testing import SimulatedRun

# The rule


@given(st.floats(1e-6, 10), st.floats(1e-3, 0.999), st.integers(1, 200))
def test_the_whole_length_of_a_gradient_is_divided_by_the_gradients_under_way(
    lr: float, momentum: float, under_way: int
) -> None:
    rate, left = damped_rates(lr, momentum, 1 / under_way)
    assert rate / (1 - left) == pytest.approx(lr / (1 - momentum) / under_way, rel=1e-6)
    assert rate <= lr and left <= momentum
    assert rate == lr or left < 1e-9, "the rate shrinks before the momentum is used up"


def test_without_staleness_nothing_changes() -> None:
    assert damped_rates(0.1, 0.9, 1.0) == (0.1, 0.9)
    assert damped_rates(0.1, 0.0, 0.25) == (0.025, 0.0)


# In a shard


def shard_of(make: Any, damping: str = "momentum") -> tuple[Shard, Tensor]:
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = make(model.parameters())
    layout, parameters = describe(model, optimizer)
    base = torch.zeros(layout.nbytes, dtype=torch.uint8)
    (view,) = tensor_views(base, layout)
    view.copy_(parameters[0].detach())
    return Shard(layout, OptimizerSpec.of(optimizer), layout.slices, base, damping=damping), view


def contribution(shard: Shard, values: list[float], scale: float, weight: float = 1.0) -> Contribution:
    slot = torch.zeros_like(shard.base)
    (view,) = tensor_views(slot, shard.layout)
    view.copy_(torch.tensor([values], dtype=torch.float64))
    return Contribution(0, Gradients(slot, shard.layout, shard.slices), weight, scale=scale)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def apply(shard: Shard, parts: list[Contribution], clipped: bool) -> None:
    if clipped:
        shard.reduce(parts)
        shard.commit(1.0, None)
    else:
        shard.update(parts, None)


@pytest.mark.parametrize("clipped", [False, True])
def test_stale_updates_have_less_momentum_and_then_a_shorter_step(clipped: bool) -> None:
    shard, w = shard_of(sgd)
    expected, velocity = torch.ones(1, 3).double(), torch.zeros(1, 3).double()
    # 1 - 0.9 is multiplied by 1, 4 and 20; the last is above 1, so the rate is halved. Then a fresh one.
    for scale, momentum, rate in ((1.0, 0.9, 0.1), (1 / 4, 0.6, 0.1), (1 / 20, 0.0, 0.05), (1.0, 0.9, 0.1)):
        apply(shard, [contribution(shard, [1.0, -2.0, 0.5], scale)], clipped)
        velocity = momentum * velocity + torch.tensor([[1.0, -2.0, 0.5]]).double()
        expected = expected - rate * velocity
        torch.testing.assert_close(w, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("clipped", [False, True])
def test_a_quorum_is_shortened_as_one_update(clipped: bool) -> None:
    """Weighing the gradients instead would change nothing with Adam, which does not see their length."""
    found = {}
    for make in (sgd, lambda p: torch.optim.Adam(p, lr=0.1)):
        together, w = shard_of(make)
        parts = [contribution(together, [1.0, 0, 0], 0.5, 3.0), contribution(together, [0, 2.0, 0], 0.1, 1.0)]
        alone, v = shard_of(make)
        apply(together, parts, clipped)
        apply(alone, [contribution(alone, [0.75, 0.5, 0], 0.4)], clipped)
        torch.testing.assert_close(w, v)
        found[make] = w
    assert all((1 - w).abs().max() < 0.1 for w in found.values())


@pytest.mark.parametrize("damping", ["momentum", "dynsgd", "staleness", "consgd"])
@pytest.mark.parametrize("clipped", [False, True])
def test_other_optimizers_get_a_lower_rate(damping: str, clipped: bool) -> None:
    shard, w = shard_of(lambda p: torch.optim.Adam(p, lr=0.1), damping)
    apply(shard, [contribution(shard, [1.0, -2.0, 0.5], 0.25)], clipped)
    torch.testing.assert_close(1 - w, 0.025 * torch.tensor([[1.0, -1.0, 1.0]]).double())


# In a run


def trained(mode: str, workers: int = 12, momentum: float = 0.9) -> tuple[float, float]:
    """The loss before and after ten epochs of SGD with momentum."""
    inputs = torch.randn(480, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = inputs @ torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]

    def loss(net: nn.Module, at: list[int]) -> Tensor:
        return nn.functional.mse_loss(net(inputs[at]), targets[at])

    run = SimulatedRun(
        mode=mode,
        model=lambda: nn.Linear(6, 1, bias=False).double(),
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.03, momentum=momentum),
        backward=lambda net, at: loss(net, at).backward(),
        samples=480,
        batch_size=4,
        step_s=[1 + rank / workers for rank in range(workers)],
    )
    everything = list(range(480))
    before = loss(run.model, everything).item()
    run.train(10)
    return before, loss(run.model, everything).item()


@pytest.mark.parametrize("mode", ["asp", "ssp:2"])
def test_twelve_workers_learn_where_the_plain_rule_loses_the_run(mode: str) -> None:
    before, after = trained(mode)
    assert after < 0.01 * before
    assert not trained(f"{mode}+damping=none")[1] < before


def test_consgd_learns_at_a_rate_that_the_plain_rule_does_not_stand() -> None:
    before, after = trained("asp+damping=consgd", momentum=0.5)
    assert after < 0.1 * before
    assert trained("asp+damping=none", momentum=0.5)[1] > 10 * after
