"""When a worker sends its part of a checkpoint, and what it sends for workers that join later."""

import threading
from collections.abc import Callable

from torch import Tensor

from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import Lane
from paceline.worker.exchange.client import Client

__all__ = ["PartSaver"]


class PartSaver:
    """Sends one worker's part of checkpoints.

    Args:
        lock: held by the thread that talks to the servers.
        is_root: False on members of a group that hear from their root when to save.
    """

    def __init__(self, client: Client, lock: threading.RLock, lane: Lane, *, is_root: bool) -> None:
        self._client = client
        self._lock = lock
        self._lane = lane
        self._is_root = is_root
        self._owed = False
        self._relay = False
        """Whether the root is to tell its group."""
        self._cut = 0
        """Version of the checkpoint that is owed, if it is known."""

    @property
    def due(self) -> bool:
        """Whether this worker's part is due."""
        return self._client.save_due() or self._owed

    def asked(self) -> bool:
        """Whether the run has asked for this member's part since the last time."""
        if self._client.save_due():
            self._owed = self._relay = True
        asked, self._relay = self._relay, False
        return asked

    def owe(self, cut: int = 0) -> None:
        """The group's root says that this member's part (of version `cut`) is due after this step."""
        if cut or not self._is_root:
            self._owed, self._cut = True, cut

    def relay(self) -> None:
        """The root has saved its part and is to tell its group."""
        self._relay = True

    def save(self, collect: Callable[[], dict[str, Tensor]]) -> None:
        """Send this worker's part, as it is once all replies are here."""
        self._owed = False
        phase = self._lane.enter(Phase.CHECKPOINT)
        self._client.settle()
        part = collect()
        cut, self._cut = self._cut, 0
        with self._lock:
            self._client.save(part, cut)
        self._lane.enter(phase)

    def send_for_others(self, tensors: dict[str, Tensor]) -> None:
        """Let the run know what a worker that joins later starts from."""
        phase = self._lane.enter(Phase.CHECKPOINT)
        with self._lock:
            self._client.save(tensors, buffers=True)
        self._lane.enter(phase)
