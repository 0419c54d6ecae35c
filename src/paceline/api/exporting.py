"""A run's model as a file for plain PyTorch."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paceline.control.rundir import RunDirectory
from paceline.exceptions import CheckpointError, UsageError
from paceline.storage.atomic import replacing
from paceline.storage.names import check_name

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.storage.checkpoint import Checkpoint

T = TypeVar("T")

__all__ = ["export_run"]

_ENDINGS = (".safetensors", ".pt", ".pth")


def export_run(
    run: RunDirectory, path: Path, model: int | None = None, *, say: Callable[[str], None] | None = None
) -> "Checkpoint":
    """Write a run's model as one file that `load_state_dict` takes in plain PyTorch.

    Args:
        path: its ending says how: `.safetensors`, or `.pt` and `.pth` for `torch.load(…, weights_only=True)`.
        model: of a run with several models, which one. None: all, with `0.`, `1.`, … before their keys.
        say: told of each checkpoint that is refused because it is damaged; the one before it is used. It is
            also told if the model is not finite.

    Returns the checkpoint it came from.

    Raises:
        UsageError: another ending, or a place that cannot be written.
        CheckpointError: there is no checkpoint.
    """
    _check_ending(path)
    check_name("file", str(path))
    try:
        with contextlib.suppress(FileExistsError):  # a file where the directory should be: said below
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            # Not before the place is known to be good: torch takes seconds to import.
            import torch
            from safetensors.torch import save_file

            from paceline.api.jobs import latest_checkpoint
            from paceline.ps.saving import model_state

            state: dict[str, torch.Tensor] = {}

            def read(checkpoint: "Checkpoint") -> None:
                state.update(_state_of(checkpoint, model_state, model))

            found = latest_checkpoint(run, say=say, check=read)
            if (bad := _not_finite(state)) is not None and say is not None:
                say(f"the model is not finite: {bad!r} holds NaN or Inf at version {found.version:,}")
            if path.suffix == ".safetensors":
                save_file(state, new, metadata={"paceline_version": str(found.version)})
            else:
                torch.save(state, new)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}. Name a file in a directory that you may "
            "write to"
        ) from error
    return found


def _state_of(
    checkpoint: "Checkpoint", read: Callable[["Checkpoint", int | None], dict[str, T]], model: int | None
) -> dict[str, T]:
    """The model in a checkpoint. Raises CheckpointError if its tensors are not those that it names."""
    try:
        return read(checkpoint, model)
    except (RuntimeError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} does not hold the model that it names: {error!r:.200}"
        ) from error


def _not_finite(state: "dict[str, Tensor]") -> str | None:
    """The first tensor of a model that holds NaN or Inf; None: all are finite."""
    floating = ((name, each) for name, each in state.items() if each.is_floating_point())
    return next((name for name, each in floating if not bool(each.isfinite().all())), None)


def _check_ending(path: Path) -> None:
    """Refuse a file whose ending says nothing that a model can be written as."""
    if path.suffix not in _ENDINGS:
        what = f"ends in {path.suffix}" if path.suffix else "has no ending"
        raise UsageError(
            f"{path} {what}: a model is written as .safetensors, or as .pt or .pth for torch.load; name the "
            f"file so, as in {path.with_suffix('.safetensors').name}"
        )
