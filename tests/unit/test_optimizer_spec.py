"""Optimizers as plain data, and the proof that cutting does not change what they compute."""

import inspect
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.exceptions import FrameError, UsageError
from paceline.params import (
    OptimizerSpec,
    describe,
    partition,
    segment_view,
    settings_of,
    tensor_views,
)

ELEMENT_WISE = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
]
WHOLE = ["Adafactor", "Muon"]
REFUSED = {"LBFGS": "evaluates the loss several times", "SparseAdam": "needs sparse gradients"}
CLASSES = [
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]
# What makes an optimizer use all of its state.
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"amsgrad": True},
    "NAdam": {"weight_decay": 0.01},
    "RAdam": {"weight_decay": 0.01, "decoupled_weight_decay": True},
    "Adagrad": {"lr_decay": 0.01, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.01},
    "ASGD": {"t0": 2, "weight_decay": 0.01},
}


class MySGD(torch.optim.SGD):
    """A user's optimizer."""


def model_of(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> nn.ParameterList:
    values = [torch.randn(s).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    return nn.ParameterList([nn.Parameter(v) for v in values])


def optimizer_of(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    return made


# --- which optimizers -----------------------------------------------------------------------------


def test_every_class_of_torch_is_known() -> None:
    """A new one is given whole tensors until it is known to be element-wise."""
    assert sorted(CLASSES) == sorted([*ELEMENT_WISE, *WHOLE, *REFUSED])


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_torch_is_accepted_or_refused_with_a_reason(name: str) -> None:
    model = model_of([(4, 3)], [torch.float32])
    optimizer = optimizer_of(name, model)
    if name in REFUSED:
        with pytest.raises(UsageError, match=f"torch.optim.{name} cannot run .*{REFUSED[name]}"):
            OptimizerSpec.of(optimizer)
        return
    spec = OptimizerSpec.of(optimizer)
    assert spec.whole_tensors is (name in WHOLE)
    copy = OptimizerSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert copy == spec
    built = copy.build(0, [torch.zeros(4, 3)])
    assert type(built) is type(optimizer)
    kept = {k: v for k, v in built.param_groups[0].items() if k not in ("params", "fused", "foreach")}
    theirs = optimizer.param_groups[0].items()
    assert kept == {k: v for k, v in theirs if k not in ("params", "fused", "foreach")}
    has_fused = "fused" in inspect.signature(type(optimizer)).parameters
    assert bool(built.param_groups[0].get("fused")) is has_fused


@pytest.mark.parametrize("choice", [{"foreach": True}, {"fused": False}, {"differentiable": True}])
def test_what_the_user_chose_is_kept(choice: dict[str, bool]) -> None:
    model = model_of([(4, 3)], [torch.float32])
    group = OptimizerSpec.of(optimizer_of("Adam", model, **choice)).groups[0]
    assert not group["fused"] and choice.items() <= group.items()


def test_groups_keep_their_own_settings() -> None:
    model = model_of([(2,), (3,)], [torch.float32] * 2)
    groups: list[dict[str, Any]] = [
        {"params": [model[0]]},
        {"params": [model[1]], "lr": 5e-4, "betas": (0.5, 0.6)},
    ]
    spec = OptimizerSpec.of(torch.optim.AdamW(groups, lr=torch.tensor(0.25)))
    built = [spec.build(g, [torch.zeros(2)]).param_groups[0] for g in range(2)]
    assert [g["lr"] for g in built] == [0.25, 5e-4]
    assert [g["betas"] for g in built] == [(0.9, 0.999), (0.5, 0.6)]


def test_a_schedulers_marks_travel_along() -> None:
    model = model_of([(2,)], [torch.float32])
    optimizer = optimizer_of("SGD", model, lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert settings_of(optimizer)[0]["initial_lr"] == 0.5
    assert OptimizerSpec.of(optimizer).build(0, [torch.zeros(2)]).param_groups[0]["initial_lr"] == 0.5


@pytest.mark.parametrize(
    "value",
    [object(), {"a": 1}, torch.zeros(2), math.nan, [math.inf]],
    ids=["object", "dict", "tensor", "nan", "inf"],
)
def test_a_setting_that_is_no_plain_number_is_refused(value: Any) -> None:
    optimizer = optimizer_of("SGD", model_of([(2,)], [torch.float32]))
    optimizer.param_groups[0]["odd"] = value
    with pytest.raises(UsageError, match="optimizer setting 'odd' is .* servers take finite numbers"):
        settings_of(optimizer)


def test_a_users_class_must_be_allowed() -> None:
    model = model_of([(2,)], [torch.float32])
    optimizer = MySGD(model.parameters(), lr=0.1)
    target = f"{MySGD.__module__}:MySGD"
    with pytest.raises(UsageError, match=f"is not from torch.optim.* --optimizer {target}"):
        OptimizerSpec.of(optimizer)
    spec = OptimizerSpec.of(optimizer, [target])
    assert spec.whole_tensors
    with pytest.raises(UsageError, match="a worker offered .* does not allow"):
        spec.build(0, [torch.zeros(2)])


def test_a_users_class_is_imported_where_it_is_allowed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import torch\nclass Box:\n    class Mine(torch.optim.SGD):\n        pass\nnumber = 3\n"
    (tmp_path / "their_optimizers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    target = "their_optimizers:Box.Mine"
    spec = OptimizerSpec(target=target, groups=({"lr": 0.1},), whole_tensors=True)
    assert type(spec.build(0, [torch.zeros(2)], [target])).__name__ == "Mine"
    for odd, words in [
        ("their_optimizers:number", "is not a torch.optim.Optimizer class"),
        ("their_optimizers:Absent", "cannot be imported by the servers"),
        ("no_such_module:Mine", "cannot be imported by the servers"),
    ]:
        spec = OptimizerSpec(target=odd, groups=({},), whole_tensors=True)
        with pytest.raises(UsageError, match=words):
            spec.build(0, [torch.zeros(2)], [odd])
    del sys.modules["their_optimizers"]


def test_a_class_of_the_script_itself_must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MySGD, "__module__", "__main__")
    optimizer = MySGD(model_of([(2,)], [torch.float32]).parameters(), lr=0.1)
    with pytest.raises(UsageError, match="move class MySGD .* --optimizer your_module:MySGD"):
        OptimizerSpec.of(optimizer, ["__main__:MySGD"])


@pytest.mark.parametrize(
    "target",
    ["os:system", "torch.optim:LBFGS", "torch.optim:lr_scheduler", "torch.optim:nothing", "", "SGD", ":"],
)
def test_nothing_else_is_loaded_because_a_worker_says_so(target: str) -> None:
    spec = OptimizerSpec(target=target, groups=({},), whole_tensors=False)
    with pytest.raises(UsageError, match="does not allow|is not a torch.optim.Optimizer"):
        spec.build(0, [torch.zeros(2)])


@pytest.mark.parametrize("group", [{"lr": -1}, {"lr": "x"}, {"momentum": [1]}, {"nesterov": True}])
def test_settings_that_the_optimizer_refuses_are_a_usage_error(group: dict[str, Any]) -> None:
    spec = OptimizerSpec(target="torch.optim:SGD", groups=(group,), whole_tensors=False)
    with pytest.raises(UsageError, match="torch.optim:SGD refused the settings"):
        spec.build(0, [torch.zeros(2)])
    for number in (-1, 1):
        with pytest.raises(FrameError, match=f"parameter group {number} of an optimizer with 1"):
            spec.build(number, [torch.zeros(2)])


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "x",
        {},
        {"target": 1, "groups": [], "whole_tensors": True},
        {"target": "torch.optim:SGD", "groups": [1], "whole_tensors": True},
        {"target": "torch.optim:SGD", "groups": {}, "whole_tensors": True},
        {"target": "torch.optim:SGD", "groups": [{}], "whole_tensors": 1},
        {"target": "torch.optim:SGD", "groups": [{}]},
    ],
)
def test_what_is_no_optimizer_is_refused(data: Any) -> None:
    with pytest.raises(FrameError, match="not an optimizer"):
        OptimizerSpec.from_json(data)


# --- cutting changes nothing ----------------------------------------------------------------------


def check_cut_equals_whole(
    optimizer: torch.optim.Optimizer, model: nn.ParameterList, servers: Sequence[int], steps: int = 5
) -> list[int]:
    """Update whole tensors, then slices for each number of servers: the bits must be the same.

    Returns how many slices there were.
    """
    spec = OptimizerSpec.of(optimizer)
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    # Strided as autograd strides them: like their parameters.
    gradients = [[torch.randn_like(p) for p in model] for _ in range(steps)]
    whole = [p.detach().clone() for p in model]
    by_group: dict[int, list[Tensor]] = {}
    for p, copy in zip(model, whole, strict=True):
        by_group.setdefault(group_of[id(p)], []).append(copy)
    reference = [spec.build(g, copies) for g, copies in sorted(by_group.items())]
    for step in gradients:
        for copy, gradient in zip(whole, step, strict=True):
            copy.grad = gradient.clone()
        for each in reference:
            each.step()
    assert any(not torch.equal(a, b) for a, b in zip(whole, model, strict=True))
    cuts = []
    for count in servers:
        layout, parameters = describe(model, optimizer, servers=count, whole_tensors=spec.whole_tensors)
        cuts.append(len(layout.slices))
        base, slot = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
        values, into = tensor_views(base, layout), tensor_views(slot, layout)
        place = {id(p): i for i, p in enumerate(parameters)}
        for value, p in zip(values, parameters, strict=True):
            value.copy_(p.detach())
        pieces = []
        for shard in partition(layout, count):
            for piece in shard:
                segments = [segment_view(base, layout, g) for g in piece.segments]
                for segment, g in zip(segments, piece.segments, strict=True):
                    segment.grad = segment_view(slot, layout, g)
                pieces.append(spec.build(piece.group, segments))
        for step in gradients:
            for p, gradient in zip(model, step, strict=True):
                into[place[id(p)]].copy_(gradient)
            for each in pieces:
                each.step()
        for i, (p, expected) in enumerate(zip(model, whole, strict=True)):
            assert torch.isfinite(expected).all()
            same = torch.equal(values[place[id(p)]], expected)
            assert same, f"tensor {i} {list(p.shape)} {p.dtype} differs with {count} servers"
    return cuts


@pytest.fixture
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(20261115)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Faster beside other tests; and with several threads torch's unfused kernels for two-byte
    floats depend on where the work is cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_large(name: str) -> None:
    """One tensor is over 4 MB, so it is cut even for one server; none is a round number."""
    shapes = [(1_050_001,), (33, 7), (), (129, 1031), (5,)]
    model = model_of(shapes, [torch.float32] * len(shapes))
    optimizer = optimizer_of(name, model, lr=0.01, **OPTIONS.get(name, {}))
    cuts = check_cut_equals_whole(optimizer, model, [1, 2, 3])
    assert cuts[0] >= 2 and cuts == sorted(cuts)


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_a_large_model_on_1_2_3_servers_is_bitwise_the_whole_one(
    name: str, seeded: None, one_thread: None
) -> None:
    check_large(name)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_several_threads_make_no_difference(name: str, seeded: None) -> None:
    check_large(name)


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_random_models_of_mixed_dtypes_and_groups_too(name: str, seeded: None, one_thread: None) -> None:
    random_ = random.Random(name)
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    for _ in range(3):
        shapes: list[tuple[int, ...]] = [(random_.randrange(40_000, 60_000),), ()]
        shapes += [(random_.randrange(1, 200), random_.randrange(1, 200)) for _ in range(5)]
        model = model_of(shapes, [random_.choice(dtypes) for _ in shapes])
        model.append(nn.Parameter(torch.randn(8, 6, 3, 3).to(memory_format=torch.channels_last)))
        members = list(model)
        groups: list[dict[str, Any]] = [
            {"params": members[::2]},
            {"params": members[1::2], "lr": 0.003},
        ]
        kind = getattr(torch.optim, name)
        optimizer = kind(groups, lr=0.01, **OPTIONS.get(name, {}))
        check_cut_equals_whole(optimizer, model, [1, 2, 3])


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_of_whole_tensors_get_whole_tensors(name: str, seeded: None, one_thread: None) -> None:
    shapes: list[tuple[int, ...]] = [(40, 30), (150, 200), (7, 300)]
    if name == "Adafactor":
        shapes += [(5,), (6, 1), (2_200, 500)]
    model = model_of(shapes, [torch.float32] * len(shapes))
    cuts = check_cut_equals_whole(optimizer_of(name, model), model, [1, 2, 3], steps=2)
    assert max(cuts) <= len(shapes)
