"""An optimizer's state_dict on its way to the servers and back."""

from typing import Any

import pytest
import torch

from paceline.params import OptimizerSpec, StateBook, TensorInfo
from paceline.worker.script_optimizer import as_loaded, pack_state, unpack_state

KINDS = [
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


def stepped(kind: str, *, frozen: bool = False) -> torch.optim.Optimizer:
    """An optimizer of float64 parameters, one of them perhaps frozen, after two steps."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64)) for _ in range(2)]
    parameters[0].requires_grad_(not frozen)
    momentum = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, **momentum)
    for _ in range(2):
        optimizer.zero_grad()
        sum((p * p).sum() for p in parameters).backward()
        optimizer.step()
    return optimizer


def infos_of(optimizer: torch.optim.Optimizer) -> list[TensorInfo | None]:
    return [
        TensorInfo(name=f"p{k}", shape=(3, 2), stride=(2, 1), dtype="float64", group=0)
        if p.requires_grad
        else None
        for k, p in enumerate(optimizer.param_groups[0]["params"])
    ]


def same(expected: dict[str, Any], got: dict[str, Any]) -> None:
    assert expected.keys() == got.keys()
    for index, values in expected.items():
        assert values.keys() == got[index].keys()
        for what, value in values.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == got[index][what].dtype, what
                assert torch.equal(value, got[index][what]), what
            else:
                assert value == got[index][what], what


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_state_is_what_torch_makes_of_it(kind: str) -> None:
    """torch gives NAdam's mu_product the parameter's dtype, and with it every later step."""
    optimizer = stepped(kind)
    state = optimizer.state_dict()
    expected = stepped(kind)
    expected.load_state_dict(state)
    same(expected.state_dict()["state"], as_loaded(state, infos_of(optimizer), fused=False)["state"])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_the_same_after_a_round_trip(kind: str, frozen: bool) -> None:
    """Adagrad has a state for frozen parameters too: a state_dict without it would not be torch's."""
    optimizer = stepped(kind, frozen=frozen)
    infos = infos_of(optimizer)
    state = optimizer.state_dict()
    back = unpack_state(StateBook([pack_state(state, infos)]), infos, optimizer, fused=False)
    same(state["state"], back["state"])
    assert state["param_groups"] == back["param_groups"]


def test_fused_kernels_count_the_steps_of_frozen_parameters_in_float32_too() -> None:
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(2), requires_grad=False)])
    for state in optimizer.state.values():
        state["step"] = state["step"].double()  # as under a default dtype of float64
    for fused, dtype in ((False, torch.float64), (True, torch.float32)):
        assert unpack_state(StateBook([]), [None], optimizer, fused=fused)["state"][0]["step"].dtype == dtype


def test_adagrad_begins_with_its_constructors_value_whatever_its_groups_say() -> None:
    """torch reads it from the constructor's argument only."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adagrad([{"params": [p], "initial_accumulator_value": 0.5}])
    built = OptimizerSpec.of(optimizer).build(0, [p])
    assert torch.equal(built.state[p]["sum"], optimizer.state[p]["sum"])
