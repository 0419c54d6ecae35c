"""When a checkpoint needs nobody any more, and when the controller is told that the final one is there."""

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from paceline.comm.messages import SaveEnded
from paceline.core.sequencer import Sequencer
from paceline.core.steps import CheckpointStep, Step, Steps
from paceline.exceptions import CheckpointError
from paceline.ps.checkpoints import CheckpointCoordinator
from paceline.ps.saving import Saver
from paceline.storage.checkpoint import latest, write_part


class Run:
    """At version 2, with one worker, and a checkpoint of that version in the making."""

    def __init__(self, directory: Path) -> None:
        mode = SimpleNamespace(serverless=False, by_round=True)
        groups = SimpleNamespace(root_of=lambda worker: worker, speaks=lambda worker: True)
        decider: Any = SimpleNamespace(
            version=2, machine=SimpleNamespace(active=set(), members={0, 1}), groups=groups
        )
        self.executor: Any = SimpleNamespace(
            peers={0: "worker:0", 1: "worker:1"},
            shard="parameters",
            mode=mode,
            placement=SimpleNamespace(servers={0}),
        )
        config: Any = SimpleNamespace(run_dir=str(directory), keep_checkpoints=3, checkpoint_every=2)
        self.answers: list[Any] = []
        self.results: queue.SimpleQueue[Path | CheckpointError] = queue.SimpleQueue()
        self.checkpoints = CheckpointCoordinator(
            config,
            self.executor,
            decider,
            Sequencer(),
            describe=dict,
            extras=dict,
            tell=lambda body: None,
            report=self.report,
            post_saved=self.results.put,
        )
        (self.first,) = self.checkpoints.cut_if_due()

    def report(self, ended: SaveEnded) -> None:
        if ended.asked:
            self.answers.append(Path(str(ended.checkpoint)).name)

    def commit(self, step: Step) -> Steps:
        """The server writes its part of a checkpoint, and the workers' parts are there, or not needed."""
        assert isinstance(step, CheckpointStep)
        info = write_part(Path(step.directory), "server-0.safetensors", {"a": torch.zeros(2)})
        body = {"name": info.name, "sha256": info.sha256, "bytes": info.bytes}
        self.checkpoints.part_written({**body, "directory": step.directory})
        for worker in (0, 1):
            self.checkpoints.worker_left(worker, finished=True)
        steps = self.checkpoints.saved(self.results.get(timeout=30))
        return steps

    def part(self, worker: int, step: int) -> None:
        tensors = {"step": torch.tensor(step)}
        self.checkpoints.worker_saved(worker, f"worker-{worker}.safetensors", tensors, 0)


def test_a_periodic_checkpoint_is_not_the_final_one_while_a_worker_can_still_be_heard(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoints.unsaved = True  # parameters were assigned after its cut
    assert run.checkpoints.want_now(all_ended=True) == []
    assert run.commit(run.first) == [] and run.answers == []
    run.executor.peers.clear()  # their links have ended
    (final,) = run.checkpoints.worker_left(0, finished=True)
    assert final == CheckpointStep(2, final.directory)
    assert run.commit(final) == []
    assert run.answers == ["version-000000000002"]


def test_a_worker_that_cannot_be_heard_to_the_end_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoints.unsaved = True
    assert run.checkpoints.want_now(all_ended=True) == []
    assert run.commit(run.first) == []
    assert run.checkpoints.hurry_if_late(0.0) == []
    (final,) = run.checkpoints.hurry_if_late(float("inf"))
    assert run.commit(final) == []
    assert run.answers == ["version-000000000002"]


def test_a_periodic_checkpoint_with_all_that_there_is_is_the_final_one_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.executor.peers.clear()
    assert run.checkpoints.want_now(all_ended=True) == []
    assert run.commit(run.first) == []
    assert run.answers == ["version-000000000002"]


def test_a_part_that_comes_later_than_a_checkpoints_own_is_for_the_next_one(tmp_path: Path) -> None:
    """A worker sends its part when it is asked for it, and once more when it ends."""
    run = Run(tmp_path)
    for worker, step in ((0, 2), (0, 3), (1, 2)):
        run.part(worker, step)
    assert run.checkpoints.unsaved
    assert [int(part["step"]) for part in run.checkpoints.states.values()] == [3, 2]
    assert run.commit(run.first) == []
    saved = latest(tmp_path / "checkpoints")
    assert saved is not None
    parts = [saved.tensors(f"worker-{worker}.safetensors") for worker in (0, 1)]
    assert [int(part["step"]) for part in parts] == [2, 2]


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


def test_a_checkpoint_never_mixes_new_parameters_with_an_old_part_of_a_lost_worker(tmp_path: Path) -> None:
    results: list[Path | CheckpointError] = []
    saver = Saver(tmp_path, 3, parts=1, workers={0, 1}, keep=2, post=results.append)
    saver.attach_states(lambda: {"worker-1.safetensors": {"steps": torch.tensor(1)}})  # of version 1
    saver.worker_saved(0)
    saver.worker_lost(1)
    saver.part_written(write_part(tmp_path, "server-0.safetensors", {"a": torch.zeros(2)}))
    saver.join()
    assert [str(result) for result in results] == [
        "worker:1 ended before it sent its part of checkpoint 3; the checkpoint before it is kept"
    ]
    assert not [*tmp_path.glob("version-*")]


def test_a_worker_that_is_lost_after_it_sent_its_part_costs_no_checkpoint(tmp_path: Path) -> None:
    results: list[Path | CheckpointError] = []
    saver = Saver(tmp_path, 3, parts=1, workers={0}, keep=2, post=results.append)
    saver.attach_states(dict)
    saver.worker_saved(0)
    saver.worker_lost(0)
    saver.part_written(write_part(saver.directory, "server-0.safetensors", {"a": torch.zeros(2)}))
    saver.join()
    assert isinstance(results[0], Path)
