"""Snapshots: a run's model at one version, and where a reader gets them."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, assert_never

from paceline.core.json_types import JsonObject
from paceline.exceptions import CheckpointError, DeadlineError, LinkError
from paceline.storage.checkpoint import Checkpoint, load
from paceline.storage.requests import Requests
from paceline.storage.run_requests import (
    EvaluatedRequest,
    EvaluationHeard,
    Refused,
    RunHasEnded,
    RunRequest,
    SnapshotFailed,
    SnapshotRequest,
    SnapshotWritten,
    read_answer,
    read_snapshot_answer,
    request_body,
)

__all__ = ["RunSnapshots", "SavedSnapshot", "Snapshot", "SnapshotSource"]

T = TypeVar("T")

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
        wanted = SnapshotRequest(at_least, every, os.getpid())
        while True:
            match self._ask(wanted, read_snapshot_answer):
                case RunHasEnded(path, version):
                    return None if path is None else Snapshot(load(Path(path)), version, is_last=True)
                case SnapshotWritten(path, version):
                    try:
                        return Snapshot(load(Path(path)), version)
                    except CheckpointError as error:  # another reader asked for later ones, and it was pruned
                        self._log(f"a snapshot cannot be read: {error}")
                case SnapshotFailed(reason):
                    self._log(f"a snapshot failed: {reason}")
                    time.sleep(_RETRY_S)
                case Refused(reason):
                    raise LinkError(f"the run refused a snapshot: {reason}")
                case answer:
                    assert_never(answer)

    def tell(self, version: int, values: Mapping[str, float]) -> int:
        """See SnapshotSource."""
        found = EvaluatedRequest(version, dict(values))
        answer = self._ask(found, functools.partial(read_answer, EvaluationHeard))
        if isinstance(answer, Refused):
            self._log(f"the run's status does not show an evaluation: {answer.refused}")
            return version
        return answer.version

    def _ask(self, request: RunRequest, read: Callable[[JsonObject], T]) -> T:
        """Ask until there is an answer. Raises LinkError if the run ends, or answers what is none."""
        while True:
            with contextlib.suppress(DeadlineError):
                body = self._requests.ask(request_body(request), alive=self._alive, within_s=_PATIENCE_S)
                try:
                    return read(body)
                except ValueError as error:
                    raise LinkError(f"the run answered what cannot be understood: {error}") from error
