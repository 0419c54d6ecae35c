"""Between a torch model and flat memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.exceptions import UsageError
from paceline.params import (
    Layout,
    bind,
    bytes_of,
    describe,
    dtype_named,
    flat_view,
    segment_view,
    tensor_views,
)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def memory(layout: Layout) -> Tensor:
    return torch.zeros(layout.nbytes, dtype=torch.uint8)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_a_model_round_trips_through_flat_memory() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Linear(4, 6).double())
    layout, parameters = describe(model, sgd(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    base = memory(layout)
    views = tensor_views(base, layout)
    for view, p in zip(views, parameters, strict=True):
        view.copy_(p.detach())
    bind(parameters, views)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.shape == before[name].shape
    base.zero_()
    assert all(not p.any() for p in model.parameters())
    assert {t.dtype for t in layout.tensors} == {"float32", "float64"}
    # The model trains on it.
    with torch.no_grad():
        base.view(torch.uint8).random_(0, 60)
    assert model[0](torch.ones(1, 3, 3, 3)).shape == (1, 5, 1, 1)


def test_tied_weights_appear_once_frozen_ones_not_and_scalars_do() -> None:
    model = Tied()
    layout, parameters = describe(model, sgd(model))
    assert [t.name for t in layout.tensors] == ["scale", "embed.weight"] or [
        t.name for t in layout.tensors
    ] == ["embed.weight", "scale"]
    assert layout.aliases == (("head.weight", "embed.weight"),)
    base = memory(layout)
    bind(parameters, tensor_views(base, layout))
    assert model.scale.shape == () and model.head.weight is model.embed.weight
    flat_view(base, layout.slices[0]).fill_(3)
    assert model.scale.item() == 3 and model.head.weight.unique().tolist() == [3]


def test_only_what_the_optimizer_holds_is_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    groups: list[dict[str, Any]] = [
        {"params": model[2].parameters()},
        {"params": model[0].parameters(), "lr": 1.0},
    ]
    layout, parameters = describe(model, torch.optim.SGD(groups, lr=0.1))
    found = [(t.name, t.group) for t in layout.tensors]
    assert found == [("2.weight", 0), ("2.bias", 0), ("0.weight", 1), ("0.bias", 1)]
    assert [s.group for s in layout.slices] == [0, 1]
    assert parameters[0] is model[2].weight


def test_channels_last_keeps_its_strides_and_its_values() -> None:
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    value = model.weight.detach().clone()
    layout, parameters = describe(model, sgd(model))
    base = memory(layout)
    views = tensor_views(base, layout)
    views[0].copy_(value)
    bind(parameters, views)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight, value)
    raw = flat_view(base, layout.slices[0])[: value.numel()]
    assert torch.equal(raw, value.permute(0, 2, 3, 1).reshape(-1))


def test_a_parameter_with_gaps_in_its_memory_becomes_contiguous() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(6, 8)[:, ::2])
    layout, _ = describe(model, sgd(model))
    assert layout.tensors[0].stride == (4, 1)


def test_transposed_parameters_keep_their_strides() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(6, 8).t())
    layout, _ = describe(model, sgd(model))
    assert layout.tensors[0].stride == (1, 8)
    assert tensor_views(memory(layout), layout)[0].shape == (8, 6)


def test_segments_are_flat_pieces_or_whole_tensors() -> None:
    model = nn.Sequential(nn.Linear(1100, 1000), nn.Linear(3, 2))
    layout, _ = describe(model, sgd(model), servers=3)
    base = memory(layout)
    for piece in layout.slices:
        for g in piece.segments:
            view = segment_view(base, layout, g)
            view.fill_(g.tensor + 1)
            t = layout.tensors[g.tensor]
            assert tuple(view.shape) == (t.shape if g.stop - g.start == t.numel else (g.stop - g.start,))
    for i, view in enumerate(tensor_views(base, layout)):
        assert view.unique().tolist() == [i + 1]


def test_bytes_of_is_the_memory_itself() -> None:
    tensor = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    bytes_of(tensor)[:] = bytes(4)
    assert tensor.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_have_their_torch_names(name: str) -> None:
    assert str(dtype_named(name)) == f"torch.{name}"


# --- what is refused ------------------------------------------------------------------------------


def with_parameter(p: Tensor, *, grad: bool = True) -> nn.Module:
    model = nn.Module()
    model.w = nn.Parameter(p, requires_grad=grad)
    return model


@pytest.mark.parametrize(
    "p",
    [
        torch.zeros(0, 3),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.zeros(3, 3).to_sparse(),
    ],
    ids=["empty", "complex", "float8", "sparse"],
)
def test_what_cannot_be_laid_out_is_refused_by_name(p: Tensor) -> None:
    model = with_parameter(p)
    with pytest.raises(UsageError, match="parameter 'w' .* must be dense, not empty, and float16, bf"):
        describe(model, sgd(model))


def test_nothing_to_train_is_refused() -> None:
    model = with_parameter(torch.zeros(3), grad=False)
    with pytest.raises(UsageError, match="nothing to train"):
        describe(model, sgd(model))


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    with pytest.raises(UsageError, match=r"parameter 0 of group 0 \[3, 2\] .* is not in the model"):
        describe(model, sgd(other))


def test_two_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"several devices: \['cpu', 'meta'\]"):
        describe(model, sgd(model))


def test_parameters_over_one_memory_are_refused_but_neighbours_are_not() -> None:
    buffer = torch.randn(12)
    model = nn.Module()
    model.a, model.b = nn.Parameter(buffer[:6]), nn.Parameter(buffer[6:])
    describe(model, sgd(model))
    model.c = nn.Parameter(model.a.data)
    with pytest.raises(UsageError, match="'a' and 'c' share memory .* same Parameter"):
        describe(model, sgd(model))


def test_frozen_parameters_and_buffers_may_share_memory_but_not_with_a_trained_one() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.randn(6))
    model.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
    model.register_buffer("table", model.frozen.data)
    model.register_buffer("window", model.table[2:4])
    model.register_buffer("wide", model.table[:1].expand(9))
    describe(model, sgd(model))
    for name, twin in (("ahead", model.a.data[:2]), ("behind", model.a.data[5:])):
        model.register_buffer(name, twin)
        with pytest.raises(UsageError, match=f"'(a' and '{name}|{name}' and 'a)' share memory"):
            describe(model, torch.optim.SGD([model.a]))
        delattr(model, name)
