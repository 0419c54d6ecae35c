"""Evaluations: the process that evaluates beside the workers, and the snapshots that it reads.

The process (role `reader`) asks for snapshots and tells its results through the run directory, as commands do
(`paceline eval` beside a run is no different). It has no connection to any role, so nothing of the run can
wait for it: it may be slow, stopped or killed.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from paceline.comm.messages import SnapshotEnded, TakeSnapshot
from paceline.control.processes import RoleProcesses
from paceline.control.role_links import RoleLinks
from paceline.control.run_record import RunRecord
from paceline.core.run_decisions import RunState
from paceline.core.run_machine import RunMachine
from paceline.engines import Exited
from paceline.exceptions import CheckpointError, UsageError
from paceline.storage.checkpoint import committed
from paceline.storage.requests import Requests
from paceline.storage.run_requests import (
    EvaluatedRequest,
    EvaluationHeard,
    RunHasEnded,
    SnapshotAnswer,
    SnapshotFailed,
    SnapshotRequest,
    SnapshotWritten,
)

__all__ = ["Evaluations"]

_ASK_AGAIN_S = 2.0
"""The lead may have been replaced since it was asked for a snapshot."""
_MOST_STARTS = 3
"""How often the process is started, if it is killed."""
_MOST_VALUES = 1_000
"""Number of values of one evaluation that the status shows."""


class Evaluations:
    """One run's."""

    def __init__(
        self,
        record: RunRecord,
        machine: RunMachine,
        links: RoleLinks,
        processes: RoleProcesses,
        requests: Requests,
    ) -> None:
        self._record = record
        self._machine = machine
        self._links = links
        self._processes = processes
        self._requests = requests
        self._every = 0
        self._starts = 0
        self._ended = False
        """Whether the process has ended and is not started again."""
        self._wishes: dict[int, tuple[str, SnapshotRequest]] = {}
        """Snapshots that readers wait for, by process, with the names of their requests."""
        self._asked_at = 0.0
        self._final: tuple[str, int] | None = None
        """Path and version of the checkpoint that the run ended with."""
        self._is_over = False

    # --- the process ------------------------------------------------------------------------------

    def declared(self, every: int) -> None:
        """The script has an evaluation. A worker that was started again says so once more."""
        if not self._starts:
            self._every = every
            self._start()

    def _start(self) -> None:
        if "reader:0" not in self._processes.local_pids():  # else it has outlived another controller
            self._processes.start_reader(self._every, self._starts)
        self._starts += 1

    @property
    def busy(self) -> bool:
        """Whether the process runs, or is about to."""
        return self._starts > 0 and not self._ended

    def exited(self, event: Exited) -> None:
        """The process ended: by itself, by an error of the script, or it was killed."""
        if event.code == 0 or self._machine.state in (RunState.FAILED, RunState.STOPPED):
            self._ended = True
        elif event.code is None and self._starts < _MOST_STARTS and not self._is_over:
            self._record.note(
                f"reader:0, which evaluates, {event.end.how}; it is started again. Training goes on."
            )
            self._start()
        else:
            self._ended = True
            log = self._record.directory.log_path("reader", 0)
            self._record.note(
                f"reader:0, which evaluates, {event.end.how}: nothing is evaluated from here on, and "
                f"training goes on. What it wrote: {log}"
            )

    # --- snapshots --------------------------------------------------------------------------------

    def snapshot_wanted(self, name: str, wanted: SnapshotRequest) -> None:
        """A reader wants the model of a version, or of the first one after it.

        Raises:
            UsageError: there is no such version.
        """
        if wanted.at < 0 or wanted.every < 1:
            raise UsageError(f"no version is at least {wanted.at} and a multiple of {wanted.every}")
        self._wishes[wanted.process] = name, wanted
        if self._is_over:
            self._answer_over()
        else:
            self._ask()

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        for _, wanted in self._wishes.values():
            self._links.tell(f"server:{self._machine.lead}", TakeSnapshot(wanted.at, wanted.every))

    def snapshot_ended(self, ended: SnapshotEnded) -> None:
        """The servers have written one, or could not."""
        for process, (_, wanted) in list(self._wishes.items()):
            if ended.path is None:
                self._answer(process, SnapshotFailed(ended.reason or "unknown"))
            elif wanted.at <= ended.version and ended.version % wanted.every == 0:
                self._answer(process, SnapshotWritten(ended.path, ended.version))

    def _answer(self, process: int, answer: SnapshotAnswer) -> None:
        name, _ = self._wishes.pop(process)
        with self._record.tolerating_full_disk():
            self._requests.answer(name, asdict(answer))

    def remove_snapshots(self) -> None:
        """Remove those of an earlier start, or of a run that is over."""
        shutil.rmtree(self._record.directory.path / "snapshots", ignore_errors=True)

    def evaluated(self, name: str, found: EvaluatedRequest) -> None:
        """A reader tells what it measured. It is answered how far the run is.

        Raises:
            UsageError: there are too many values.
        """
        if len(found.values) > _MOST_VALUES:
            raise UsageError(f"an evaluation has at most {_MOST_VALUES} values, got {len(found.values)}")
        status = self._record.status
        if found.version >= status.evaluated_at:
            status.evaluation, status.evaluated_at = found.values, found.version
        with self._record.tolerating_full_disk():
            self._requests.answer(name, asdict(EvaluationHeard(status.version)))

    # --- time -------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Some time has passed."""
        if self._wishes and not self._is_over and now - self._asked_at > _ASK_AGAIN_S:
            self._ask()

    def finishing(self, limit_s: float, is_stopping: Callable[[], bool]) -> Iterator[float]:
        """The run is over: let readers read the checkpoint that it ended with.

        Yields the time again and again, until the run's own reader has ended, or this many seconds are over.
        Of a run that has failed or was stopped nothing is evaluated.
        """
        try:
            if self._machine.state is RunState.SUCCEEDED:
                yield from self._last_evaluation(limit_s, is_stopping)
        finally:
            self._processes.kill("reader", 0)

    def _last_evaluation(self, limit_s: float, is_stopping: Callable[[], bool]) -> Iterator[float]:
        self._is_over = True
        paths = []
        with contextlib.suppress(CheckpointError):
            paths = committed(self._record.directory.checkpoints_path)
        if paths:
            self._final = str(paths[0]), self._record.status.version
        self._answer_over()
        began = time.monotonic()
        while self.busy and not is_stopping():
            if (now := time.monotonic()) - began > limit_s:
                self._give_up(limit_s)
                return
            yield now

    def _answer_over(self) -> None:
        path, version = self._final or (None, 0)
        for process in list(self._wishes):
            self._answer(process, RunHasEnded(path, version))

    def _give_up(self, seconds: float) -> None:
        """The last evaluation takes too long."""
        self._record.note(
            f"the evaluation of the final model was not finished within {seconds:g} s (--deadline) and was "
            f"ended. `paceline eval {self._record.directory.id}` measures it."
        )
