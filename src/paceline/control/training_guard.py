"""Notices that the training diverges, tells the user, and with `--guard` decides what to do about it.

Every run is checked for divergence. With a guard the run goes back to a good checkpoint and continues in a
tighter mode. Without `--checkpoint-every` the guard asks for checkpoints itself: every 15 s, or less often
if they take long, so that at most a fiftieth of the time is spent on them.
"""

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

from paceline.comm.messages import LeadReport, LoggedMetrics
from paceline.control.run_record import RunRecord
from paceline.core.modes import Decision, Divergence, Guard, ModeSpec, explained, parse_mode
from paceline.exceptions import CheckpointError, UsageError
from paceline.storage.checkpoint import discard_after

__all__ = ["GiveUp", "Rewind", "Tighten", "TrainingGuard", "Verdict"]

_SNAPSHOT_S = 15.0
_PART = 1 / 50
"""Maximum share of the time that is spent on the guard's checkpoints."""
_MOST_NOTES = 3
"""Maximum number of times that the user is told of divergence, in a run that recovers in between."""


class Tighten(NamedTuple):
    """Switch the run to this mode."""

    mode: ModeSpec


class Rewind(NamedTuple):
    """Go back to the newest good checkpoint, and continue in this mode."""

    mode: ModeSpec
    reason: str


class GiveUp(NamedTuple):
    """Fail the run."""

    message: str


Verdict = Tighten | Rewind | GiveUp


class TrainingGuard:
    """Looks after the training of one run.

    Args:
        version: that the run started from.
        guarded: whether to act on divergence (`--guard`).
        periodic: whether servers write periodic checkpoints (`--checkpoint-every`).
        bad_after: see the attribute; from the journal.
        num_workers: returns the number of workers that the run is to have.
        check_mode: raises UsageError if the run cannot switch to a mode.
    """

    def __init__(
        self,
        record: RunRecord,
        *,
        version: int,
        guarded: bool,
        periodic: bool,
        bad_after: int | None,
        num_workers: Callable[[], int],
        check_mode: Callable[[ModeSpec], None],
    ) -> None:
        self._record = record
        self._num_workers = num_workers
        self._check_mode = check_mode
        self._divergence = Divergence(record.status.first_losses, version)
        self._guard = Guard() if guarded else None
        self._snapshots = guarded and not periodic
        self.bad_after = bad_after
        """Checkpoints after this version are of a run that diverged, until they are removed."""
        self._went_back_to: int | None = None
        """Version that the guard had the run go back to last."""
        self._notes = 0
        self._snapshot_due: float | None = None
        self._snapshot_asked = 0.0

    # --- what roles report --------------------------------------------------------------------------

    def hear_metrics(self, rank: int, logged: LoggedMetrics) -> None:
        """A worker's script logged these."""
        version = logged.log_at.get("version", self._record.status.version)
        for loss in logged.losses:
            self._divergence.logged(rank, {"loss": loss}, version)
            if self._guard is not None:
                self._guard.loss(loss, version)
        others = {name: value for name, value in logged.log.items() if name != "loss"}
        self._divergence.logged(rank, others, version)
        self._record.status.first_losses = self._divergence.first

    def hear_pushes(self, report: LeadReport) -> None:
        """A report of the lead that is not in the status yet."""
        before = self._record.status
        new = {each: count - before.staleness.get(each, 0) for each, count in report.staleness.items()}
        new = {each: count for each, count in new.items() if count > 0}
        refused = max(0, report.refused - before.refused)
        self._divergence.pushes(sum(new.values()), refused)
        for worker, norm in report.norms:
            self._divergence.norm(worker, norm, before.version)
        if self._guard is not None:
            self._guard.pushes(new, refused=refused)

    # --- verdicts -----------------------------------------------------------------------------------

    def overflowed(self) -> Verdict | None:
        """An update overflowed, which ends a server. None: without a guard nothing can be done."""
        seen = "an update overflowed"
        self._record.status.diverged = self._explained(seen)
        return None if self._guard is None else self._ran_away(self._guard, seen)

    def consult(self) -> Verdict | None:
        """Look for divergence while the run is running. Tells the user of it, and returns what to do."""
        status, seen = self._record.status, self._divergence.seen
        if seen is None:
            status.diverged = None
        else:
            new = status.diverged is None
            status.diverged = self._explained(seen)
            if self._guard is not None:
                return self._ran_away(self._guard, seen)
            if new and self._notes < _MOST_NOTES:
                self._notes += 1
                self._record.note(status.diverged)
        advice = None if self._guard is None else self._guard.verdict(parse_mode(status.mode))
        return None if advice is None else self._decline(advice)

    def _explained(self, seen: str) -> str:
        status = self._record.status
        return explained(
            seen,
            parse_mode(status.mode),
            workers=self._num_workers(),
            staleness=status.staleness_mean if status.staleness else None,
            guarded=self._guard is not None,
        )

    def _decline(self, advice: Decision) -> Verdict | None:
        """The loss rises slowly: go back to a good checkpoint if there is one, and use a tighter mode."""
        self._record.note(f"guard: {advice.reason}")
        if advice.mode is None:
            return None
        try:
            self._check_mode(advice.mode)
        except UsageError as error:
            self._record.note(f"guard: the run cannot be switched to {advice.mode}: {error}")
            return None
        back_to = advice.back_to
        if back_to is not None and any(version <= back_to for version in self._record.saved_versions):
            return self._rewind(advice.mode, back_to, f"guard: {advice.reason}")
        return Tighten(advice.mode)

    def _ran_away(self, guard: Guard, seen: str) -> Verdict:
        """The model is spoiled: go back to a good checkpoint, and continue without staleness."""
        mode = parse_mode(self._record.status.mode)
        advice = guard.ran_away(mode, seen, self._divergence.good_version)
        reason, tighter = f"guard: {advice.reason}", advice.mode
        if tighter is not None:
            try:
                self._check_mode(tighter)
            except UsageError as error:
                reason += f"; but the run cannot be switched: {error}"
                tighter = None
        if tighter is not None:
            return self._rewind(tighter, advice.back_to, reason)
        if self._went_back_to:  # the checkpoint that it went back to may have been bad already
            earlier, self._went_back_to = self._went_back_to - 1, None
            return self._rewind(mode, earlier, f"{reason}: the run goes back further")
        self.bad_after = advice.back_to
        return GiveUp(f"{self._explained(seen)} {self._remains()}")

    def _rewind(self, mode: ModeSpec, back_to: int | None, reason: str) -> Rewind:
        self.bad_after = back_to
        return Rewind(mode, f"{reason}. It goes on in mode {mode}")

    def _remains(self) -> str:
        saved, limit = self._record.saved_versions, self.bad_after
        good = [version for version in saved if limit is None or version <= limit]
        if not good:
            return "Nothing was kept of it from before."
        return f"`paceline resume` goes on from version {max(good):,}, which was good."

    # --- going back, and the end --------------------------------------------------------------------

    def discard_bad(self) -> None:
        """Remove checkpoints of a run that diverged. Only while no server writes."""
        if (limit := self.bad_after) is None:
            return
        with contextlib.suppress(CheckpointError):
            discard_after(self._record.directory.checkpoints_path, limit)
        names = zip(self._record.saved_versions, self._record.status.checkpoints, strict=True)
        self._record.status.checkpoints = [name for version, name in names if version <= limit]

    def went_back(self, version: int) -> None:
        """The run starts again from this version, for any reason."""
        if self.bad_after is not None:
            self._went_back_to, self.bad_after = version, None
        self._divergence.restart(version)
        if self._guard is not None:
            self._guard.restart()  # the last reports before the end came after its verdict
        self._record.status.diverged = None
        for worker in self._record.status.workers.values():
            worker.metrics = {}
        self._snapshot_due = None

    def judge(self) -> None:
        """The run is over: say in its status what its last losses are worth."""
        seen = self._divergence.outcome
        self._record.status.diverged = None if seen is None else self._explained(seen)

    # --- the guard's own checkpoints ----------------------------------------------------------------

    def wants_snapshot(self, now: float, *, running: bool) -> bool:
        """Whether it is time to ask for a checkpoint, because all is well."""
        status = self._record.status
        if not self._snapshots or not status.startup_s:
            return False
        if self._snapshot_due is None:
            self._snapshot_due = now + _SNAPSHOT_S
        well = running and self._divergence.seen is None
        if now < self._snapshot_due or not well or status.version in self._record.saved_versions:
            return False
        self._snapshot_asked, self._snapshot_due = now, now + _SNAPSHOT_S
        return True

    def checkpoint_written(self) -> None:
        """A checkpoint is written: the longer it took, the later is the next one."""
        if self._snapshot_due is not None:
            now = time.monotonic()
            self._snapshot_due = max(self._snapshot_due, now + (now - self._snapshot_asked) / _PART)
