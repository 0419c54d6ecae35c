"""When a checkpoint needs nobody any more, and when the controller is told that the final one is there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save

from paceline.comm import Kind
from paceline.core.sequencer import Sequencer
from paceline.core.steps import Steps
from paceline.exceptions import CheckpointError
from paceline.ps.gathering import Gathering
from paceline.ps.saving import Saver
from paceline.storage.checkpoint import latest, write_part


class Lead(Gathering):
    """At version 2, with one worker, and a checkpoint of that version in the making."""

    def __init__(self) -> None:
        self._begin_gathering()
        self._decider: Any = SimpleNamespace(version=2, machine=SimpleNamespace(active=set()))
        self._sequencer = Sequencer()
        mode = SimpleNamespace(serverless=False, by_round=True)
        self._executor: Any = SimpleNamespace(peers={0: "worker:0"}, shard="parameters", mode=mode)
        self._controller: Any = self
        self._saver: Any = SimpleNamespace(version=2)
        self._attachments: Any = SimpleNamespace(hear_buffers=lambda tensors, worker: None)
        self.ordered: Steps = []
        self.answers: list[Any] = []

    def send(self, kind: Kind, body: dict[str, Any]) -> None:
        if body.get("asked"):
            self.answers.append(body["checkpoint"])

    def _stats(self) -> dict[str, Any]:
        return {}

    def _begin_save(self) -> Steps:
        self._unsaved = False
        self._saver = SimpleNamespace(version=2)
        return [["checkpoint", 2, "again"]]

    def _order(self, steps: Steps) -> None:
        self.ordered += steps

    def ask(self) -> None:
        """The controller wants the final checkpoint: all workers' processes have ended."""
        self._asked = self._all_ended = True
        self._save_now()


def test_a_periodic_checkpoint_is_not_the_final_one_while_a_worker_can_still_be_heard() -> None:
    lead = Lead()
    lead._unsaved = True  # parameters were assigned after its cut
    lead.ask()
    lead._saved(Path("periodic"))
    assert lead.answers == [] and lead.ordered == []
    lead._executor.peers.clear()  # its link has ended
    lead._save_now()
    assert lead.ordered == [["checkpoint", 2, "again"]]
    lead._saved(Path("final"))
    assert lead.answers == ["final"]


def test_a_worker_that_cannot_be_heard_to_the_end_is_not_waited_for_for_ever() -> None:
    lead = Lead()
    lead._unsaved = True
    lead.ask()
    lead._saved(Path("periodic"))
    assert lead._hurry_at is not None
    lead._hurry()
    assert lead.ordered == [["checkpoint", 2, "again"]]
    lead._saved(Path("final"))
    assert lead.answers == ["final"]


def test_a_periodic_checkpoint_with_all_that_there_is_is_the_final_one_too() -> None:
    lead = Lead()
    lead._executor.peers.clear()
    lead.ask()
    lead._saved(Path("periodic"))
    assert lead.answers == ["periodic"] and lead.ordered == []


def test_a_part_that_comes_later_than_a_checkpoints_own_is_for_the_next_one() -> None:
    """A worker sends its part when it is asked for it, and once more when it ends."""
    lead = Lead()
    waits_for = {0, 1}
    lead._saver = SimpleNamespace(version=2, waits_for=waits_for, worker_saved=waits_for.discard)
    lead._adoption = SimpleNamespace(extras={})
    for rank, step in ((0, 2), (0, 3), (1, 2)):
        part = save({"step": torch.tensor(step)})
        worker: Any = SimpleNamespace(peer=f"worker:{rank}", read_blob=lambda frame, limit, part=part: part)
        frame: Any = SimpleNamespace(body={})
        lead._on_saved(worker, frame)
    assert not waits_for and lead._unsaved
    assert [int(part["step"]) for part in lead._small_parts().values()] == [2, 2]
    assert [int(part["step"]) for part in lead._states.values()] == [3, 2]


def test_a_server_that_dies_while_its_checkpoint_is_committed_is_not_needed_for_it(tmp_path: Path) -> None:
    results: list[Path | CheckpointError] = []
    saver = Saver(tmp_path, 3, parts=1, workers={0}, keep=2, post=results.append)
    saver.attach_states(dict)
    part = write_part(saver.directory, "server-0.safetensors", {"a": torch.zeros(2)})
    saver.part_written(part)
    assert not saver.complete
    saver.worker_saved(0)
    assert saver.complete
    saver.part_written(CheckpointError("server:1 is gone"))
    saver.join()
    assert len(results) == 1 and isinstance(results[0], Path)
    assert latest(tmp_path).version == 3


def test_a_server_that_dies_before_its_part_is_there_ends_the_checkpoint_once(tmp_path: Path) -> None:
    results: list[Path | CheckpointError] = []
    saver = Saver(tmp_path, 3, parts=2, workers=set(), keep=2, post=results.append)
    for _ in range(2):
        saver.part_written(CheckpointError("server:1 is gone"))
    assert [str(result) for result in results] == ["server:1 is gone"]
