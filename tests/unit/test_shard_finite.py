"""NaN and Inf never reach the parameters, whatever finite or broken values workers push."""

import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.exceptions import UpdateOverflow
from paceline.params import Layout, OptimizerSpec, TensorInfo, flat_view
from paceline.ps.shard import Contribution, Gradients, Shard

LENGTH = 40
DTYPES = ["float16", "bfloat16", "float32", "float64"]
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 3.0, "weight_decay": 1.5, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 1.0}),
    (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}),
]
OPERATIONS = ["single", "mean", "weighted", "clipped", "mixed", "assigned", "damped"]


class Space:
    """A shard over one tensor, and memory for what workers push."""

    def __init__(self, dtype: str, optimizer: Any, damping: str, values: Tensor) -> None:
        info = TensorInfo(name="w", shape=(LENGTH,), stride=(1,), dtype=dtype, group=0)
        self.layout = Layout.build([info])
        self.dtype = getattr(torch, dtype)
        kind, chosen = optimizer
        spec = OptimizerSpec.of(kind([torch.zeros(1)], **chosen))
        self.base = self.filled(values)
        self.shard = Shard(self.layout, spec, self.layout.slices, self.base, damping=damping)

    def filled(self, values: Tensor) -> Tensor:
        base = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        flat_view(base, self.layout.slices[0]).copy_(values)
        return base

    def gradients(self, values: Tensor) -> Gradients:
        return Gradients(self.filled(values), self.layout, self.layout.slices)

    @property
    def parameters(self) -> Tensor:
        return flat_view(self.base, self.layout.slices[0])


def values(random: Random, dtype: str, *, finite: bool = True) -> Tensor:
    """Values of all sizes, up to the largest of the dtype."""
    limits = torch.finfo(getattr(torch, dtype))
    sizes = [0.0, limits.tiny, 1e-3, 1.0, 30.0, limits.max**0.5, limits.max / 2, limits.max]
    some = [random.choice(sizes) * random.choice([-1, 1]) for _ in range(LENGTH)]
    if not finite:
        some[random.randrange(LENGTH)] = random.choice([math.nan, math.inf, -math.inf])
    return torch.tensor(some, dtype=torch.float64).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("damping", ["none", "dc", "gap"])
@given(
    seed=st.integers(0, 1 << 30),
    optimizer=st.sampled_from(OPTIMIZERS),
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=4),
)
@settings(max_examples=20, deadline=None)
def test_parameters_are_finite_after_whatever_is_pushed(
    dtype: str, damping: str, seed: int, optimizer: Any, operations: list[str]
) -> None:
    random = Random(seed)
    space = Space(dtype, optimizer, damping, values(random, dtype))
    shard = space.shard
    copy = [torch.zeros(LENGTH, dtype=space.dtype)]
    for operation in operations:
        sound = random.random() < 0.7
        pushed = [
            Contribution(
                worker,
                space.gradients(values(random, dtype, finite=sound or worker > 0)),
                weight=2.0 if operation == "weighted" and worker else 1.0,
                checked=sound,
            )
            for worker in range(3)
        ]
        before = space.parameters.clone()
        try:
            match operation:
                case "single":
                    shard.update(pushed[:1], None, [copy])
                case "mean" | "weighted":
                    shard.update(pushed, None, [copy])
                case "damped":
                    pushed[0].backup = [values(random, dtype)]
                    pushed[0].scale = 0.5
                    shard.update(pushed[:1], None, [copy])
                case "clipped":
                    (norm,) = (x for _, x in shard.reduce(pushed))
                    assert math.isfinite(norm)
                    shard.commit(min(1.0, 1.0 / (norm**0.5 + 1e-6)), None, [copy])
                case "mixed":
                    shard.mix(0, pushed[0].gradients, 0.3, [copy])
                case "assigned":
                    shard.assign(pushed[0].gradients.flat)
        except UpdateOverflow as error:
            # The training has diverged and ends: nobody has got these parameters.
            assert "'w'" in str(error)
            assert copy[0].isfinite().all()
            with pytest.raises(UpdateOverflow):
                shard.snapshot()
            return
        assert space.parameters.isfinite().all(), operation
        assert copy[0].isfinite().all(), operation
        refused = shard.take_refusals()
        if not sound and operation in ("single", "damped", "mixed"):
            assert refused == {0: 1} and torch.equal(space.parameters, before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("damping", ["dc", "gap"])
def test_damping_in_two_bytes_is_damping_in_four_rounded(dtype: str, damping: str) -> None:
    """Steps in between do not fit float16: the square of 256, and 1e-12 beside a mean of 0."""
    torch.manual_seed(1)
    w, read, g = torch.randn(LENGTH), torch.randn(LENGTH), torch.randn(LENGTH) * 100
    results = []
    for each in (dtype, "float32"):
        rounded = [t.to(getattr(torch, dtype)) for t in (w, read, g)]
        space = Space(each, (torch.optim.SGD, {"lr": 2.0**-10}), damping, rounded[0])
        for _ in range(2):
            backup = [rounded[1].to(space.dtype)]
            space.shard.update([Contribution(0, space.gradients(rounded[2]), backup=backup)], None)
        assert not space.shard.take_refusals()
        results.append(space.parameters.float())
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


def test_a_mean_in_float16_does_not_overflow_on_the_way() -> None:
    largest = torch.finfo(torch.float16).max
    space = Space("float16", (torch.optim.SGD, {"lr": 2.0**-4}), "none", torch.zeros(LENGTH))
    pushed = [Contribution(k, space.gradients(torch.full((LENGTH,), largest))) for k in range(3)]
    space.shard.update(pushed, None)
    assert not space.shard.take_refusals()
    assert space.parameters.tolist() == [-largest / 16] * LENGTH
