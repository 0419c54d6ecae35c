"""CheckpointCuts: when a checkpoint is cut, whose parts it waits for, and what became of it.

A checkpoint is a cut in the run's order. Every server copies its shard at the same version and writes the
copy; every worker sends its own part with the first reply that it gets after the cut.

    wanted ──cut──► in the making ──all parts here──► committing ──► committed
                        │ └──a server or a worker is gone before its part is here──► given up
                        └──hurried: workers' parts are not waited for any more
"""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.decider import Decider
from paceline.core.sequencer import Sequencer
from paceline.core.server.lead_actions import (
    AbandonCheckpoint,
    AdmitNotes,
    CommitCheckpoint,
    Notes,
    OpenCheckpoint,
    OutgoingActions,
    Tell,
    WelcomeNotes,
    WriteLog,
)
from paceline.core.server.lead_reports import SaveCut, SaveEnded
from paceline.core.server.present import Present
from paceline.core.steps import CheckpointStep, Steps

__all__ = ["HURRY_S", "LAST_PARTS_S", "CheckpointCuts"]

HURRY_S = 0.8
"""Seconds that a requested checkpoint waits for the end of a round and for the workers' parts."""
LAST_PARTS_S = 5.0
"""Seconds that the final one waits for workers that have ended, whose links should have, too."""


@dataclass
class _Making:
    """The checkpoint in the making."""

    version: int
    directory: str
    parts: int
    """Number of servers whose parts are not written yet."""
    workers: set[int]
    """Workers whose parts are not here yet."""
    hurried: bool = False
    """Whether workers' parts are not waited for any more."""
    committing: bool = False

    @property
    def needs_workers(self) -> bool:
        """Whether a worker's part is still waited for."""
        return bool(self.workers) and not self.hurried


class CheckpointCuts:
    """One owner: the leader. One checkpoint is in the making at a time.

    Methods that return steps want them ordered.

    Args:
        every: number of updates between periodic checkpoints; 0: there are none.
        present: the owner keeps it up to date.
        out: gets the actions that follow.
        directory_of: names a new directory for a checkpoint of this version.
    """

    def __init__(
        self,
        *,
        every: int,
        decider: Decider,
        sequencer: Sequencer,
        present: Present,
        out: OutgoingActions,
        directory_of: Callable[[int], str],
    ) -> None:
        self.current = 0
        """allreduce: the version of the parameters that this server holds."""
        self.last_saved = -1
        """Version of the last committed checkpoint; -1: there is none."""
        self.unsaved = False
        """Whether something is newer than a checkpoint of the present version would have it."""
        self._every, self._decider, self._sequencer = every, decider, sequencer
        self._present, self._out, self._directory_of = present, out, directory_of
        self._making: _Making | None = None
        self._flags: set[int] = set()
        """Workers that are to be asked for their parts."""
        self._again = False
        """Whether another one is cut when the one in the making is written or given up."""
        self._at_next = False
        """Whether one is cut at the next update."""
        self._asked = False
        """Whether the controller waits for one."""
        self._told_cut = False
        """Whether the controller knows that its checkpoint needs the workers no more."""
        self._all_ended = False
        """Whether the processes of all workers have ended: the controller waits for the final one."""
        self._hurry_at: float | None = None
        self._announced = -1
        """allreduce: the next version that needs this server's parameters."""
        self._part_versions: dict[int, int] = {}
        """allreduce: the versions of the parts that workers sent."""

    # --- when -------------------------------------------------------------------------------------

    def cut_if_due(self) -> Steps:
        """The step that cuts a checkpoint behind the update that is being ordered, if it is time for one."""
        version = self._decider.version
        if self._present.mode.serverless:
            due = version == self._announced
        else:
            due = self._at_next or self._is_periodic(version)
        return self._cut() if due else []

    def _is_periodic(self, version: int) -> bool:
        return self._every > 0 and version % self._every == 0

    def announce(self, worker: int, notes: AdmitNotes | WelcomeNotes) -> None:
        """allreduce: tell the root that the version which it makes next is to be kept. It then sends its
        parameters along, and tells its group, so that all parts are of one moment."""
        if not self._present.mode.serverless or self._making is not None:
            return
        version = self._decider.version + 1
        if self._decider.groups.speaks(worker) and (self._at_next or self._is_periodic(version)):
            self._announced = version
            notes["cut"] = True

    def want_soon(self) -> None:
        """The controller wants a checkpoint at the next update."""
        has_model = self._present.layout is not None
        self._at_next = self._at_next or (has_model and self._making is None)

    def want_now(self, now: float, *, all_ended: bool) -> Steps:
        """The controller wants a checkpoint, and waits for it.

        Args:
            all_ended: the processes of all workers have ended: it is the final one.
        """
        self._asked, self._told_cut = True, False
        self._all_ended = all_ended
        return self._save_now(now)

    def _save_now(self, now: float) -> Steps:
        patience = LAST_PARTS_S if self._all_ended else HURRY_S
        self._hurry_at = self._hurry_at or now + patience
        version, making = self._decider.version, self._making
        if self._present.layout is None:
            self._report(SaveEnded(None, reason="there is no model yet"))
        elif self._all_ended and self._present.attached:
            pass  # their last parts are on the way; the last one to leave brings us back
        elif making is not None:
            self._again = self.unsaved or making.version < version
        elif self.last_saved == version and not self.unsaved:
            self._report(SaveEnded("kept", self.last_saved))
        elif self._in_a_round or self._sequencer.waiting or not self._is_current:
            # Between two rounds every worker is between two batches, and a resume is bitwise.
            self._at_next = True
        else:
            return self._cut()
        return []

    @property
    def _in_a_round(self) -> bool:
        return self._present.mode.by_round and bool(self._decider.machine.active)

    @property
    def _is_current(self) -> bool:
        """Whether the parameters here are those of the present version. In allreduce they often are not."""
        return not self._present.mode.serverless or self.current == self._decider.version

    def hurry_if_late(self, now: float) -> Steps:
        """If a requested checkpoint has waited for a worker too long, cut it here, and commit it."""
        if self._hurry_at is None or now <= self._hurry_at:
            return []
        self._hurry_at = None
        if self._all_ended and self._present.attached:
            self._all_ended = False
            return self._save_now(now)
        steps: Steps = []
        if self._at_next and not self._sequencer.waiting and self._is_current:
            steps = self._cut()
        if self._making is not None:
            self._making.hurried = True
            self._commit_if_complete()
        return steps

    def tell_cut(self) -> None:
        """Let the controller know, once, that its checkpoint needs the workers no more."""
        making = self._making
        if self._asked and not self._told_cut and making is not None and not making.needs_workers:
            self._told_cut = True
            self._out.put(Tell(SaveCut(making.version)))

    # --- one checkpoint ---------------------------------------------------------------------------

    def _cut(self) -> Steps:
        """The step that cuts a checkpoint here; none if the one before is still being written."""
        version, decider, present = self._decider.version, self._decider, self._present
        if self._making is not None:
            self._out.put(WriteLog(f"checkpoint {version} skipped: the one before is not finished"))
            return []
        self._at_next = self.unsaved = False
        groups, members = decider.groups, decider.machine.members
        workers = {worker for worker in present.attached if groups.root_of(worker) in members}
        if present.mode.serverless:  # they send their parts by themselves
            workers = {worker for worker in workers if self._part_versions.get(worker) != version}
        directory = self._directory_of(version)
        self._making = _Making(version, directory, len(present.ordered.servers), workers)
        # The root of a group tells the others.
        self._flags = set() if present.mode.serverless else {w for w in workers if groups.speaks(w)}
        self._out.put(OpenCheckpoint(version, directory, decider.snapshot()))
        return [CheckpointStep(version, directory)]

    def flag(self, worker: int, notes: Notes) -> None:
        """With a reply that a worker gets anyway, ask it for its part of the checkpoint in the making."""
        if worker in self._flags and self._making is not None:
            self._flags.discard(worker)
            notes["save"] = self._making.version

    def awaits(self, worker: int) -> bool:
        """Whether the checkpoint in the making waits for a worker's part."""
        return self._making is not None and worker in self._making.workers

    def worker_saved(self, worker: int, version: int) -> None:
        """A worker's part is here.

        Args:
            version: of the part, in allreduce; else 0.
        """
        self._part_versions[worker] = version
        if self._making is None or worker not in self._making.workers:
            self.unsaved = True  # unasked: the worker's end
        else:
            self._making.workers.discard(worker)
            self._commit_if_complete()

    def worker_left(self, worker: int, now: float, *, finished: bool) -> Steps:
        """A worker is gone, in order (`finished`) or not, and the mode knows it.

        A worker that ends before it sent its part costs the checkpoint: the part that it sent for an earlier
        one (its steps, random numbers, schedulers) does not belong to these parameters. Of a checkpoint that
        the run ends with, what is there is committed.
        """
        self._flags.discard(worker)
        making = self._making
        if making is not None and not finished and not self._asked:
            if worker in making.workers and not making.hurried and not making.committing:
                return self._give_up(
                    f"worker:{worker} ended before it sent its part of checkpoint {making.version}; "
                    "the checkpoint before it is kept",
                    now,
                )
        elif making is not None:
            making.workers.discard(worker)
            self._commit_if_complete()
        elif self._at_next and not self._decider.machine.active:
            return self._save_now(now)  # no round will end any more
        return self._save_now(now) if self._all_ended and not self._present.attached else []

    def part_written(self, directory: str, now: float, failed: str | None = None) -> Steps:
        """A server has written its part, or could not (`failed`: why)."""
        making = self._making
        if making is None or directory != making.directory or making.committing:
            return []  # of one that was given up meanwhile
        if failed is not None:
            return self._give_up(failed, now)
        making.parts -= 1
        self._commit_if_complete()
        return []

    def server_gone(self, server: int, now: float) -> Steps:
        """A server that writes a part is gone: the checkpoint in the making is given up, and another cut."""
        if self._making is None or self._making.committing:
            return []
        self._again = True
        return self._give_up(f"server:{server} is gone", now)

    def _commit_if_complete(self) -> None:
        making = self._making
        if making is not None and not (making.parts or making.needs_workers or making.committing):
            making.committing = True
            self._out.put(CommitCheckpoint())

    def _give_up(self, reason: str, now: float) -> Steps:
        self._out.put(AbandonCheckpoint())
        return self.failed(reason, now)

    def saved(self, path: str, now: float) -> Steps:
        """The checkpoint is committed."""
        assert self._making is not None
        self.last_saved = self._making.version
        return self._ended(SaveEnded(path, self._making.version), now)

    def failed(self, reason: str, now: float) -> Steps:
        """The checkpoint could not be opened, written or committed; nothing is left of it."""
        self._out.put(WriteLog(f"checkpoint failed: {reason}", is_error=True))
        return self._ended(SaveEnded(None, reason=reason), now)

    def _ended(self, ended: SaveEnded, now: float) -> Steps:
        self._making = None
        self._flags.clear()
        again, self._again = self._again, False
        if again:
            return self._save_now(now)
        if self._all_ended and self._present.attached:
            self._report(ended, asked=False)  # the final one is still to come: see _save_now
        else:
            self._hurry_at = None
            self._report(ended)
        return []

    def _report(self, ended: SaveEnded, *, asked: bool = True) -> None:
        """What became of a checkpoint; `asked`: of the one that the controller waits for, if it does."""
        if asked:
            asked, self._asked = self._asked, False
        self._out.put(Tell(ended._replace(asked=asked)))
