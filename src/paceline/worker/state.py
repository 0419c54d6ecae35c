"""A worker's part of a checkpoint: buffers, random state, schedulers, as named tensors.

Keys: `buffer:NAME`, `rng:torch`, `rng:numpy`, `rng:python`, `rng:cuda`, `rng:epoch` (the one begun last),
`user:scheduler:K` and `user:settings` (the optimizer's parameter groups), these two as JSON bytes; where
workers step by themselves also `inner:…` (their optimizer's state) and `stepper:…` (see stepping.py), and
where gradients are compressed `encoder:…` (see encoding.py).
"""

import collections
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.exceptions import UsageError
from paceline.params import settings_of
from paceline.worker.prepared import Models

__all__ = [
    "OWN_PARTS",
    "capture",
    "epoch_of",
    "extras_of",
    "load_extras",
    "restore_rng",
    "restore_schedulers",
]

OWN_PARTS = ("rng:", "user:", "inner:", "stepper:", "encoder:")
"""Beginnings of the keys that are not the model's."""


def extras_of(models: Models, trained: set[str]) -> dict[str, Tensor]:
    """What of the models' state_dicts is not trained: frozen parameters and buffers.

    Raises:
        UsageError: one of them has no place in a checkpoint.
    """
    found: dict[str, Tensor] = {}
    for name, value in models.state().items():
        if name not in trained:
            if value.layout != torch.strided or value.is_quantized or value.dtype == torch.complex128:
                kind = str(value.dtype if value.layout == torch.strided else value.layout)
                raise UsageError(
                    f"buffer {name!r} ({kind}) cannot be kept in a "
                    "checkpoint, which holds dense tensors of real numbers or complex64. Register it with "
                    "persistent=False: then it stays every worker's own."
                )
            found[name] = value.detach().cpu()
    return found


def load_extras(models: Models, tensors: dict[str, Tensor], trained: set[str]) -> None:
    """Start from these frozen parameters and buffers."""
    mine = models.state()
    with torch.no_grad():
        for name, value in tensors.items():
            if name in mine and name not in trained:
                _overwrite(mine[name], value)


def _overwrite(tensor: Tensor, value: Tensor) -> None:
    """Copy values in. Of an expanded tensor, whose elements share memory, each place is written once."""
    for d, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if n > 1 and stride == 0:
            tensor, value = tensor.narrow(d, 0, 1), value.narrow(d, 0, 1)
    tensor.copy_(value)


def capture(
    models: Models,
    trained: set[str],
    schedulers: Sequence[Any],
    optimizers: Sequence[torch.optim.Optimizer],
    epoch: int,
    *,
    with_frozen: bool,
) -> dict[str, Tensor]:
    """This worker's part of a checkpoint.

    Args:
        epoch: the one it has begun last.
        with_frozen: frozen parameters too; they are the same on all workers, so one of them is enough.
    """
    frozen = {name for name, _ in models.named_parameters(remove_duplicate=False)} - trained
    left_out = trained if with_frozen else trained | frozen
    found = {f"buffer:{name}": value.clone() for name, value in extras_of(models, left_out).items()}
    found["rng:epoch"] = torch.tensor(epoch)
    found["rng:torch"] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["rng:cuda"] = torch.cuda.get_rng_state()
    numpy_state: Any = np.random.get_state()
    found["rng:numpy"] = _json_tensor([numpy_state[1].tolist(), *numpy_state[2:]])
    version, internal, gauss = random.getstate()
    found["rng:python"] = _json_tensor([version, list(internal), gauss])
    for k, scheduler in enumerate(schedulers):
        state = {key: _plain(v) for key, v in scheduler.state_dict().items() if _is_plain(v)}
        found[f"user:scheduler:{k}"] = _json_tensor(state)
    found["user:settings"] = _json_tensor([g for o in optimizers for g in settings_of(o)])
    return found


def epoch_of(tensors: dict[str, Tensor]) -> int | None:
    """The epoch that a worker was in when it sent its part; None if there is none."""
    return int(tensors["rng:epoch"]) if "rng:epoch" in tensors else None


def restore_rng(tensors: dict[str, Tensor]) -> None:
    """Go on with the random numbers where the checkpoint was."""
    if "rng:torch" in tensors:
        torch.set_rng_state(tensors["rng:torch"])
    if "rng:cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng:cuda"])
    if "rng:numpy" in tensors:
        keys, position, has_gauss, cached = _from_tensor(tensors["rng:numpy"])
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "rng:python" in tensors:
        version, internal, gauss = _from_tensor(tensors["rng:python"])
        random.setstate((version, tuple(internal), gauss))


def restore_schedulers(
    tensors: dict[str, Tensor], schedulers: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Put prepared schedulers, and what is scheduled, where they were."""
    for k, scheduler in enumerate(schedulers):
        key = f"user:scheduler:{k}"
        if key in tensors:
            saved = {name: _from_plain(v) for name, v in _from_tensor(tensors[key]).items()}
            scheduler.load_state_dict({**scheduler.state_dict(), **saved})
    if schedulers and "user:settings" in tensors:
        saved_groups = _from_tensor(tensors["user:settings"])
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, settings in zip(groups, saved_groups, strict=False):
            for name, value in settings.items():
                # Flags are not scheduled: they stay the script's.
                if name in group and isinstance(value, int | float | list) and not isinstance(value, bool):
                    _put(group, name, value)


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group[name], Tensor):
        group[name].fill_(value)
    else:
        group[name] = tuple(value) if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    try:
        _plain(value)
    except TypeError:
        return False
    return True


def _plain(value: Any) -> Any:
    """As JSON that `_from_plain` turns back: tuples, and dicts with keys that are no strings, too."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(v) for v in value]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, collections.Counter) else "dict"
        return {kind: [[_plain(k), _plain(v)] for k, v in value.items()]}
    raise TypeError(f"{type(value).__name__} is not kept in a checkpoint")


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "tuple":
        return tuple(_from_plain(v) for v in items)
    pairs = {_from_plain(k): _from_plain(v) for k, v in items}
    return collections.Counter(pairs) if kind == "counter" else pairs


def _json_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
