"""Values of a script as JSON and back: what a worker's part of a checkpoint holds beside tensors.

Nothing is ever unpickled. Tuples, counters and dicts with keys that are no strings come back as what they
were; tensors stay tensors, beside the JSON.
"""

import collections
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["from_json_tensor", "from_plain", "is_plain", "json_tensor", "plain"]


def plain(value: Any, tensors: list[Tensor] | None = None) -> Any:
    """As JSON that `from_plain` turns back.

    Args:
        tensors: those that are found are added here; None: there may be none.

    Raises:
        TypeError: something that is not kept.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float | str):
        return value.item()
    if isinstance(value, list):
        return [plain(v, tensors) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [plain(v, tensors) for v in value]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, collections.Counter) else "dict"
        return {kind: [[plain(k), plain(v, tensors)] for k, v in value.items()]}
    if isinstance(value, Tensor) and tensors is not None and value.layout == torch.strided:
        tensors.append(value.detach().cpu().contiguous())
        return {"tensor": len(tensors) - 1}
    raise TypeError(f"{type(value).__name__} is not kept in a checkpoint")


def is_plain(value: Any) -> bool:
    """Whether `plain` takes it, without tensors."""
    try:
        plain(value)
    except TypeError:
        return False
    return True


def from_plain(value: Any, tensors: list[Tensor] | None = None) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, list):
        return [from_plain(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tensor":
        return (tensors or [])[items].clone()
    if kind == "tuple":
        return tuple(from_plain(v, tensors) for v in items)
    pairs = {from_plain(k): from_plain(v, tensors) for k, v in items}
    return collections.Counter(pairs) if kind == "counter" else pairs


def json_tensor(value: Any) -> Tensor:
    """JSON as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_json_tensor(tensor: Tensor) -> Any:
    """The inverse of `json_tensor`."""
    return json.loads(bytes(tensor.tolist()))
