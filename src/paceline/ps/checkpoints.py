"""Checkpoints: when one is cut, whose parts it needs, and what became of it. A part of the leader."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.comm.messages import SaveCut, SaveEnded
from paceline.core.decider import Decider
from paceline.core.sequencer import Sequencer
from paceline.core.steps import CheckpointStep, Steps
from paceline.exceptions import CheckpointError
from paceline.ps.config import ServerConfig
from paceline.ps.executor import Executor
from paceline.ps.saving import Saver
from paceline.storage.checkpoint import FileInfo

__all__ = ["CheckpointCoordinator"]

log = logging.getLogger("paceline.server")

_HURRY_S = 0.8
"""How long a checkpoint that was asked for waits for the end of a round and for the workers' parts."""
_LAST_PARTS_S = 5.0
"""How long the final one waits for workers that have ended, whose links should have, too."""


class CheckpointCoordinator:
    """Gathers checkpoints, one at a time. Methods that return steps want them ordered. The main thread only.

    Args:
        describe: what a checkpoint's manifest says; called when it is cut.
        extras: frozen parameters and initial buffers, which are kept beside the workers' parts.
        tell: tells the controller something.
        report: tells the controller what became of a checkpoint.
        post_saved: called from another thread with the path of a committed checkpoint, or the error.
    """

    def __init__(
        self,
        config: ServerConfig,
        executor: Executor,
        decider: Decider,
        sequencer: Sequencer,
        *,
        describe: Callable[[], dict[str, Any]],
        extras: Callable[[], dict[str, Tensor]],
        tell: Callable[[SaveCut], None],
        report: Callable[[SaveEnded], None],
        post_saved: Callable[[Path | CheckpointError], None],
    ) -> None:
        self.current = 0
        """allreduce: the version that our parameters are of."""
        self.last_saved = -1
        self.unsaved = False
        """Whether something is newer than a checkpoint of this version would have it."""
        self.states: dict[str, dict[str, Tensor]] = {}
        """The newest parts of the workers, by file."""
        self._config, self._executor, self._decider = config, executor, decider
        self._sequencer = sequencer
        self._describe, self._extras, self._tell = describe, extras, tell
        self._report_it, self._post_saved = report, post_saved
        self._saver: Saver | None = None
        self._flags: set[int] = set()
        """Workers that are to be asked for their parts."""
        self._again = False
        self._at_next = False
        self._asked = False
        self._told_cut = False
        self._all_ended = False
        self._hurry_at: float | None = None
        self._announced = -1
        """allreduce: the next version that needs our parameters."""
        self._cuts: dict[int, int] = {}
        """allreduce: the versions of the parts that workers sent."""
        self._of_this_one: dict[str, dict[str, Tensor]] = {}
        """Workers' parts of the checkpoint in the making: later ones may come before it is complete."""

    # --- when -------------------------------------------------------------------------------------

    def cut_if_due(self) -> Steps:
        """The step that cuts a checkpoint behind the update that is being ordered, if it is time for one."""
        version = self._decider.version
        if self._executor.mode.serverless:
            due = version == self._announced
        else:
            due = self._at_next or self._is_periodic(version)
        return self._cut() if due else []

    def _is_periodic(self, version: int) -> bool:
        return self._config.checkpoint_every > 0 and version % self._config.checkpoint_every == 0

    def announce_cut(self, worker: int, body: dict[str, Any]) -> None:
        """allreduce: tell the root that the version which it makes next is to be kept. It then sends its
        parameters along, and tells its group, so that all parts are of one moment."""
        if not self._executor.mode.serverless or self._saver is not None:
            return
        version = self._decider.version + 1
        if self._decider.groups.speaks(worker) and (self._at_next or self._is_periodic(version)):
            self._announced = version
            body["cut"] = True

    def want_soon(self) -> None:
        """The controller wants a checkpoint at the next update."""
        self._at_next = self._at_next or (self._executor.shard is not None and self._saver is None)

    def want_now(self, *, all_ended: bool) -> Steps:
        """The controller wants a checkpoint, and waits for it.

        Args:
            all_ended: the processes of all workers have ended: it is the final one.
        """
        self._asked, self._told_cut = True, False
        self._all_ended = all_ended
        return self._save_now()

    def _save_now(self) -> Steps:
        patience = _LAST_PARTS_S if self._all_ended else _HURRY_S
        self._hurry_at = self._hurry_at or time.monotonic() + patience
        if self._executor.shard is None:
            self._report(SaveEnded(None, reason="there is no model yet"))
        elif self._all_ended and self._executor.peers:
            pass  # their last parts are on the way; the last one to leave brings us back
        elif self._saver is not None:
            self._again = self.unsaved or self._saver.version < self._decider.version
        elif self.last_saved == self._decider.version and not self.unsaved:
            self._report(SaveEnded("kept", self.last_saved))
        elif self._in_a_round or self._sequencer.waiting or not self._is_current():
            # Between two rounds every worker is between two batches, and a resume is bitwise.
            self._at_next = True
        else:
            return self._cut()
        return []

    @property
    def _in_a_round(self) -> bool:
        return self._executor.mode.by_round and bool(self._decider.machine.active)

    def _is_current(self) -> bool:
        """Whether our parameters are those of the present version. In allreduce they often are not."""
        return not self._executor.mode.serverless or self.current == self._decider.version

    def hurry_if_late(self, now: float) -> Steps:
        """If a checkpoint that was asked for waits for a worker too long, cut it here, and commit it."""
        return self.hurry() if self._hurry_at is not None and now > self._hurry_at else []

    def tell_cut(self) -> None:
        """Once a checkpoint that was asked for needs the workers no more, let the controller know."""
        if self._asked and not self._told_cut and self._saver is not None and not self._saver.needs_workers:
            self._told_cut = True
            self._tell(SaveCut(self._saver.version))

    def hurry(self) -> Steps:
        """Wait for nobody any more."""
        self._hurry_at = None
        if self._all_ended and self._executor.peers:
            self._all_ended = False
            return self._save_now()
        steps: Steps = []
        if self._at_next and not self._sequencer.waiting and self._is_current():
            steps = self._cut()
        if self._saver is not None:
            self._saver.stop_waiting()
        return steps

    # --- one checkpoint ---------------------------------------------------------------------------

    def _cut(self) -> Steps:
        """The step that cuts a checkpoint here; none if the one before is still being written."""
        version = self._decider.version
        if self._saver is not None:
            log.warning("checkpoint %s skipped: the one before is not finished", version)
            return []
        self._at_next = self.unsaved = False
        self._of_this_one = dict(self.states)
        meta = self._describe()
        groups, members = self._decider.groups, self._decider.machine.members
        workers = {w for w in self._executor.peers if groups.root_of(w) in members}
        serverless = self._executor.mode.serverless
        if serverless:  # they send their parts by themselves
            workers = {w for w in workers if self._cuts.get(w) != version}
        try:
            self._saver = Saver(
                Path(self._config.run_dir) / "checkpoints",
                version,
                parts=len(self._executor.placement.servers),
                workers=workers,
                keep=self._config.keep_checkpoints,
                post=self._post_saved,
            )
        except CheckpointError as error:
            return self.saved(error)
        # The root of a group tells the others.
        self._flags = set() if serverless else {w for w in workers if groups.speaks(w)}
        self._saver.attach_states(self._small_parts)
        self._saver.describe(meta)
        return [CheckpointStep(version, str(self._saver.directory))]

    def _small_parts(self) -> dict[str, dict[str, Tensor]]:
        extras = self._extras()
        return {**self._of_this_one, **({"extras.safetensors": extras} if extras else {})}

    def flag(self, worker: int) -> int | None:
        """The version of the checkpoint that a worker is to be asked for its part of; None: of none."""
        if worker not in self._flags or self._saver is None:
            return None
        self._flags.discard(worker)
        return self._saver.version

    def worker_saved(self, rank: int, name: str, tensors: dict[str, Tensor], cut: int) -> None:
        """A worker's part is here."""
        self.states[name] = tensors
        self._cuts[rank] = cut
        if self._saver is None or rank not in self._saver.waits_for:
            self.unsaved = True  # unasked: the worker's end
        else:
            self._of_this_one[name] = tensors
            self._saver.worker_saved(rank)

    def worker_left(self, worker: int, *, finished: bool) -> Steps:
        """A worker is gone, in order (`finished`) or not, and the mode knows it."""
        self._flags.discard(worker)
        if self._saver is not None and not finished and not self._asked:
            self._saver.worker_lost(worker)
        elif self._saver is not None:  # of a checkpoint that the run ends with, commit what there is
            self._saver.worker_saved(worker)
        elif self._at_next and not self._decider.machine.active:
            return self._save_now()  # no round will end any more
        return self._save_now() if self._all_ended and not self._executor.peers else []

    def part_written(self, body: dict[str, Any]) -> None:
        """A server has written its part, or failed to."""
        if self._saver is None or body["directory"] != str(self._saver.directory):
            return  # of one that failed meanwhile
        if "failed" in body:
            self._saver.part_written(CheckpointError(body["failed"]))
        else:
            self._saver.part_written(FileInfo(name=body["name"], sha256=body["sha256"], bytes=body["bytes"]))

    def server_gone(self, rank: int) -> None:
        """A server that writes a part is gone: the checkpoint in the making is given up, and another cut."""
        if self._saver is not None and not self._saver.complete:
            self._again = True
            self._saver.part_written(CheckpointError(f"server:{rank} is gone"))

    def saved(self, result: Path | CheckpointError) -> Steps:
        """A checkpoint is complete, or failed."""
        if isinstance(result, CheckpointError):
            log.error("checkpoint failed: %s", result)
            ended = SaveEnded(None, reason=str(result))
        else:
            assert self._saver is not None
            self.last_saved = self._saver.version
            log.info("checkpoint %s", result.name)
            ended = SaveEnded(str(result), self._saver.version)
        self._saver = None
        self._flags.clear()
        again, self._again = self._again, False
        if again:
            return self._save_now()
        if self._all_ended and self._executor.peers:
            self._report(ended, asked=False)  # the final one is still to come: see _save_now
        else:
            self._hurry_at = None
            self._report(ended)
        return []

    def close(self) -> None:
        """Wait for a commit in progress; a checkpoint that is not complete is given up."""
        if self._saver is not None:
            self._saver.join()

    def _report(self, ended: SaveEnded, *, asked: bool = True) -> None:
        """What became of a checkpoint; `asked`: of the one that the controller waits for, if it does."""
        if asked:
            asked, self._asked = self._asked, False
        self._report_it(ended._replace(asked=asked))
