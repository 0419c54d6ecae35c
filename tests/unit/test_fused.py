"""Fused kernels, which scripts did not ask for, take all that plain kernels take.

The reference has one optimizer for each parameter, so that no fused call sees parameters with and
without state together.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.params import Layout, OptimizerSpec, StateBook, TensorInfo, fused, tensor_views, use_fused
from paceline.ps.bare_step import bare_step
from paceline.ps.shard import Contribution, Gradients, Shard
from paceline.worker.optimizer_side import Incomplete
from paceline.worker.script_optimizer import make_exchanging
from paceline.worker.steppers import local_step_of

SHAPES = ((5, 7), (33,), (), (64, 20))
KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.3, "maximize": True}),
    (torch.optim.SGD, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
]
History = list[frozenset[int]]
"""Which parameters have a gradient at each step."""

histories = st.lists(st.frozensets(st.integers(0, len(SHAPES) - 1)), min_size=1, max_size=6)
kinds = st.sampled_from(KINDS)


def begin() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradient(step: int, i: int) -> Tensor:
    return torch.randn(SHAPES[i], generator=torch.Generator().manual_seed(100 * step + i))


def put_gradients(parameters: Sequence[nn.Parameter], step: int, present: frozenset[int]) -> None:
    for i, p in enumerate(parameters):
        p.grad = gradient(step, i) if i in present else None


def expected(kind: Any, chosen: dict[str, Any], history: History) -> list[Tensor]:
    parameters = begin()
    optimizers = [kind([p], lr=0.1, fused=True, **chosen) for p in parameters]
    for step, present in enumerate(history):
        put_gradients(parameters, step, present)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in parameters]


def of_a_script(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    use_fused(optimizer)
    return optimizer.step


def with_a_closure(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    use_fused(optimizer)

    def closure() -> float:
        put, optimizer.pending = optimizer.pending, None  # type: ignore[attr-defined]
        put()
        return 0.0

    return lambda: optimizer.step(closure)


def of_a_worker(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    step = local_step_of(optimizer)
    use_fused(optimizer)
    return step


def of_a_server(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    built = OptimizerSpec.of(optimizer).build(0, optimizer.param_groups[0]["params"])
    return torch.no_grad()(bare_step(built))


@pytest.mark.parametrize("way", [of_a_script, with_a_closure, of_a_worker, of_a_server])
@given(which=kinds, history=histories)
@settings(max_examples=40, deadline=None)
def test_first_gradients_come_at_any_step(way, which, history):
    kind, chosen = which
    parameters = begin()
    optimizer = kind(parameters, lr=0.1, **chosen)
    step = way(optimizer)
    for n, present in enumerate(history):
        if way is with_a_closure:
            optimizer.pending = lambda n=n, present=present: put_gradients(parameters, n, present)
        else:
            put_gradients(parameters, n, present)
        step()
    assert all(map(torch.equal, parameters, expected(kind, chosen, history)))


@given(which=kinds, history=histories, restored_after=st.integers(0, 6), cut=st.booleans())
@settings(max_examples=60, deadline=None)
def test_first_gradients_come_at_any_step_on_a_server_also_after_a_restore(
    which, history, restored_after, cut
):
    """Shard: the gradients of a worker with missing tensors; state goes through a StateBook in between."""
    kind, chosen = which
    infos = [
        TensorInfo(name=f"p{i}", shape=shape, stride=torch.empty(shape).stride(), dtype="float32", group=0)
        for i, shape in enumerate(SHAPES)
    ]
    layout = Layout.build(infos, servers=3 if cut else 1)
    base, pushed = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    for view, p in zip(tensor_views(base, layout), begin(), strict=True):
        view.copy_(p.detach())
    spec = OptimizerSpec.of(kind(begin(), lr=0.1, **chosen))

    def fresh() -> Shard:
        return Shard(layout, spec, layout.slices, base)

    with torch.no_grad():
        shard = fresh()
        for n, present in enumerate(history):
            if n == restored_after:
                book = StateBook([shard.snapshot()])
                shard = fresh()
                shard.restore(book)
            for i, view in enumerate(tensor_views(pushed, layout)):
                view.copy_(gradient(n, i)) if i in present else view.zero_()
            missing = frozenset(range(len(SHAPES))) - present
            gradients = Gradients(pushed, layout, layout.slices)
            shard.update([Contribution(0, gradients, missing=missing)], None)
    assert all(map(torch.equal, tensor_views(base, layout), expected(kind, chosen, history)))


def test_a_momentum_that_comes_late_too():
    """Momentum is switched on, off and on again: a buffer may be older than another."""
    results = []
    for split in (True, False):
        parameters = begin()
        groups = [[p] for p in parameters] if split else [parameters]
        optimizers = [torch.optim.SGD(group, lr=0.1, fused=True if split else None) for group in groups]
        if not split:
            use_fused(optimizers[0])
        for n, (momentum, present) in enumerate([(0, {0, 1}), (0.9, {1}), (0, {2}), (0.9, {0, 1, 2, 3})]):
            put_gradients(parameters, n, frozenset(present))
            for optimizer in optimizers:
                optimizer.param_groups[0]["momentum"] = momentum
                optimizer.step()
        results.append(parameters)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("built_fused", [False, True])
def test_a_gradient_scaler_finds_the_same(built_fused):
    """A scaler that leaves unscaling to a fused kernel: for late gradients as well."""
    results = []
    for split in (True, False):
        parameters = begin()
        groups = [[p] for p in parameters] if split else [parameters]
        made = [torch.optim.SGD(g, lr=0.1, momentum=0.9, fused=split or built_fused or None) for g in groups]
        for optimizer in made:
            use_fused(optimizer)
            if split or built_fused:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)  # type: ignore[attr-defined]
        for n, present in enumerate([{0}, {0, 1}, {0, 1, 2, 3}]):
            put_gradients(parameters, n, frozenset(present))
            if not (split or built_fused):
                for p in parameters:
                    p.grad = None if p.grad is None else p.grad * 0.25
            for optimizer in made:
                optimizer.step()
        results.append(parameters)
    assert all(map(torch.allclose, *results))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.SparseAdam, {}),
    ],
)
def test_sparse_gradients_alone_are_stepped_as_plain_torch_does(kind, chosen):
    results = []
    for prepared in (False, True):
        torch.manual_seed(3)
        embedding = nn.Embedding(10, 4, sparse=True)
        optimizer = kind(embedding.parameters(), lr=0.1, **chosen)
        if prepared:
            use_fused(optimizer)
        for n in range(3):
            embedding(torch.tensor([n, 5, n + 1])).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(embedding.weight)
    assert torch.equal(*results)


def test_complex_parameters_alone_are_stepped_as_plain_torch_does():
    results = []
    for prepared in (False, True):
        p = nn.Parameter(torch.tensor([1 + 2j, 3j]))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        if prepared:
            use_fused(optimizer)
        for _ in range(2):
            p.grad = torch.tensor([1j, 2 + 0j])
            optimizer.step()
        results.append(p)
    assert torch.equal(*results)


def test_the_kernels_stay_after_a_state_of_another_optimizer_is_loaded():
    plain, ours = (torch.optim.Adam(begin(), lr=0.1) for _ in range(2))
    put_gradients(plain.param_groups[0]["params"], 0, frozenset({0, 2}))
    plain.step()
    use_fused(ours)
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert ours.param_groups[0]["fused"]
    put_gradients(ours.param_groups[0]["params"], 1, frozenset(range(4)))
    ours.step()
    use_fused(ours)  # once more changes nothing
    ours.step()


# --- a kernel that is broken ----------------------------------------------------------------------------


@pytest.fixture
def tried_anew():
    fused.kernel_works.cache_clear()
    yield
    fused.kernel_works.cache_clear()


def stepped(dtype: torch.dtype) -> Tensor:
    p = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.9)
    served = OptimizerSpec.of(optimizer).groups[0]
    use_fused(optimizer)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert bool(served.get("fused")) is bool(optimizer.param_groups[0]["fused"])
    return p.detach()


@pytest.mark.parametrize("how", ["nothing", "fails"])
def test_a_fused_kernel_that_does_not_work_is_not_used(how, monkeypatch, caplog, tried_anew):
    """As that of SGD for bfloat16 on CPUs once: it changed nothing, and the model never learned."""
    kernel = torch._fused_sgd_

    def broken(parameters: list[Tensor], *rest: Any, **settings: Any) -> None:
        if parameters[0].dtype is not torch.bfloat16:
            kernel(parameters, *rest, **settings)
        elif how == "fails":
            raise RuntimeError("not implemented")

    monkeypatch.setattr(torch, "_fused_sgd_", broken)
    caplog.set_level("WARNING", "paceline")
    assert torch.equal(stepped(torch.bfloat16), torch.full((5,), 0.5, dtype=torch.bfloat16))
    assert not caplog.records or all(
        "SGD for torch.bfloat16 on cpu" in each.message for each in caplog.records
    )
    assert not fused.kernel_works(torch.optim.SGD, torch.bfloat16, "cpu")
    assert fused.kernel_works(torch.optim.SGD, torch.float32, "cpu")
    assert torch.equal(stepped(torch.float32), torch.full((5,), 0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_the_kernels_of_this_torch_work(kind, dtype, caplog, tried_anew):
    assert fused.kernel_works(kind, dtype, "cpu") and not caplog.records


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_kernels_are_tried_with_torchs_class_where_a_worker_has_put_its_own_before_it(
    kind: type[torch.optim.Optimizer],
) -> None:
    """In allreduce, where workers step by themselves: the trial ended in a refusal of add_param_group()."""
    optimizer = kind(begin(), lr=0.1)  # type: ignore[call-arg]
    make_exchanging(optimizer, Incomplete(1))
    use_fused(optimizer)
    assert optimizer.param_groups[0]["fused"] is True
