"""Models in stages: outputs, losses and gradients are those of the model in one piece."""

import copy
import os
import random
import signal
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.core.pipeline_spec import PipelineSpec
from paceline.exceptions import LinkError, UsageError
from paceline.worker.parallel import LocalParallelism
from paceline.worker.plain_copies import copy_plainly
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


class Worrying(nn.Linear):
    """Looks at the values that it gets."""

    def __init__(self, width: int, worry: Callable[[], None]) -> None:
        super().__init__(width, width)
        self.worry = worry

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            self.worry()
        return super().forward(x)


def end_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ArithmeticError("too much")


@pytest.mark.parametrize("place", [0, 2], ids=["a stage", "the worker's stage"])
@pytest.mark.parametrize("with_loss", [False, True])
def test_a_stage_that_fails_has_the_call_fail_and_the_next_one_works(cut, place, with_loss):
    model = nn.Sequential(*(Worrying(4, fail) if k == place else nn.Linear(4, 4) for k in range(3)))
    cut(model, stages=3, microbatches=4)
    fine, bad = torch.zeros(8, 4), torch.zeros(8, 4)
    bad[5] = 1e4  # in the third micro-batch
    if place:
        with torch.no_grad():  # so that it gets there
            model[0].weight.copy_(torch.eye(4)), model[1].weight.copy_(torch.eye(4))

    def step(x: Tensor) -> Tensor:
        if with_loss:
            return paceline.loss_of(model, nn.functional.mse_loss, x, target=torch.zeros(8, 4))
        return model(x).square().mean()

    for _ in range(3):
        step(fine).backward()
    with pytest.raises((ArithmeticError, RuntimeError), match="too much"):
        step(bad)
    before = step(fine)
    before.backward()
    assert torch.equal(step(fine), before)


def test_a_stage_that_is_killed_in_the_middle_of_a_schedule_is_named(cut):
    model = nn.Sequential(Worrying(4, end_process), nn.Linear(4, 4), nn.Linear(4, 4))
    cut(model, stages=3, microbatches=4)
    x = torch.zeros(8, 4)
    model(x).sum().backward()
    x[5] = 1e4
    with pytest.raises(LinkError, match=r"stage 1 of --pipeline 3 \(pid \d+\) has ended"):
        model(x)


def test_random_numbers_do_not_depend_on_the_cut(cut):
    """The masks follow from the call, the micro-batch and the place in the model; the script's go on."""
    found = []
    for settings in ({"stages": 2}, {"stages": 3}, {"stages": 2, "split_at": ("5",)}):
        torch.manual_seed(1)
        model = layers(nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
        local = cut(model, microbatches=3, **settings)
        torch.manual_seed(9)
        x = torch.ones(6, 4)
        outputs = [model(x) for _ in range(2)]
        outputs[0].sum().backward()
        found.append([*outputs, *(p.grad for p in model.parameters()), torch.rand(2)])
        local.close()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    one, two = found[0][:2]
    assert not torch.equal(one, two)  # another call
    assert not torch.equal(one[:2], one[2:4])  # another micro-batch
    torch.manual_seed(9)
    assert torch.equal(found[0][-1], torch.rand(2))


def test_batchnorm_sees_micro_batches_in_order(cut):
    model = layers(nn.BatchNorm1d(8)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(9, 4, dtype=torch.float64)
    cut(model, stages=3, microbatches=3)
    found = model(x)
    expected = torch.cat([plain(part) for part in x.tensor_split(3)])
    found.sum().backward(), expected.sum().backward()
    assert_close(
        [found.detach(), *model.state_dict().values()], [expected.detach(), *plain.state_dict().values()]
    )
    assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], 1e-9)
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.allclose(model(x), plain(x), atol=1e-12)


def test_stages_follow_the_model(cut):
    model = layers().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    cut(model, stages=2, microbatches=3)
    model(x).sum().backward()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    model[0].requires_grad_(False)
    seen = []
    model[2].weight.register_hook(lambda g: seen.append(g.clone()))
    model.zero_grad()
    copy_plainly(model.modules())
    plain = copy.deepcopy(model)
    assert "forward" not in vars(plain)
    model(x).square().sum().backward(), plain(x).square().sum().backward()
    assert model[0].weight.grad is None and len(seen) == 1
    assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_stages_compute_in_the_dtype_that_the_script_lets_torch_use(cut):
    model, x = layers(), torch.ones(6, 4)
    cut(model, stages=3, microbatches=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert model(x).dtype == torch.float32


def test_two_models_several_calls_and_some_without_a_backward_pass(cut):
    one, two = layers().double(), layers().double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)

    def together() -> Tensor:
        return two(one(x)[:, :1].expand(-1, 4)).square().sum() + one(y).square().sum()

    together().backward()
    expected = [p.grad.clone() for p in (*one.parameters(), *two.parameters())]
    cut(one, two, stages=2, microbatches=3)
    for _ in range(2):
        one.zero_grad(), two.zero_grad()
        one(y)  # nobody goes backward through this one
        together().backward()
        assert_close([p.grad for p in (*one.parameters(), *two.parameters())], expected)
    with pytest.raises(RuntimeError, match="second backward pass"):
        out = one(x).sum()
        out.backward(retain_graph=True)
        out.backward()


def test_1f1b_holds_fewer_micro_batches_than_gpipe(cut):
    model = layers()
    held = {}
    for schedule in ("gpipe", "1f1b"):
        plain = copy.deepcopy(model)
        local = cut(plain, stages=2, microbatches=8, schedule=schedule)
        for _ in range(4):
            paceline.loss_of(
                plain, nn.functional.cross_entropy, torch.ones(8, 4), target=torch.ones(8).long()
            )
        held[schedule] = local.most_held()
        local.close()
    assert held == {"gpipe": [8, 8], "1f1b": [2, 1]}


NOT_A_MEAN = [
    lambda out, y: nn.functional.cross_entropy(out, y, ignore_index=0),
    lambda out, y: nn.functional.cross_entropy(out, y).sqrt(),
]


@pytest.mark.parametrize("loss", NOT_A_MEAN, ids=["some ignored", "a root"])
def test_a_loss_that_is_no_mean_over_samples(cut, loss, caplog):
    model = layers().double()
    plain = copy.deepcopy(model)
    expected = trained(plain, loss, torch.float64)
    local = cut(model, stages=2, microbatches=4)
    assert_close(trained(model, loss, torch.float64), expected)
    assert "neither the mean" in caplog.text
    local.close()
    cut(model, stages=2, microbatches=4, schedule="1f1b")
    with pytest.raises(UsageError, match="--pipeline-schedule gpipe"):
        trained(model, loss, torch.float64)


def test_a_loss_with_more_gradients_than_the_models(cut, caplog):
    model, centre = layers(), nn.Parameter(torch.zeros(3))
    cut(model, stages=2, microbatches=2)
    for _ in range(4):
        paceline.loss_of(
            model,
            lambda out, y: (out - y - centre).square().mean(),
            torch.ones(4, 4),
            target=torch.ones(4, 3),
        ).backward()
    assert centre.grad is not None and centre.grad.abs().sum() > 0
    assert "not the model's output" in caplog.text


# --- refused -------------------------------------------------------------------------------------


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) if x.sum() > 0 else self.one(x)


class Unhandy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Making(), Taking(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(self.one(x))
        return found


class Taking(nn.Linear):
    def forward(self, made: Any) -> Tensor:
        return super().forward(made.value) if len(made.value) > 0 else made.value


class Making(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Any:
        if x.max() > 1e9:
            raise ValueError
        return types.SimpleNamespace(value=super().forward(x))


class Rolling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) * random.random())


class Again(nn.Module):
    """One BatchNorm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.two(self.norm(self.one(x))))


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        (layers, {"stages": 8}, r"--pipeline 8: Sequential consists of 3 layer\(s\).*at most 3 stage"),
        (layers, {"stages": 2, "split_at": ("layer3",)}, "has no module of that name. It has: 0, 1, 2"),
        (Skipping, {"stages": 2, "split_at": ("blocks.2.too",)}, "Close to it: .*blocks.2.two"),
        (Skipping, {"stages": 2, "split_at": ("unused",)}, "is not called by the model's forward"),
        (layers, {"stages": 2, "split_at": ("0",)}, "not the first one"),
        (layers, {"stages": 3, "split_at": ("4", "2")}, "in the order in which Sequential calls them"),
        (Deciding, {"stages": 2}, "Deciding.forward cannot be cut into stages"),
        (Rolling, {"stages": 2}, r"random numbers that do not come from torch"),
        (Unhandy, {"stages": 2, "split_at": ("two",)}, "stage 1 .*cannot be passed on: a SimpleNamespace"),
        (Again, {"stages": 2, "split_at": ("two",)}, r"same buffer \(norm\.running_mean"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(cut, model, settings, said):
    arguments = {"scale": 1.0, "more": {"shift": torch.ones(20, 6)}} if model is Skipping else {}
    width = 6 if model is Skipping else 4
    with pytest.raises(UsageError, match=said):
        made = model()
        cut(made, **settings)
        made(torch.ones(20, width), **arguments)


def test_1f1b_without_the_loss_is_refused_in_training_only(cut):
    model = layers()
    cut(model, stages=2, schedule="1f1b")
    with pytest.raises(UsageError, match="paceline.loss_of"):
        model(torch.ones(4, 4))
    model.eval()
    assert model(torch.ones(4, 4)).shape == (4, 3)
    with pytest.raises(UsageError, match="6 samples and the target has 5"):
        paceline.loss_of(model, nn.functional.mse_loss, torch.ones(6, 4), target=torch.ones(5, 3))
