"""Settings of torch that change what optimizers compute, and optimizers under them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paceline.exceptions import FrameError
from paceline.params import Numerics, OptimizerSpec, StateBook, describe, tensor_views, use_fused
from paceline.ps.shard import Contribution, Gradients, Shard
from tests.integration.test_optimizers import ELEMENT_WISE, WHOLE_TENSOR


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = Numerics.here()
    yield
    before.apply()


def test_what_a_script_set_is_set_elsewhere() -> None:
    assert Numerics.here() == Numerics()
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    flushes = torch.set_flush_denormal(True)  # not every CPU can
    found = Numerics.from_json(Numerics.here().to_json())
    assert found == Numerics(default_dtype="float64", matmul_precision="medium", flush_denormal=flushes)
    Numerics().apply()
    assert Numerics.here() == Numerics()
    found.apply()
    assert Numerics.here() == found


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"default_dtype": "int8", "matmul_precision": "high", "flush_denormal": False},
        {"default_dtype": "float32", "matmul_precision": [], "flush_denormal": False},
    ],
)
def test_odd_settings_are_refused(data: Any) -> None:
    with pytest.raises(FrameError, match="not settings of torch"):
        Numerics.from_json(data)


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("text", [*ELEMENT_WISE, *WHOLE_TENSOR])
def test_every_optimizer_steps_in_float64_as_in_plain_torch_to_the_bit(text: str, restored: bool) -> None:
    """Step counts, rates and products of rates are kept in float64 where the default dtype is that."""
    Numerics(default_dtype="float64").apply()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        bias = "Muon" not in text
        model = nn.Sequential(nn.Linear(6, 70, bias=bias), nn.Linear(70, 30, bias=bias))
        return model, eval(text, {"torch": torch, "model": model})

    plain, optimizer = make()
    use_fused(optimizer)
    ours, mine = make()
    spec = OptimizerSpec.of(mine)
    layout, parameters = describe(ours, mine, servers=2, whole_tensors=spec.whole_tensors)
    base, pushed = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    with torch.no_grad():
        for view, p in zip(tensor_views(base, layout), parameters, strict=True):
            view.copy_(p)
    shard = Shard(layout, spec, layout.slices, base)
    gradients = Gradients(pushed, layout, layout.slices)
    for n in range(6):
        if n == 3 and restored:
            book = StateBook([shard.snapshot()])
            shard = Shard(layout, spec, layout.slices, base)
            shard.restore(book)
        torch.manual_seed(10 + n)
        for p in plain.parameters():
            p.grad = torch.randn_like(p)
        named = {name: p.grad for name, p in plain.named_parameters()}
        for info, view in zip(layout.tensors, tensor_views(pushed, layout), strict=True):
            view.copy_(named[info.name])
        optimizer.step()
        shard.update([Contribution(0, gradients)], None)
    whole = dict(plain.named_parameters())
    for info, view in zip(layout.tensors, tensor_views(base, layout), strict=True):
        assert view.dtype == torch.float64
        assert torch.equal(view, whole[info.name]), info.name
