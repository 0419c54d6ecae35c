"""Snapshots: a run's model at one version, and where a reader gets them."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.exceptions import CheckpointError, DeadlineError, LinkError
from paceline.storage.checkpoint import Checkpoint, load
from paceline.storage.requests import Requests

__all__ = ["RunSnapshots", "SavedSnapshot", "Snapshot", "SnapshotSource"]

_RETRY_S = 1.0
"""How long a disk that has no room is left alone."""
_PATIENCE_S = 30.0
"""After this long a request is made anew: the controller that took it may have died."""


@dataclass(frozen=True)
class Snapshot:
    """A run's model, all of it at one version."""

    checkpoint: Checkpoint
    version: int
    is_last: bool = False
    """Whether there will be no later one."""

    @property
    def samples(self) -> int:
        """Samples that the run had applied."""
        return int(self.checkpoint.meta["lead"].get("samples", -1))

    @property
    def calls(self) -> int:
        """Number of calls of prepare() that brought the model."""
        return int(self.checkpoint.meta.get("calls", 1))


class SnapshotSource(Protocol):
    """Where a reader gets snapshots."""

    def next(self, at_least: int, every: int) -> Snapshot | None:
        """Wait for the model of a version that is at least this and a multiple of `every`, or the run's last.

        Returns:
            None if there is no more.
        """

    def tell(self, version: int, values: Mapping[str, float]) -> int:
        """Tell the run what was measured. Returns the run's present version."""


class SavedSnapshot:
    """One checkpoint of a run, as a source of one snapshot."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._snapshot = Snapshot(checkpoint, checkpoint.version, is_last=True)

    def next(self, at_least: int, every: int) -> Snapshot | None:
        """See SnapshotSource."""
        return self._snapshot

    def tell(self, version: int, values: Mapping[str, float]) -> int:
        """See SnapshotSource. The run is over, so there is nobody to tell."""
        return version


class RunSnapshots:
    """Snapshots of a run that goes on. The run's controller has the servers write each when it is wanted.

    Args:
        run: the run directory.
        alive: whether the run goes on.
        log: told of snapshots that failed.
    """

    def __init__(self, run: Path, *, alive: Callable[[], bool], log: Callable[[str], None]) -> None:
        self._requests = Requests(run)
        self._alive = alive
        self._log = log

    def next(self, at_least: int, every: int) -> Snapshot | None:
        """See SnapshotSource.

        Raises:
            LinkError: the run ended.
        """
        while True:
            answer = self._ask({"kind": "snapshot", "at": at_least, "every": every, "process": os.getpid()})
            path, version = answer.get("path"), answer.get("version")
            if answer.get("over"):
                return None if path is None else Snapshot(load(Path(path)), int(version or 0), is_last=True)
            if answer.get("refused"):
                raise LinkError(f"the run refused a snapshot: {answer['refused']}")
            if not isinstance(path, str) or not isinstance(version, int):
                self._log(f"a snapshot failed: {answer.get('failed', 'no reason is known')}")
                time.sleep(_RETRY_S)
                continue
            try:
                return Snapshot(load(Path(path)), version)
            except CheckpointError as error:  # later ones have taken its place: another reader asked for them
                self._log(f"a snapshot cannot be read: {error}")

    def tell(self, version: int, values: Mapping[str, float]) -> int:
        """See SnapshotSource."""
        # As text: JSON has no NaN.
        body = {"kind": "evaluated", "version": version, "values": {k: repr(v) for k, v in values.items()}}
        return int(self._ask(body).get("version", version))

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        while True:
            try:
                return self._requests.ask(body, alive=self._alive, within_s=_PATIENCE_S)
            except DeadlineError:
                continue
