"""A worker's buffers (BatchNorm statistics, …), sent to the servers now and then.

A worker that dies takes its buffers along. The lead server keeps the newest that any worker sent, and a
worker that joins or replaces another one starts from them.
"""

import math
import time

from torch import Tensor

from paceline.worker.checkpoint_part import extras_of
from paceline.worker.prepared import Models

__all__ = ["BufferSchedule"]

EVERY_S = 0.5
"""Time between two shipments that reach the lead server, from all workers together."""
_COST = 100
"""A worker spends at most this part of its time (1/100) on sending buffers."""


class BufferSchedule:
    """Decides when a worker sends its buffers, and collects them.

    The first shipment is due at once. Models without buffers never send any.

    Args:
        trained: names of the trained parameters; frozen ones do not change and are not sent either.
        workers: number of workers that send in turn.
    """

    def __init__(self, models: Models, trained: set[str], *, workers: int) -> None:
        self._models = models
        self._left_out = trained | {name for name, _ in models.named_parameters(remove_duplicate=False)}
        self._every_s = EVERY_S * workers
        self._next = -math.inf if extras_of(models, self._left_out) else math.inf

    @property
    def due(self) -> bool:
        """Whether it is time to send the buffers."""
        return time.monotonic() >= self._next

    def collect(self) -> dict[str, Tensor]:
        """The buffers as they are now, by the keys of a worker's part of a checkpoint."""
        self._began = time.monotonic()
        return {f"buffer:{name}": t.clone() for name, t in extras_of(self._models, self._left_out).items()}

    def sent(self) -> None:
        """What `collect` returned is sent: choose when to send again. Large buffers are sent less often."""
        now = time.monotonic()
        self._next = now + max(self._every_s, _COST * (now - self._began))
