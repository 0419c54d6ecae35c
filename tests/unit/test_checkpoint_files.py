"""The files of the checkpoint in the making."""

import queue
from pathlib import Path

import pytest
import torch

from paceline.exceptions import CheckpointError
from paceline.ps.checkpoints import CheckpointFiles
from paceline.storage.checkpoint import latest, new_directory, write_part


def opened(root: Path) -> tuple[CheckpointFiles, "queue.SimpleQueue[Path | CheckpointError]", Path]:
    results: queue.SimpleQueue[Path | CheckpointError] = queue.SimpleQueue()
    files = CheckpointFiles(root, 2, results.put)
    directory = new_directory(root, 3)
    files.keep_part("worker-1.safetensors", {"step": torch.tensor(1)}, of_this_one=False)
    files.open(3, directory, {"what": "a test"})
    return files, results, directory


def test_it_is_committed_with_the_parts_that_belong_to_it(tmp_path: Path) -> None:
    """A worker sends its part when it is asked for it, and once more when it ends."""
    files, results, directory = opened(tmp_path)
    files.add(str(directory), write_part(directory, "server-0.safetensors", {"a": torch.zeros(2)}))
    for step, of_this_one in ((2, True), (3, False)):
        files.keep_part("worker-0.safetensors", {"step": torch.tensor(step)}, of_this_one=of_this_one)
    files.commit({"buffer": torch.ones(1)})
    path = results.get(timeout=30)
    files.close()
    assert isinstance(path, Path)
    saved = latest(tmp_path)
    assert saved is not None and saved.path == path and saved.version == 3
    assert {*saved.files} == {
        f"{part}.safetensors" for part in ("server-0", "worker-0", "worker-1", "extras")
    }
    assert int(saved.tensors("worker-0.safetensors")["step"]) == 2
    assert int(files.states["worker-0.safetensors"]["step"]) == 3, "for the next one"


def test_one_that_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    files, _, directory = opened(tmp_path)
    part = write_part(directory, "server-0.safetensors", {"a": torch.zeros(2)})
    files.close()
    files.add(str(directory), part)  # it was late
    assert [*tmp_path.iterdir()] == []


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("a file")
    files = CheckpointFiles(root, 2, lambda result: None)
    with pytest.raises(CheckpointError):
        files.open(3, new_directory(root, 3), {})
    files.close()


def test_a_part_that_is_missing_fails_the_commit(tmp_path: Path) -> None:
    files, results, directory = opened(tmp_path)
    (directory / "server-0.safetensors").write_bytes(b"nobody told of this")
    files.commit({})
    assert isinstance(results.get(timeout=30), CheckpointError)
    files.close()
    assert [*tmp_path.iterdir()] == []
