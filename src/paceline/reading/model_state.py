"""Puts a snapshot into the script's models, or names the first difference between them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.exceptions import LayoutMismatch
from paceline.ps.saving import model_state
from paceline.reading.snapshots import Snapshot

__all__ = ["put_into"]


def put_into(models: Sequence[nn.Module], snapshot: Snapshot) -> None:
    """Copy a snapshot's parameters and buffers into these models.

    Raises:
        LayoutMismatch: the models are not those of the run.
    """
    known = int(snapshot.checkpoint.meta.get("models", 1))
    if known != len(models):
        raise LayoutMismatch(
            f"the script prepares {len(models)} models, and the run at version {snapshot.version} has "
            f"{known}: evaluate with the script, and the arguments, that the run was started with."
        )
    for number, model in enumerate(models):
        state = model_state(snapshot.checkpoint, number)
        which = f" of model {number}" if known > 1 else ""
        _check(model, state, which, snapshot.version)
        with torch.no_grad():
            for name, tensor in _tensors(model).items():
                tensor.copy_(state[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}


def _check(model: nn.Module, state: Mapping[str, Tensor], which: str, version: int) -> None:
    own = _tensors(model)
    advice = (
        f"The run is at version {version}. Evaluate with the script, and the arguments, that the run was "
        "started with."
    )
    for name, tensor in own.items():
        if name not in state:
            raise LayoutMismatch(f"{name!r}{which} is in the script's model and not in the run's. {advice}")
        if tensor.shape != state[name].shape:
            shapes = f"{[*tensor.shape]} in the script's model and {[*state[name].shape]} in the run's"
            raise LayoutMismatch(f"{name!r}{which} has the shape {shapes}. {advice}")
    for name in state:
        if name not in own:
            raise LayoutMismatch(f"{name!r}{which} is in the run's model and not in the script's. {advice}")
