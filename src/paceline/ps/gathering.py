"""Checkpoints: when one is cut, whose parts it needs, and what became of it. A part of the lead server."""

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.comm import Connection, Frame, Kind
from paceline.comm.frames import field
from paceline.core.steps import CheckpointStep, Steps
from paceline.exceptions import CheckpointError, LinkError
from paceline.ps.attachments import rank_of, saved_part
from paceline.ps.ordering import Ordering
from paceline.ps.saving import Saver
from paceline.storage.checkpoint import FileInfo

__all__ = ["Gathering"]

log = logging.getLogger("paceline.server")

_HURRY_S = 0.8
"""How long a checkpoint that was asked for waits for the end of a round and for the workers' parts."""
_LAST_PARTS_S = 5.0
"""How long the final one waits for workers that have ended, whose links should have, too."""


class Gathering(Ordering):
    """Gathers checkpoints."""

    def _begin_gathering(self) -> None:
        self._saver: Saver | None = None
        self._save_flags: set[int] = set()
        self._save_again = False
        self._save_at_next = False
        self._asked = False
        self._told_cut = False
        self._all_ended = False
        self._hurry_at: float | None = None
        self._last_saved = -1
        # allreduce: the version that our parameters are of, the next one that needs them, and the versions
        # of the parts that workers sent.
        self._current = 0
        self._announced = -1
        self._cuts: dict[int, int] = {}
        self._unsaved = False  # something is newer than a checkpoint of this version would have it
        self._states: dict[str, dict[str, Tensor]] = {}
        self._of_this_one: dict[str, dict[str, Tensor]] = {}
        """Workers' parts of the checkpoint in the making: later ones may come before it is complete."""

    def _on_saved(self, connection: Connection, frame: Frame) -> None:
        rank = rank_of(connection)
        name, tensors = saved_part(connection, frame)
        self._attachments.hear_buffers(tensors, rank)
        if "buffers" in frame.body:
            return
        self._states[name] = tensors
        self._cuts[rank] = field(frame.body, "cut", int, 0)
        if self._saver is None or rank not in self._saver.waits_for:
            self._unsaved = True  # unasked: the worker's end
        else:
            self._of_this_one[name] = tensors
            self._saver.worker_saved(rank)

    def _save_is_due(self) -> bool:
        if self._executor.mode.serverless:
            return self._decider.version == self._announced
        return self._save_at_next or self._is_periodic(self._decider.version)

    def _is_periodic(self, version: int) -> bool:
        return self.config.checkpoint_every > 0 and version % self.config.checkpoint_every == 0

    def _announce_cut(self, worker: int, body: dict[str, Any]) -> None:
        """allreduce: tell the root that the version which it makes next is to be kept. It then sends its
        parameters along, and tells its group, so that all parts are of one moment."""
        due = self._save_at_next or self._is_periodic(self._decider.version + 1)
        if (
            self._executor.mode.serverless
            and self._decider.groups.speaks(worker)
            and self._saver is None
            and due
        ):
            self._announced = self._decider.version + 1
            body["cut"] = True

    def _save_now(self) -> None:
        """The controller wants a checkpoint, soon."""
        patience = _LAST_PARTS_S if self._all_ended else _HURRY_S
        self._hurry_at = self._hurry_at or time.monotonic() + patience
        if self._executor.shard is None:
            self._report({"checkpoint": None, "reason": "there is no model yet"})
        elif self._all_ended and self._executor.peers:
            pass  # their last parts are on the way; the last one to leave brings us back
        elif self._saver is not None:
            self._save_again = self._unsaved or self._saver.version < self._decider.version
        elif self._last_saved == self._decider.version and not self._unsaved:
            self._report({"checkpoint": "kept", "version": self._last_saved})
        elif (
            (self._executor.mode.by_round and self._decider.machine.active)
            or self._sequencer.waiting
            or not self._is_current()
        ):
            # Between two rounds every worker is between two batches, and a resume is bitwise.
            self._save_at_next = True
        else:
            self._order(self._begin_save())

    @property
    def _in_a_round(self) -> bool:
        return self._executor.mode.by_round and bool(self._decider.machine.active)

    def _is_current(self) -> bool:
        """Whether our parameters are those of the present version. In allreduce they often are not."""
        return not self._executor.mode.serverless or self._current == self._decider.version

    def _tell_cut(self) -> None:
        """Once a checkpoint that was asked for needs the workers no more, let the controller know."""
        if self._asked and not self._told_cut and self._saver is not None and not self._saver.needs_workers:
            self._told_cut = True
            with contextlib.suppress(LinkError):
                self._controller.send(Kind.STATS, {"cut": self._saver.version})

    def _hurry(self) -> None:
        """A checkpoint was asked for and somebody takes his time: cut it here, commit what there is."""
        self._hurry_at = None
        if self._all_ended and self._executor.peers:
            self._all_ended = False
            self._save_now()
            return
        if self._save_at_next and not self._sequencer.waiting and self._is_current():
            self._order(self._begin_save())
        if self._saver is not None:
            self._saver.stop_waiting()

    def _begin_save(self) -> Steps:
        """The step that cuts a checkpoint here; none if the one before is still being written."""
        if self._saver is not None:
            log.warning("checkpoint %s skipped: the one before is not finished", self._decider.version)
            return []
        self._save_at_next = self._unsaved = False
        self._of_this_one = dict(self._states)
        self._write_pushes()  # who goes back to this checkpoint finds the record of all that is in it
        workers = {
            w
            for w in self._executor.peers
            if self._decider.groups.root_of(w) in self._decider.machine.members
        }
        if self._executor.mode.serverless:  # they send their parts by themselves
            workers = {w for w in workers if self._cuts.get(w) != self._decider.version}
        try:
            self._saver = Saver(
                Path(self.config.run_dir) / "checkpoints",
                self._decider.version,
                parts=len(self._executor.placement.servers),
                workers=workers,
                keep=self.config.keep_checkpoints,
                post=lambda result: self._hub.post(lambda: self._saved(result)),
            )
        except CheckpointError as error:
            self._saved(error)
            return []
        # The root of a group tells the others.
        asked = (
            set()
            if self._executor.mode.serverless
            else {w for w in workers if self._decider.groups.speaks(w)}
        )
        self._save_flags = asked
        self._saver.attach_states(self._small_parts)
        model = self._adoption.model
        assert model is not None
        self._saver.describe(
            {
                **model.facts(),
                "lead": self._decider.snapshot(),
                "servers": self.config.servers,
                "workers": self.config.workers,
            }
        )
        return [CheckpointStep(self._decider.version, str(self._saver.directory))]

    def _small_parts(self) -> dict[str, dict[str, Tensor]]:
        extras = self._adoption.extras
        return {**self._of_this_one, **({"extras.safetensors": extras} if extras else {})}

    def _part_written(self, body: dict[str, Any]) -> None:
        if self._saver is None or body["directory"] != str(self._saver.directory):
            return  # of one that failed meanwhile
        if "failed" in body:
            self._saver.part_written(CheckpointError(body["failed"]))
        else:
            self._saver.part_written(FileInfo(name=body["name"], sha256=body["sha256"], bytes=body["bytes"]))

    def _saved(self, result: Path | CheckpointError) -> None:
        """A checkpoint is complete, or failed."""
        body: dict[str, Any]
        if isinstance(result, CheckpointError):
            log.error("checkpoint failed: %s", result)
            body = {"checkpoint": None, "reason": str(result)}
        else:
            assert self._saver is not None
            self._last_saved = self._saver.version
            log.info("checkpoint %s", result.name)
            body = {"checkpoint": str(result), "version": self._saver.version}
        self._saver = None
        self._save_flags.clear()
        again, self._save_again = self._save_again, False
        if again:
            self._save_now()
        elif self._all_ended and self._executor.peers:
            self._report(body, asked=False)  # the final one is still to come: see _save_now
        else:
            self._hurry_at = None
            self._report(body)

    def _report(self, body: dict[str, Any], *, asked: bool = True) -> None:
        """What became of a checkpoint; `asked`: of the one that the controller waits for, if it does."""
        if asked:
            asked, self._asked = self._asked, False
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, self._stats())
            self._controller.send(Kind.STATS, {**body, "asked": asked})
