"""Deadlines: no worker waits for ever, and the error names the process that is missing."""

from paceline.core.decider import Decider
from paceline.core.sequencer import Sequencer
from paceline.core.server.lead_actions import FailRun, OutgoingActions, Tell
from paceline.core.server.lead_reports import ReplaceWorker
from paceline.core.server.lead_settings import LeadSettings
from paceline.core.server.present import Present
from paceline.core.server.start_gate import StartGate
from paceline.core.server.waits import Waits
from paceline.exceptions import DeadlineError, PacelineError, UsageError

__all__ = ["Deadlines"]


class Deadlines:
    """Checks all waits of a run against --deadline. One owner: the leader.

    Args:
        out: gets the actions that follow: workers to replace, or the end of the run.
    """

    def __init__(
        self,
        settings: LeadSettings,
        decider: Decider,
        sequencer: Sequencer,
        gate: StartGate,
        waits: Waits,
        present: Present,
        out: OutgoingActions,
    ) -> None:
        self._limit = settings.deadline_s
        self._advice = f"the deadline is {settings.deadline_s:g} s (--deadline)"
        self._decider, self._sequencer, self._gate = decider, sequencer, gate
        self._waits, self._present, self._out = waits, present, out

    def check(self, now: float, offering: set[int]) -> None:
        """Look at all waits.

        Args:
            offering: workers that have offered their model and wait for an answer.
        """
        self._check_gate(now, offering)
        self._check_left_behind(now)
        self._check_linkless(now)
        self._check_waits(now)

    def _replace(self, worker: int, reason: str, incarnation: int | None = None) -> None:
        """Have the controller put another process in a worker's place."""
        incarnation = self._present.attached.get(worker, incarnation)
        self._out.put(Tell(ReplaceWorker(worker, incarnation, reason)))

    def _fail(self, error: PacelineError) -> None:
        self._out.put(FailRun(error))

    def _check_gate(self, now: float, offering: set[int]) -> None:
        if missing := self._gate.late(now, self._limit, offering):
            text = f"{_names(missing)} did not reach paceline.prepare() while others wait; {self._advice}."
            self._fail(DeadlineError(text))

    def _check_left_behind(self, now: float) -> None:
        for worker in sorted(self._decider.left_behind):
            silent = now - self._waits.heard_at.get(worker, now)
            if silent > self._limit:
                self._waits.heard(worker, now)
                self._replace(
                    worker,
                    f"DeadlineError: worker:{worker} has said nothing for {silent:.0f} s in an epoch that is "
                    f"over without it, and others have finished; {self._advice}. Look at its log, or raise "
                    "the deadline if a step may take this long.",
                )

    def _check_linkless(self, now: float) -> None:
        for worker, (incarnation, since) in [*self._waits.linkless.items()]:
            if worker in self._present.attached:  # another one in its place
                del self._waits.linkless[worker]
            elif now - since > self._limit:
                self._waits.link_lost(worker, incarnation, now)
                self._replace(
                    worker,
                    f"DeadlineError: worker:{worker} has no link any more, and its process has neither ended "
                    f"nor said why for {now - since:.0f} s: it hangs; {self._advice}. Look at its log.",
                    incarnation,
                )

    def _check_waits(self, now: float) -> None:
        late = next(((w, t) for w, t in self._waits.since.items() if now - t > self._limit), None)
        if late is None:
            return
        worker, since = late
        blockers = self.blockers(worker)
        text = (
            f"worker:{worker} has waited {now - since:.0f} s at version {self._decider.version} "
            f"for {_names(sorted(blockers)) or 'a server'}; {self._advice}. Look at its log, or raise the "
            "deadline if a step may take this long."
        )
        if not blockers:
            self._fail(DeadlineError(text))
            return
        # A worker that waits in a collective for one which trains on meanwhile waits for ever.
        elsewhere = [b for b in sorted(blockers) if self._waits.heard_at.get(b, since) > since]
        if (place := self._waits.calling.get(worker)) is not None and elsewhere:
            self._fail(
                UsageError(
                    f"worker:{worker} has waited {now - since:.0f} s in paceline.{place} for "
                    f"{_names(elsewhere)}, which went on training meanwhile; {self._advice}. Call it on "
                    "every worker: look for what in the script depends on the rank."
                )
            )
            return
        for blocker in sorted(blockers):
            self._replace(blocker, f"DeadlineError: {text}")
        self._waits.begin_all_anew(now)

    def blockers(self, worker: int) -> set[int]:
        """Workers that this one waits for; none if it waits for a server."""
        decider, waits = self._decider, self._waits
        if worker in waits.voting:
            return decider.awaited_votes - {worker}
        if worker in waits.calling:
            return decider.awaited_callers - {worker}
        if self._sequencer.waiting:
            return set()
        waits_for = decider.machine.waiting.get(worker, set()) | decider.missing_assigns
        if not waits_for and decider.book:
            waits_for = set(decider.book.outstanding)
        # Leases that no worker holds must still be taken by one, or read to the epoch's end.
        waits_for = waits_for - {worker} or decider.machine.members - waits.since.keys()
        return waits_for - {worker}


def _names(workers: list[int]) -> str:
    return ", ".join(f"worker:{worker}" for worker in workers)
