"""The processor's flags stand for a look at every parameter, and miss no overflow."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline.ps.shard as shards
from paceline.exceptions import UpdateOverflow
from paceline.params import Layout, OptimizerSpec, StateBook, TensorInfo, flat_view
from paceline.ps import contributions
from paceline.ps.float_flags import float_flags
from paceline.ps.shard import Contribution, Gradients, Shard

LENGTH = 67
LARGEST = torch.finfo(torch.float32).max
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.NAdam, {"lr": 0.1}),
]

pytestmark = pytest.mark.skipif(float_flags() is None, reason="this processor's flags cannot be read")


@pytest.fixture(autouse=True)
def as_in_a_server() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors that were looked at as a whole."""
    seen: list[Tensor] = []
    look = contributions.finite

    def counted(flat: Tensor) -> bool:
        seen.append(flat)
        return look(flat)

    monkeypatch.setattr(shards, "finite", counted)
    return seen


class Space:
    """A shard over one tensor of ones."""

    def __init__(self, kind: type[torch.optim.Optimizer], **settings: Any) -> None:
        info = TensorInfo(name="w", shape=(LENGTH,), stride=(1,), dtype="float32", group=0)
        self.layout = Layout.build([info])
        self.spec = OptimizerSpec.of(kind([torch.zeros(1)], **settings))
        self.base = self._filled(1.0)
        self.shard = Shard(self.layout, self.spec, self.layout.slices, self.base)

    def _filled(self, value: float) -> Tensor:
        base = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        flat_view(base, self.layout.slices[0]).fill_(value)
        return base

    def push(self, *values: float, settings: Any = None, checked: bool = True) -> None:
        """One update with the mean of these gradients."""
        pushed = [Gradients(self._filled(v), self.layout, self.layout.slices) for v in values]
        contributions = [Contribution(i, g, checked=checked) for i, g in enumerate(pushed)]
        self.shard.update(contributions, settings)


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
def test_after_the_first_update_nothing_is_looked_at_and_an_overflow_is_seen(kind, settings, looks):
    space = Space(kind, **settings)
    space.push(0.5)
    looks.clear()
    for _ in range(5):
        space.push(0.5)
    assert looks == []
    with pytest.raises(UpdateOverflow, match="'w'"):
        for _ in range(3):
            space.shard.assign([torch.full((LENGTH,), LARGEST)])
            space.push(-1e15, settings=[{**space.spec.groups[0], "lr": 1e38}])


def test_gradients_whose_sum_overflows_do_not_pass():
    space = Space(torch.optim.SGD, lr=0.1)
    space.push(0.5, 0.5)
    with pytest.raises(UpdateOverflow):
        space.push(LARGEST, LARGEST)


@pytest.mark.parametrize("rate", [math.inf, math.nan])
def test_a_learning_rate_that_is_not_finite_does_not_pass(rate):
    space = Space(torch.optim.SGD, lr=0.1)
    space.push(0.5)
    with pytest.raises(UpdateOverflow):
        space.push(0.5, settings=[{**space.spec.groups[0], "lr": rate}])


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_optimizer_state_that_is_restored_is_not_trusted(value):
    space = Space(torch.optim.SGD, lr=0.1, momentum=0.9)
    space.push(0.5)
    saved = space.shard.snapshot()
    for key, tensor in saved.items():
        if "momentum" in key:
            tensor.fill_(value)
    space.shard.restore(StateBook([saved]))
    with pytest.raises(UpdateOverflow):
        space.push(0.5)


def test_a_square_that_overflows_in_the_state_alone_is_no_overflow_of_parameters(looks):
    """Adam's second moment becomes infinite, and its steps zero: parameters are looked at from there on."""
    space = Space(torch.optim.Adam, lr=0.1)
    space.push(0.5)
    space.push(1e30)
    looks.clear()
    for _ in range(6):
        space.push(0.5)
    parameters = [each for each in looks if each.data_ptr() == space.shard.parameters[0].data_ptr()]
    assert len(parameters) == 6
    assert len(looks) < 12, "the state is not looked at for ever"


def test_several_threads_and_two_byte_floats_are_looked_at(looks):
    space = Space(torch.optim.SGD, lr=0.1)
    space.push(0.5)
    torch.set_num_threads(2)
    looks.clear()
    space.push(0.5)
    assert looks
