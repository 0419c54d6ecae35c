"""Copies of prepared modules: what is ours stays behind, what is the user's comes along."""

import contextlib
import copy
import copyreg
import pickle
from collections import OrderedDict
from typing import Any

import pytest
from torch import nn

from paceline.worker import phase_hooks
from paceline.worker.plain_copies import copy_plainly


class Net(nn.Linear):
    pass


class Stateful(nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": True}


class Odd(nn.Linear):
    def __reduce__(self) -> Any:
        return nn.Linear, (1, 1)


def users(*_: Any) -> None: ...


@pytest.fixture(autouse=True)
def as_before() -> Any:
    table = dict(copyreg.dispatch_table)
    yield
    copyreg.dispatch_table.clear()
    copyreg.dispatch_table.update(table)


def hooked(kind: type[nn.Module]) -> nn.Module:
    def ours(*_: Any) -> None: ...

    ours.__module__ = phase_hooks.__name__
    model = kind(2, 2)
    model.register_forward_pre_hook(ours, with_kwargs=True)
    model.register_forward_pre_hook(users)
    model.register_forward_hook(ours, always_call=True)
    model.register_load_state_dict_post_hook(ours)
    model.no_sync = contextlib.nullcontext
    copy_plainly(model.modules())
    copy_plainly(model.modules())
    return model


@pytest.mark.parametrize("kind", [Net, Stateful])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_hooks(kind: type[nn.Module], copied: Any) -> None:
    model = hooked(kind)
    found = copied(model)
    assert type(found) is kind and found.weight.equal(model.weight)
    assert list(found._forward_pre_hooks.values()) == [users]
    for name in ("_forward_hooks", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"):
        assert getattr(found, name) == OrderedDict()
    assert not found._load_state_dict_post_hooks and not hasattr(found, "no_sync")
    assert getattr(found, "kept", False) == (kind is Stateful)
    assert len(model._forward_pre_hooks) == 2 and len(model._forward_hooks) == 1, "the model keeps them"


def test_classes_that_are_taken_apart_in_their_own_way() -> None:
    assert type(pickle.loads(pickle.dumps(hooked(Odd)))) is nn.Linear
    copyreg.pickle(Net, lambda model: (nn.Linear, (3, 3)))
    assert copy.deepcopy(hooked(Net)).in_features == 3
