"""DevicePlacement: puts models, optimizers' state and batches on the device that the job names.

A script that does not mention a device then trains on it, unchanged: prepare() moves its models, prepared
loaders move their batches, and a model's inputs are moved if they come from elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.device import is_stand_in
from paceline.exceptions import UsageError

__all__ = ["DevicePlacement"]


class DevicePlacement:
    """Of one worker.

    Args:
        device: the job's; None: everything stays where the script put it.
        rank: the worker's among those of its host, which decides which GPU it gets if the job does not.

    Raises:
        UsageError: there is no such device here.
    """

    def __init__(self, device: str | None, rank: int) -> None:
        self.where: torch.device | None = None
        if device is not None and not is_stand_in(device):
            self.where = _device(device, rank)
            if self.where.type == "cuda":
                torch.cuda.set_device(self.where)

    def place(self, objects: Sequence[Any]) -> None:
        """Move the models among these objects, and the state of optimizers."""
        if self.where is None:
            return
        for each in objects:
            if isinstance(each, nn.Module):
                each.to(self.where)
                if self.where.type == "cuda":
                    each.register_forward_pre_hook(self._move_inputs, with_kwargs=True)
        for each in objects:
            if isinstance(each, torch.optim.Optimizer):
                for kept in each.state.values():
                    for name, value in kept.items():
                        if isinstance(value, Tensor) and name != "step":
                            kept[name] = value.to(self.where)

    def batch(self, batch: Any) -> Any:
        """A batch with its tensors on the device. The CPU does not wait for them."""
        return batch if self.where is None else _moved(batch, self.where)

    def _move_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        assert self.where is not None
        return _moved(args, self.where), _moved(kwargs, self.where)


def _device(name: str, rank: int) -> torch.device:
    where = torch.device(name)
    if where.type != "cuda":
        return where
    count = torch.cuda.device_count()
    if not count or (where.index or 0) >= count:
        raise UsageError(f"device={name}: torch sees {count} CUDA devices here.")
    return where if name != "cuda" else torch.device("cuda", rank % count)


def _moved(value: Any, where: torch.device) -> Any:
    """The same value with its tensors on a device."""
    if isinstance(value, Tensor):
        if value.device == where:
            return value
        if where.type == "cuda" and value.device.type == "cpu" and not value.is_pinned():
            value = value.pin_memory()  # a copy from other memory would wait for all work before it
        return value.to(where, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(each, where) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(_moved(each, where) for each in value)
    if isinstance(value, Mapping):
        moved = {key: _moved(each, where) for key, each in value.items()}
        return moved if type(value) is dict else _like(value, moved)
    if hasattr(value, "to") and callable(value.to) and not isinstance(value, type):
        return value.to(where)  # a library's batch
    return value


def _like(value: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """A mapping of the same class, if that can be made so."""
    if hasattr(value, "to") and callable(value.to):
        return value
    try:
        return type(value)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved
