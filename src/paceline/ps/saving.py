"""Reading a checkpoint back.

Files: server-K.safetensors (parameters and optimizer state, StateBook's keys), worker-K.safetensors
(buffers, random state), extras.safetensors (frozen parameters and initial buffers of worker 0).
"""

from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor

from paceline.core.modes import parse_mode
from paceline.exceptions import CheckpointError, FrameError, UsageError
from paceline.params import StateBook
from paceline.storage.checkpoint import Checkpoint

__all__ = [
    "buffers_of",
    "for_others",
    "model_state",
    "optimizer_state",
    "ran_on_workers",
    "read_blob",
    "state_book",
    "worker_state",
]


def state_book(checkpoint: Checkpoint, *, optimizer: bool = True) -> StateBook:
    """Parameters and optimizer state of a checkpoint, wherever the optimizer ran.

    Args:
        optimizer: False leaves its state out.
    """
    parts = [checkpoint.tensors(name) for name in sorted(checkpoint.files) if name.startswith("server-")]
    if not optimizer:
        return StateBook({k: v for k, v in part.items() if not _what(k)} for part in parts)
    if ran_on_workers(checkpoint):
        parts.append(optimizer_state(checkpoint))
    return StateBook(parts)


def optimizer_state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The optimizer's state alone, by StateBook's keys, wherever the optimizer ran."""
    if ran_on_workers(checkpoint):
        mine = worker_state(checkpoint, 0)
        return {k[6:]: v for k, v in mine.items() if k.startswith("inner:")}
    names = [name for name in sorted(checkpoint.files) if name.startswith("server-")]
    return {k: v for name in names for k, v in checkpoint.tensors(name).items() if _what(k)}


def _what(key: str) -> str:
    return key.rsplit("|", 3)[1]


def ran_on_workers(checkpoint: Checkpoint) -> bool:
    """Whether every worker had the whole optimizer (allreduce): worker 0 kept its state."""
    return parse_mode(checkpoint.meta["lead"]["mode"]).serverless


def worker_state(checkpoint: Checkpoint, worker: int) -> dict[str, Tensor]:
    """What a worker saved; for a worker the run did not have, nothing."""
    name = f"worker-{worker}.safetensors"
    return checkpoint.tensors(name) if name in checkpoint.files else {}


def for_others(part: Mapping[str, Tensor], worker: int) -> dict[str, Tensor]:
    """What a worker that joins later starts from: any worker's newest buffers, worker 0's script state."""
    script = {k: v for k, v in part.items() if k.startswith("script:")} if worker == 0 else {}
    return {**buffers_of(part), **script}


def buffers_of(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers in a worker's part of a checkpoint, by their names in the model."""
    return {k[7:]: v for k, v in part.items() if k.startswith("buffer:")}


def model_state(checkpoint: Checkpoint, model: int | None = None) -> dict[str, Tensor]:
    """The model as a plain state_dict: parameters, frozen parameters, and buffers of the lowest rank.

    Args:
        model: of a run with several models, which one. None: all, with `0.`, `1.`, … before their keys.

    Raises:
        CheckpointError: a parameter is incomplete.
        UsageError: the run has no such model.
    """
    layout = checkpoint.meta["layout"]
    book = state_book(checkpoint)
    found: dict[str, Tensor] = {}
    if "extras.safetensors" in checkpoint.files:
        found.update(checkpoint.tensors("extras.safetensors"))
    saved = sorted(int(n[7:-12]) for n in checkpoint.files if n.startswith("worker-"))
    if saved:
        mine = worker_state(checkpoint, saved[0])
        found.update(buffers_of(mine))
    for name, shape, stride, _, _, _ in layout["tensors"]:
        count = 1
        for n in shape:
            count *= n
        flat = book.piece(name, "", 0, count)
        if flat is None or flat.numel() != count:
            raise CheckpointError(f"parameter {name!r} is incomplete in {checkpoint.path}")
        found[name] = flat.reshape(-1).as_strided(shape, stride).contiguous().clone()
    for alias, name in layout["aliases"]:
        found[alias] = found[name].clone()
    keys = checkpoint.meta["state_keys"]
    states = _by_model({key: found[key] for key in keys if key in found}, checkpoint.meta.get("models", 1))
    if model is not None and not 0 <= model < len(states):
        raise UsageError(
            f"the run has {len(states)} models, 0 to {len(states) - 1}: there is no model {model}."
        )
    if model is not None or len(states) == 1:
        return states[model or 0]
    return {f"{k}.{key}": tensor for k, state in enumerate(states) for key, tensor in state.items()}


def _by_model(state: dict[str, Tensor], models: int) -> list[dict[str, Tensor]]:
    """The state_dict of each model. (worker/prepared.py says how their tensors are named.)"""
    found: list[dict[str, Tensor]] = [{} for _ in range(models)]
    for name, tensor in state.items():
        number, colon, key = name.partition(":")
        later = models > 1 and bool(colon) and number.isdecimal()
        found[int(number) if later else 0][key if later else name] = tensor
    return found


def read_blob(blob: bytes, what: str) -> dict[str, Tensor]:
    """Tensors from the wire, in safetensors' format. Raises FrameError."""
    try:
        return parse_tensors(blob) if blob else {}
    except (SafetensorError, ValueError) as error:
        raise FrameError(f"{what} is not in safetensors' format: {error}") from None
