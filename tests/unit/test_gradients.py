"""What lies in the slot at a push is what the script's `.grad` says, however it came there."""

import pytest
import torch
from torch import Tensor, nn

from paceline.exceptions import UsageError
from paceline.worker.steppers.gradient_memory import GradientMemory


@pytest.fixture(params=["one by one", "at once", "at once, watched"])
def filled(request: pytest.FixtureRequest) -> tuple[list[nn.Parameter], Tensor, GradientMemory]:
    """Two parameters, 3 and 2 x 2 elements, the flat memory, and who fills it."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    flat = torch.full((7,), 9.0)
    views = [flat[:3], flat[3:].view(2, 2)]
    memory = GradientMemory(parameters, views, [] if request.param == "one by one" else [flat])
    if request.param == "at once, watched":
        memory.watch(lambda i: None)
    return parameters, flat, memory


def backward(parameters: list[nn.Parameter], scale: float = 1.0) -> None:
    a, b = parameters
    (scale * (a.sum() + 2 * b.sum())).backward()


def test_gradients_are_there_at_a_push_and_accumulate(filled) -> None:
    parameters, flat, memory = filled
    backward(parameters)
    assert memory.collect() == ([], True)
    assert flat.tolist() == [1.0] * 3 + [2.0] * 4
    backward(parameters)
    assert memory.collect() == ([], True)
    assert flat.tolist() == [2.0] * 3 + [4.0] * 4


@pytest.mark.parametrize("to_none", [True, False])
def test_after_zero_grad_they_begin_again(filled, to_none) -> None:
    parameters, flat, memory = filled
    optimizer = torch.optim.SGD(parameters)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        backward(parameters)
        assert memory.collect() == ([], True)
        assert flat.tolist() == [1.0] * 3 + [2.0] * 4


def test_what_is_clipped_in_place_is_pushed_clipped(filled) -> None:
    parameters, flat, memory = filled
    backward(parameters)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    assert memory.collect() == ([], True)
    assert flat.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_a_parameter_without_a_gradient_is_named_and_its_memory_is_zero(filled) -> None:
    parameters, flat, memory = filled
    backward(parameters)
    memory.collect()
    for p in parameters:
        p.grad = None
    parameters[0].sum().backward()
    assert memory.collect() == ([1], True)
    assert flat.tolist() == [1.0] * 3 + [0.0] * 4
    backward(parameters)
    assert memory.collect() == ([], True)
    assert flat.tolist() == [2.0] * 3 + [2.0] * 4


def test_a_gradient_that_the_script_put_there_counts(filled) -> None:
    parameters, flat, memory = filled
    backward(parameters)
    parameters[1].grad = torch.full((2, 2), 7.0)
    assert memory.collect() == ([], True)
    assert flat.tolist() == [1.0] * 3 + [7.0] * 4


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_have_gradients(filled) -> None:
    parameters, flat, memory = filled
    a, b = parameters
    (a.pow(2).sum() + b.sum()).backward(create_graph=True)
    assert memory.collect() == ([], True)
    assert flat.tolist() == [2.0] * 3 + [1.0] * 4
    for p in parameters:  # else they refer to each other for ever
        p.grad = None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_that_is_not_finite_is_seen(filled, value) -> None:
    parameters, _, memory = filled
    backward(parameters, value)
    assert memory.collect() == ([], False)
    for p in parameters:
        p.grad = None
    backward(parameters)
    assert memory.collect() == ([], True)
    parameters[0].grad[1] = value  # after backward
    assert memory.collect() == ([], False)


def test_finite_ones_whose_sum_is_not_are_finite(filled) -> None:
    parameters, _, memory = filled
    backward(parameters, 1e38)
    assert memory.collect() == ([], True)


def test_a_sparse_gradient_is_refused_with_the_way_out() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    flat = torch.zeros(8)
    memory = GradientMemory([layer.weight], [flat.view(4, 2)], [flat])
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse=False"):
        memory.collect()


def test_those_who_watch_hear_of_each_gradient_in_its_place() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    flat, heard = torch.zeros(7), []
    memory = GradientMemory(parameters, [flat[:3], flat[3:].view(2, 2)], [flat])
    memory.watch(lambda i: heard.append((i, flat.tolist()[3 * i])))
    backward(parameters)
    assert sorted(heard) == [(0, 1.0), (1, 2.0)]
