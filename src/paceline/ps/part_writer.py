"""PartWriter: writes this server's part of a checkpoint, in a thread, while training goes on."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from paceline.comm.faults import Faults
from paceline.comm.server_messages import PartFailed, PartWritten
from paceline.exceptions import CheckpointError
from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import Recorder
from paceline.ps.run_store import CheckpointParts

__all__ = ["PartWriter"]

_BEHIND = 10
"""The niceness of a thread that writes a checkpoint: a tenth of a busy core."""


class PartWriter:
    """One server's.

    Args:
        name: of the file.
        faults: on purpose, for tests.
        spans: records what the thread does.
        post: has the main thread call a function.
        parts: where it writes.
    """

    def __init__(
        self,
        name: str,
        faults: Faults,
        spans: Recorder,
        post: Callable[[Callable[[], None]], None],
        parts: CheckpointParts,
    ) -> None:
        self.progress: list[int] | None = None
        """While a part is written: bytes written and bytes to write."""
        self._name = name
        self._faults = faults
        self._spans = spans
        self._post = post
        self._parts = parts
        self._written = 0

    def write(
        self, directory: Path, tensors: dict[str, Tensor], done: Callable[[PartWritten | PartFailed], None]
    ) -> None:
        """Write the file. The main thread calls `done` with what the leader is to know of it."""
        lane = self._spans.lane("checkpoint")
        self._written += 1
        fault = self._faults.at_checkpoint(self._written)
        progress = self.progress = [0, sum(each.nbytes for each in tensors.values())]

        def before_write(nbytes: int) -> None:
            progress[0] += nbytes
            if fault is not None:
                fault()

        def finish(outcome: PartWritten | PartFailed) -> None:
            self.progress = None
            done(outcome)

        def write() -> None:
            _give_way()
            lane.enter(Phase.CHECKPOINT)
            outcome: PartWritten | PartFailed
            try:
                info = self._parts.write(directory, self._name, tensors, before_write=before_write)
                outcome = PartWritten(str(directory), info.name, info.sha256, info.bytes)
            except CheckpointError as error:
                outcome = PartFailed(str(directory), str(error))
            lane.enter(Phase.IDLE)
            self._post(lambda: finish(outcome))

        threading.Thread(target=write, name="checkpoint part", daemon=True).start()


def _give_way() -> None:
    """Let the other threads of this host go first: whoever trains does not notice this one much."""
    if sys.platform == "linux":  # where threads have priorities of their own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)
