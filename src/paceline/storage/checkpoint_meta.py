"""What a run needs of a checkpoint's `meta` to go on from it, or to export its model.

Everything is looked at before anything starts: what a server would only find out in the middle of a resume is
a reason to take the checkpoint before it.
"""

from typing import Any, TypedDict

from paceline.core.layout import Layout
from paceline.core.modes import parse_mode
from paceline.exceptions import CheckpointError, FrameError, UsageError
from paceline.storage.checkpoint import Checkpoint
from paceline.storage.manifest import UNUSABLE
from paceline.storage.typed_json import checked

__all__ = ["check_meta"]

_MOST_MODELS = 10_000


class _Machine(TypedDict):
    version: int
    floor: int
    clocks: dict[int, int]


class _Leases(TypedDict):
    samples: int
    accounts: list[dict[str, int]]
    pool: list[tuple[int, int]]
    next_id: int


class _SavedTrial(TypedDict):
    slot: int
    slope: float
    length: float
    number: int


class _SavedPair(TypedDict):
    slot: int
    sy: list[float]
    yy: list[float]


class _Driver(TypedDict):
    first: bool
    iterations: int
    diagonal: float
    pairs: list[_SavedPair]
    trial: _SavedTrial | None


class _Descent(TypedDict):
    driver: _Driver
    samples: int
    whole: bool
    restarted: bool


class _LeadAlways(TypedDict):
    mode: str
    machine: _Machine
    leases: _Leases | None
    streamed: int
    samples: int
    pushes: int
    staleness: dict[int, int]


class _Lead(_LeadAlways, total=False):
    """`Decider.snapshot()`; what is not in all versions."""

    descent: _Descent | None
    orders: dict[int, str]
    skipped: int


class _Optimizer(TypedDict):
    target: str
    groups: list[dict[str, Any]]
    whole_tensors: bool


class _MetaAlways(TypedDict):
    layout: dict[str, Any]
    optimizer: _Optimizer
    state_keys: list[str]
    lead: _Lead


class _Meta(_MetaAlways, total=False):
    models: int
    calls: int


def check_meta(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that no run can go on from, whatever its hashes say.

    Raises:
        CheckpointError: something is missing, or of a wrong type or size; with its place.
    """
    try:
        meta = checked(_Meta, checkpoint.meta)
        layout = Layout.from_json(meta["layout"])
        lead = meta["lead"]
        parse_mode(lead["mode"]).machine().restore(checkpoint.meta["lead"]["machine"])
        if layout.tensor_bytes > sum(info.bytes for info in checkpoint.files.values()):
            raise ValueError(f"layout: {layout.tensor_bytes:,} bytes of tensors are more than its files hold")
        if not 1 <= meta.get("models", 1) <= _MOST_MODELS:
            raise ValueError(f"models: {meta['models']}")
        if min(lead["samples"], lead["pushes"], lead["machine"]["version"], lead["machine"]["floor"]) < 0:
            raise ValueError("lead: a count is below 0")
    except (ValueError, UsageError, FrameError, KeyError, TypeError, IndexError, OverflowError) as error:
        reason = str(error) or repr(error)
        raise CheckpointError(
            f"{checkpoint.path} does not hold what a run goes on from: meta: {reason}. {UNUSABLE}"
        ) from error
