"""What a model does in a call, as a graph of its modules and operations (torch.fx), so that it can be cut.

Modules of torch.nn are one piece each. A module whose forward cannot be followed (it decides by values) is
one piece, too; only the model's own forward must be such that it can.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from paceline.exceptions import UsageError
from paceline.worker.parallel.handed_values import from_handed

__all__ = ["follow", "is_input", "names_of"]

_CONSTRUCTORS = ("arange", "zeros", "ones", "full", "eye", "linspace", "tensor")
_ALWAYS_NEW = ("empty", "rand", "randn", "randint", "randperm", "normal")
"""What these make differs from call to call, so it must not be made while the model is followed."""

_INPUT = "argument"


def follow(model: nn.Module, structure: Any, tensors: int, option: str) -> fx.Graph:
    """The graph of a call.

    Args:
        structure: the arguments, as `handed_values.handed` wrote them. Each tensor becomes an input of the
            graph, in order; everything else is part of it.
        tensors: how many there are.

    Raises:
        UsageError: the model's forward cannot be followed.
    """
    whole: set[nn.Module] = set()
    seen = _random_states()
    while True:
        tracer = _Tracer(structure, tensors, whole)
        try:
            with _recorded_constructors(tracer):
                graph = tracer.trace(model)
            break
        except _CannotFollow as error:
            alike = {m for m in model.modules() if type(m) is type(error.module)}
            if model in alike:
                raise _refused(model, error.__cause__ or error, option) from None
            whole |= alike
        except Exception as error:
            raise _refused(model, error, option) from None
    if _random_states() != seen:
        raise UsageError(
            f"{option}: {type(model).__name__}.forward draws random numbers that do not come from torch's "
            "functions (random, numpy), and they would be the same in every call. Draw them with torch.rand."
        )
    return graph


def is_input(node: fx.Node) -> bool:
    """Whether a node is a tensor that the model is called with."""
    return bool(node.op == "placeholder")


def names_of(graph: fx.Graph) -> list[str]:
    """What tells whether two processes followed the same call."""
    return [f"{node.op} {node.name}" for node in graph.nodes]


class _CannotFollow(Exception):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module).__name__)
        self.module = module


class _Tracer(fx.Tracer):
    """Follows a call with these arguments.

    Args:
        tensors: how many of the arguments are tensors.
        whole: modules that are one piece.
    """

    proxy_buffer_attributes = True

    def __init__(self, structure: Any, tensors: int, whole: set[nn.Module]) -> None:
        super().__init__()
        self._structure = structure
        self._tensors = tensors
        self._whole = whole

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Arguments with a proxy for each tensor."""
        proxies = [self.create_proxy("placeholder", f"{_INPUT}_{k}", (), {}) for k in range(self._tensors)]
        args, kwargs = from_handed(self._structure, proxies)

        def call() -> Any:
            return root_fn(self.root, *args, **kwargs)

        return call, []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one piece."""
        return m in self._whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Follow a module, and say which one it is that cannot be followed."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except _CannotFollow:
            raise
        except Exception as error:
            raise _CannotFollow(m) from error


@contextlib.contextmanager
def _recorded_constructors(tracer: fx.Tracer) -> Iterator[None]:
    """Within, functions that make tensors take proxies, too."""
    plain = {name: getattr(torch, name) for name in (*_CONSTRUCTORS, *_ALWAYS_NEW)}
    try:
        for name, function in plain.items():
            setattr(torch, name, _recorded(tracer, function, always=name in _ALWAYS_NEW))
        yield
    finally:
        for name, function in plain.items():
            setattr(torch, name, function)


def _recorded(tracer: fx.Tracer, plain: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if always or any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return tracer.create_proxy("call_function", plain, args, kwargs)
        return plain(*args, **kwargs)

    return make


def _random_states() -> tuple[bytes, bytes, Any]:
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), numpy_state[1].tobytes(), random.getstate()


def _refused(model: nn.Module, error: BaseException, option: str) -> UsageError:
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UsageError(
        f"{option}: {type(model).__name__}.forward cannot be cut into stages, because torch.fx cannot follow "
        f"it ({said:.200}). What decides by values belongs into a module of its own, which stays one piece; "
        "or make the model an nn.Sequential; or leave the option out."
    )
