"""Values that a worker hands to a process that it forked, and back: JSON, with tensors beside it.

Only what arrives as what it was: tensors, numbers, texts, None, and lists, tuples and dicts of these.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["from_handed", "handed"]


def handed(value: Any, tensors: list[Tensor]) -> Any:
    """As JSON that `from_handed` turns back.

    Args:
        tensors: those that are found are added here.

    Raises:
        TypeError: something else.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [handed(each, tensors) for each in value]
    if kind is tuple or kind is torch.Size:
        return {"tuple": [handed(each, tensors) for each in value]}
    if kind is dict:
        return {"dict": [[handed(k, tensors), handed(v, tensors)] for k, v in value.items()]}
    raise TypeError(f"a {kind.__name__} cannot be handed to another process")


def from_handed(value: Any, tensors: Sequence[Any]) -> Any:
    """The inverse of `handed`; the tensors are those given, themselves."""
    if isinstance(value, list):
        return [from_handed(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tensor":
        return tensors[items]
    if kind == "tuple":
        return tuple(from_handed(each, tensors) for each in items)
    return {from_handed(k, tensors): from_handed(v, tensors) for k, v in items}
