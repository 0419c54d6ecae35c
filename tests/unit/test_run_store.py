"""Checkpoints of servers that do not share a disk with the leader."""

from pathlib import Path

import pytest
import torch

from paceline.exceptions import CheckpointError, StoreError
from paceline.ps.run_store import LocalParts, StoredParts
from paceline.storage.checkpoint import CheckpointWriter, load, new_directory
from paceline.storage.store import LocalStore


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The run directory of the leader's host."""
    (tmp_path / "there" / "checkpoints").mkdir(parents=True)
    return tmp_path / "there"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(1000, generator=torch.Generator().manual_seed(seed)), "n": torch.arange(7)}


def committed(there: Path, parts: StoredParts, version: int = 5) -> Path:
    """A checkpoint of two servers, of which one is on another host."""
    root = there / "checkpoints"
    directory = new_directory(root, version)
    writer = CheckpointWriter(root, version, directory)
    writer.write_part("server-0.safetensors", tensors(0))
    written: list[int] = []
    info = parts.write(directory, "server-1.safetensors", tensors(1), before_write=written.append)
    assert sum(written) == info.bytes
    writer.add(info)
    return writer.commit({"lead": {}})


def test_a_part_from_another_host_is_a_part_as_any_other(there: Path, tmp_path: Path) -> None:
    parts = StoredParts(LocalStore(there), tmp_path / "here")
    path = committed(there, parts)
    found = load(path)  # its hashes are right
    assert torch.equal(found.tensors("server-1.safetensors")["w"], tensors(1)["w"])
    local = LocalParts().write(tmp_path, "server-1.safetensors", tensors(1), before_write=lambda _: None)
    assert local == found.files["server-1.safetensors"]


def test_a_checkpoint_is_copied_and_verified_before_it_is_used(there: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    parts = StoredParts(LocalStore(there), here)
    path = committed(there, parts)
    found = parts.load(str(path))
    assert found.path.is_relative_to(here) and found.version == 5
    assert torch.equal(found.tensors("server-0.safetensors")["w"], tensors(0)["w"])
    part = path / "server-0.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="was altered"):
        parts.load(str(path))


def test_what_a_killed_process_has_copied_is_copied_again(there: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    parts = StoredParts(LocalStore(there), here)
    first = committed(there, parts)
    half = here / "checkpoints" / first.name
    half.mkdir(parents=True)
    (half / "server-0.safetensors.unfinished").write_bytes(b"half")
    assert parts.load(str(first)).version == 5
    second = committed(there, parts, version=6)
    assert parts.load(str(second)).version == 6
    assert [each.name for each in (here / "checkpoints").iterdir()] == [second.name]  # no room for old ones


def test_a_checkpoint_that_is_gone_is_named(there: Path, tmp_path: Path) -> None:
    parts = StoredParts(LocalStore(there), tmp_path / "here")
    with pytest.raises(CheckpointError, match="the store has no checkpoint version-000000000009"):
        parts.load("/elsewhere/checkpoints/version-000000000009")
    with pytest.raises((CheckpointError, StoreError)):
        parts.write(there / "checkpoints" / ".v", "../x.safetensors", tensors(0), before_write=lambda _: None)
