"""Sees that a run diverges, says so, and with `--guard` does something about it.

Divergence is looked for in every run. With a guard the run goes back to what was kept of it while all was
well, and on in a tighter mode. Without `--checkpoint-every` the guard has checkpoints written by itself:
every 15 s, or less often if they take long, so that writing them takes a fiftieth of the time at most.
"""

import contextlib
import time

from paceline.comm.messages import LeadReport, LoggedMetrics, SaveSoon
from paceline.control.steering import GUARD, Steering
from paceline.core.modes import Decision, Divergence, Guard, explained, parse_mode
from paceline.core.run_decisions import RunState
from paceline.exceptions import CheckpointError, LinkError, UsageError
from paceline.storage.checkpoint import discard_after

__all__ = ["Guarding"]

_SNAPSHOT_S = 15.0
_PART = 1 / 50
"""Of the time, at most, in which the guard's checkpoints are written."""
_MOST_NOTES = 3
"""So often a run is said to diverge that gets better in between."""


class Guarding(Steering):
    """The controller's part that looks after the training itself."""

    def _begin_guarding(self, version: int) -> None:
        self._divergence = Divergence(self.status.first_losses, version)
        self._guard = Guard() if self.plan.job.guard else None
        self._bad_after: int | None = None
        """Checkpoints after this version are of a run that diverged, until they are removed."""
        self._went_back_to: int | None = None
        """Where the guard had the run go back to last."""
        self._notes = 0
        self._snapshot_due: float | None = None
        self._snapshot_asked = 0.0

    # --- hearing ------------------------------------------------------------------------------------

    def _hear_metrics(self, rank: int, logged: LoggedMetrics) -> None:
        """A worker's script logged these."""
        version = logged.log_at.get("version", self.status.version)
        for loss in logged.losses:
            self._divergence.logged(rank, {"loss": loss}, version)
            if self._guard is not None:
                self._guard.loss(loss, version)
        self._divergence.logged(rank, {k: v for k, v in logged.log.items() if k != "loss"}, version)

    def _hear_pushes(self, report: LeadReport) -> None:
        """What happened to pushes since the lead's last report, which the status has."""
        before = self.status
        new = {each: count - before.staleness.get(each, 0) for each, count in report.staleness.items()}
        new = {each: count for each, count in new.items() if count > 0}
        refused = max(0, report.refused - before.refused)
        self._divergence.pushes(sum(new.values()), refused)
        for worker, norm in report.norms:
            self._divergence.norm(worker, norm, self.status.version)
        if self._guard is not None:
            self._guard.pushes(new, refused=refused)

    def _overflowed(self) -> bool:
        """An update overflowed, which ends a server. Whether the guard has dealt with it."""
        if self._machine.state not in (RunState.RUNNING, RunState.RECOVERING):
            return False
        seen = "an update overflowed"
        self.status.diverged = self._explained(seen)
        if self._guard is None:
            return False
        self._ran_away(self._guard, seen)
        return True

    # --- deciding -----------------------------------------------------------------------------------

    def _consult(self) -> None:
        if self._machine.state is not RunState.RUNNING or GUARD in self._switching:
            return
        seen = self._divergence.seen
        if seen is None:
            self.status.diverged = None
        else:
            new = self.status.diverged is None
            self.status.diverged = self._explained(seen)
            if self._guard is not None:
                self._ran_away(self._guard, seen)
                return
            if new and self._notes < _MOST_NOTES:
                self._notes += 1
                self._note(self.status.diverged)
        if self._guard is not None:
            decision = self._guard.verdict(parse_mode(self.status.mode))
            if decision is not None:
                self._tighten(decision)

    def _explained(self, seen: str) -> str:
        return explained(
            seen,
            parse_mode(self.status.mode),
            workers=len(self._machine.working),
            staleness=self.status.staleness_mean if self.status.staleness else None,
            guarded=self._guard is not None,
        )

    def _tighten(self, decision: Decision) -> None:
        """The run gets worse, slowly: if something good was kept, back to that; then on in a tighter mode."""
        self._note(f"guard: {decision.reason}")
        if decision.mode is None:
            return
        try:
            self._check_mode(decision.mode)
            if decision.back_to is not None and any(v <= decision.back_to for v in self._kept):
                self._go_back_in(decision, f"guard: {decision.reason}")
            else:
                self._switch(GUARD, decision.mode)
        except UsageError as error:
            self._note(f"guard: the run cannot be switched to {decision.mode}: {error}")

    def _ran_away(self, guard: Guard, seen: str) -> None:
        """What the run has learned is lost: back to what was kept of it, and on without staleness."""
        mode = parse_mode(self.status.mode)
        decision = guard.ran_away(mode, seen, self._divergence.good_version)
        reason = f"guard: {decision.reason}"
        if decision.mode is not None:
            try:
                self._check_mode(decision.mode)
            except UsageError as error:
                reason += f"; but the run cannot be switched: {error}"
                decision = Decision(None, reason, decision.back_to, ran_away=True)
        if decision.mode is None and self._went_back_to:
            # What it went back to may have been bad already.
            earlier = Decision(mode, reason, self._went_back_to - 1, ran_away=True)
            self._went_back_to = None
            self._go_back_in(earlier, f"{reason}: the run goes back further")
        elif decision.mode is not None:
            self._go_back_in(decision, reason)
        else:
            self._bad_after = decision.back_to
            self._do(self._machine.give_up(f"{self._explained(seen)} {self._remains()}"))

    def _go_back_in(self, decision: Decision, reason: str) -> None:
        assert decision.mode is not None
        self._bad_after = decision.back_to
        if str(decision.mode) != self.status.mode:
            self._set_mode(decision.mode)
            with self._going_on_without_disk():
                self.run_dir.record_setting(mode=str(decision.mode))
        self._do(self._machine.diverged(f"{reason}. It goes on in mode {decision.mode}"))

    def _remains(self) -> str:
        good = [version for version in self._kept if self._bad_after is None or version <= self._bad_after]
        if not good:
            return "Nothing was kept of it from before."
        return f"`paceline resume` goes on from version {max(good):,}, which was good."

    @property
    def _kept(self) -> list[int]:
        """Versions of the checkpoints."""
        return [int(name.rpartition("-")[2]) for name in self.status.checkpoints]

    # --- going back, and the end --------------------------------------------------------------------

    def _discard_bad(self) -> None:
        """Remove checkpoints of a run that diverged. Only while no server writes."""
        if self._bad_after is not None:
            with contextlib.suppress(CheckpointError):
                discard_after(self.run_dir.checkpoints_path, self._bad_after)
            kept = zip(self._kept, self.status.checkpoints, strict=True)
            self.status.checkpoints = [name for version, name in kept if version <= self._bad_after]

    def _went_back(self, version: int) -> None:
        """The run begins again there, whatever for."""
        if self._bad_after is not None:
            self._went_back_to, self._bad_after = version, None
        self._divergence.restart(version)
        if self._guard is not None:
            self._guard.restart()  # the last words of those who ran away came after its decision
        self.status.diverged = None
        for worker in self.status.workers.values():
            worker.metrics = {}
        self._snapshot_due = None

    def _judge(self) -> None:
        """The run is over: what its last losses are worth."""
        if self._machine.state is RunState.FAILED:
            return
        seen = self._divergence.outcome
        self.status.diverged = None if seen is None else self._explained(seen)

    # --- keeping what is good -----------------------------------------------------------------------

    def _keep_if_due(self, now: float) -> None:
        """With a guard and without periodic checkpoints: have one written now and then, while all is well."""
        if self._guard is None or self.plan.job.checkpoint_every or not self.status.startup_s:
            return
        if self._snapshot_due is None:
            self._snapshot_due = now + _SNAPSHOT_S
        well = self._machine.state is RunState.RUNNING and self._divergence.seen is None
        if now < self._snapshot_due or not well or self.status.version in self._kept:
            return
        self._snapshot_asked, self._snapshot_due = now, now + _SNAPSHOT_S
        with contextlib.suppress(LinkError, KeyError):
            self._links[self._lead].tell(SaveSoon())

    def _was_kept(self) -> None:
        """A checkpoint is written."""
        if self._snapshot_due is not None:
            now = time.monotonic()
            self._snapshot_due = max(self._snapshot_due, now + (now - self._snapshot_asked) / _PART)
