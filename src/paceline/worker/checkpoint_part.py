"""A worker's part of a checkpoint: buffers, random state, schedulers, as named tensors.

Keys: `buffer:NAME`, `rng:torch`, `rng:numpy`, `rng:python`, `rng:cuda`, `rng:loader` (the DataLoader's own
generator, where it has one), `rng:epoch` (the one begun last), `rng:steps` (the worker's steps so far),
`user:scheduler:K` and `user:settings` (the optimizer's parameter groups), these two as JSON bytes; where
workers make local steps also `inner:…` (their optimizer's state) and `stepper:…` (see steppers/), and where
gradients are compressed `encoder:…` (see exchange/encoders.py). What the script keeps is in `script:…` (see
script_state.py).
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.exceptions import UsageError
from paceline.params import settings_of
from paceline.worker.plain import from_json_tensor, from_plain, is_plain, json_tensor, plain
from paceline.worker.prepared import Models
from paceline.worker.script_state import KEY

__all__ = [
    "OWN_PARTS",
    "capture",
    "epoch_of",
    "extras_of",
    "load_extras",
    "restore_rng",
    "restore_schedulers",
    "steps_of",
]

OWN_PARTS = ("rng:", "user:", "inner:", "stepper:", "encoder:", KEY)
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
    steps: int,
    *,
    with_frozen: bool,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """This worker's part of a checkpoint.

    Args:
        epoch: the one it has begun last.
        steps: those that it has finished, in all.
        generator: what seeds the DataLoader's processes, if that is not torch's global one.
        with_frozen: frozen parameters too; they are the same on all workers, so one of them is enough.
    """
    frozen = {name for name, _ in models.named_parameters(remove_duplicate=False)} - trained
    left_out = trained if with_frozen else trained | frozen
    found = {f"buffer:{name}": value.clone() for name, value in extras_of(models, left_out).items()}
    found["rng:epoch"] = torch.tensor(epoch)
    found["rng:steps"] = torch.tensor(steps)
    found["rng:torch"] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["rng:cuda"] = torch.cuda.get_rng_state()
    if generator is not None:
        found["rng:loader"] = generator.get_state()
    numpy_state: Any = np.random.get_state()
    found["rng:numpy"] = json_tensor([numpy_state[1].tolist(), *numpy_state[2:]])
    version, internal, gauss = random.getstate()
    found["rng:python"] = json_tensor([version, list(internal), gauss])
    for k, scheduler in enumerate(schedulers):
        state = {key: plain(v) for key, v in scheduler.state_dict().items() if is_plain(v)}
        found[f"user:scheduler:{k}"] = json_tensor(state)
    found["user:settings"] = json_tensor([g for o in optimizers for g in settings_of(o)])
    return found


def epoch_of(tensors: dict[str, Tensor]) -> int | None:
    """The epoch that a worker was in when it sent its part; None if there is none."""
    return int(tensors["rng:epoch"]) if "rng:epoch" in tensors else None


def steps_of(tensors: dict[str, Tensor]) -> int | None:
    """The steps that a worker had finished then; None if it was not there, or of an older version."""
    return int(tensors["rng:steps"]) if "rng:steps" in tensors else None


def restore_rng(tensors: dict[str, Tensor], generator: torch.Generator | None = None) -> None:
    """Go on with the random numbers where the checkpoint was.

    Args:
        generator: as in `capture`.
    """
    if "rng:loader" in tensors and generator is not None:
        generator.set_state(tensors["rng:loader"])
    if "rng:torch" in tensors:
        torch.set_rng_state(tensors["rng:torch"])
    if "rng:cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng:cuda"])
    if "rng:numpy" in tensors:
        keys, position, has_gauss, cached = from_json_tensor(tensors["rng:numpy"])
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "rng:python" in tensors:
        version, internal, gauss = from_json_tensor(tensors["rng:python"])
        random.setstate((version, tuple(internal), gauss))


def restore_schedulers(
    tensors: dict[str, Tensor], schedulers: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Put prepared schedulers, and what is scheduled, where they were."""
    for k, scheduler in enumerate(schedulers):
        key = f"user:scheduler:{k}"
        if key in tensors:
            saved = {name: from_plain(v) for name, v in from_json_tensor(tensors[key]).items()}
            scheduler.load_state_dict({**scheduler.state_dict(), **saved})
    if "user:scheduler:0" in tensors and schedulers and "user:settings" in tensors:
        saved_groups = from_json_tensor(tensors["user:settings"])
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
