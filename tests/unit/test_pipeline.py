"""Models in stages: outputs, losses and gradients are those of the model in one piece."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.core.pipeline_spec import PipelineSpec
from paceline.worker.parallel import LocalParallelism
from tests.speed import first

SHAPES = [(2, 1), (2, 3), (3, 5), (3, None), (4, 7)]
by_shape = pytest.mark.parametrize(("stages", "microbatches"), first(2, SHAPES))


@pytest.fixture
def cut() -> Iterator[Callable[..., LocalParallelism]]:
    made: list[LocalParallelism] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def start(*models: nn.Module, **settings: Any) -> LocalParallelism:
        spec = PipelineSpec(**settings)
        made.append(LocalParallelism(models, pipeline=spec, deadline_s=30.0))
        return made[-1]

    yield start
    for each in made:
        each.close()
    torch.set_num_threads(threads)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.two(self.act(self.one(x)))) + x


class Skipping(nn.Module):
    """Skip connections over stages, tied weights in the first and the last one, a frozen layer, a parameter
    and a buffer of the model's own, arguments that are no tensors, a tensor for a late stage."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.leave = nn.Linear(6, 6, bias=False)
        self.leave.weight = self.enter.weight
        self.places = nn.Parameter(torch.randn(6))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("mask", torch.randn(9, 6))

    def forward(self, x: Tensor, *, scale: float, more: dict[str, Tensor]) -> dict[str, Any]:
        x = self.enter(x) + self.places
        y = x
        for block in self.blocks:
            x = block(x) + 0.1 * y
        x = self.frozen(x + self.mask[: x.shape[1]].mean(0)) + torch.arange(x.shape[1])
        found = self.leave(x + self.places) * scale + more["shift"]
        return {"scores": found, "best": found.argmax(1), "kind": "a"}


def gradients(model: nn.Module, x: Tensor, shift: Tensor) -> tuple[dict[str, Any], list[Tensor | None]]:
    x, shift = x.clone().requires_grad_(), shift.clone().requires_grad_()
    model.zero_grad()
    out = model(x, scale=2.0, more={"shift": shift})
    out["scores"].square().mean().backward()
    out["scores"] = out["scores"].detach()
    return out, [x.grad, shift.grad, *(p.grad for p in model.parameters())]


def assert_close(found: list[Tensor | None], expected: list[Tensor | None], within: float = 1e-10) -> None:
    assert [g is None for g in found] == [g is None for g in expected]
    for a, b in zip(found, expected, strict=True):
        assert a is None or b is None or (a - b).abs().max() < within


@by_shape
def test_outputs_and_gradients_are_those_of_the_model_in_one_piece(cut, stages, microbatches):
    torch.manual_seed(3)
    model = Skipping().double()
    x, shift = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    expected, whole = gradients(model, x, shift)
    cut(model, stages=stages, microbatches=microbatches)
    for _ in range(2):
        found, parts = gradients(model, x, shift)
        assert (found["scores"] - expected["scores"]).abs().max() < 1e-10
        assert torch.equal(found["best"], expected["best"]) and found["kind"] == "a"
        assert_close(parts, whole)
    with torch.no_grad():  # fewer samples than micro-batches
        few = model(x[:2], scale=1.0, more={"shift": shift[:2]})
    assert few["scores"].shape == (2, 6)


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *more, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def trained(model: nn.Module, loss: Callable[[Any, Any], Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The losses of some steps, and the parameters after them."""
    torch.manual_seed(6)
    x, y = torch.randn(50, 4, dtype=dtype), torch.randint(0, 3, (50,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for k in range(6):
        of = slice(11 * (k % 5), 11 * (k % 5) + 11)  # the fifth has 6 samples
        value = paceline.loss_of(model, loss, x[of], target=y[of])
        (value / 2).backward()
        losses.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "auto"])
@pytest.mark.parametrize(
    ("dtype", "within"), first(1, [(torch.float64, 1e-10), (torch.float32, 1e-5)], ["float64", "float32"])
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_by_micro_batches_trains_the_same_model(cut, schedule, dtype, within, reduction):
    model = layers().to(dtype)
    plain = copy.deepcopy(model)
    loss = nn.CrossEntropyLoss(reduction=reduction)
    expected = trained(plain, loss, dtype)
    cut(model, stages=3, microbatches=4, schedule=schedule)
    assert_close(trained(model, loss, dtype), expected, within)
