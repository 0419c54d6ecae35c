"""Copies the parameters of a shard, without the optimizer's state: a server's part of a snapshot."""

from torch import Tensor

from paceline.params import StateBook, segment_view
from paceline.ps.device_shard import DeviceShard
from paceline.ps.shard import Shard
from paceline.ps.slice_state import detached

__all__ = ["parameters_of"]


def parameters_of(shard: Shard) -> dict[str, Tensor]:
    """A copy of the parameters that a shard answers for, by StateBook's keys: all of one version."""
    if isinstance(shard, DeviceShard):  # it waits for the device, and looks at every parameter
        return {key: each for key, each in shard.snapshot().items() if not key.rsplit("|", 3)[1]}
    found: dict[str, Tensor] = {}
    for position in shard.owned:
        for g in shard.slices[position].segments:
            key = StateBook.key(shard.layout.tensors[g.tensor].name, "", g.start, g.stop)
            found[key] = detached(segment_view(shard.base, shard.layout, g), g.stop - g.start)
    return found
