"""Where a server's parts of checkpoints are: in the run directory, or in the store of the controller's
host.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from paceline.comm import Address
from paceline.comm.store_link import RemoteStore
from paceline.exceptions import CheckpointError
from paceline.ps.config import ServerConfig
from paceline.storage.checkpoint import Checkpoint, load, part_chunks, write_part
from paceline.storage.manifest import MANIFEST, FileInfo, check_file_name, explained
from paceline.storage.store import LocalStore, Store

__all__ = ["CheckpointParts", "LocalParts", "StoredParts", "checkpoint_parts"]


class CheckpointParts(Protocol):
    """Writes parts of checkpoints, and reads checkpoints back."""

    def write(
        self,
        directory: Path,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        before_write: Callable[[int], None],
    ) -> FileInfo:
        """Write a part; see `storage.checkpoint.write_part`.

        Args:
            directory: as the leader's host names it.
        """

    def load(self, path: str) -> Checkpoint:
        """A checkpoint that the run goes on from, verified. Raises CheckpointError.

        Args:
            path: as the leader's host names it.
        """


class LocalParts:
    """On a disk that this server shares with the leader."""

    def write(
        self,
        directory: Path,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        before_write: Callable[[int], None],
    ) -> FileInfo:
        """See CheckpointParts."""
        return write_part(directory, name, tensors, before_write=before_write)

    def load(self, path: str) -> Checkpoint:
        """See CheckpointParts."""
        return load(Path(path))


class StoredParts:
    """In a store of another host. What is loaded is copied here first, so that it can be mapped.

    Args:
        here: a directory of this server alone.
    """

    def __init__(self, store: Store, here: Path) -> None:
        self._store = store
        self._here = here

    def write(
        self,
        directory: Path,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        before_write: Callable[[int], None],
    ) -> FileInfo:
        """See CheckpointParts."""
        check_file_name(name, ".safetensors")
        chunks = part_chunks(directory / name, tensors, before_write)
        with explained("write", directory / name):
            return self._store.put(_key(directory.name, name), chunks)

    def load(self, path: str) -> Checkpoint:
        """See CheckpointParts."""
        directory = Path(path).name
        keys = self._store.list(f"checkpoints/{directory}")
        if _key(directory, MANIFEST) not in keys:
            raise CheckpointError(f"the store has no checkpoint {directory}: it was removed meanwhile")
        shutil.rmtree(self._here, ignore_errors=True)  # an earlier one, or what a killed process has copied
        mine = LocalStore(self._here)
        for key in keys:
            mine.put(key, self._store.get(key))
        return load(self._here / "checkpoints" / directory)


def checkpoint_parts(config: ServerConfig, secret: bytes) -> CheckpointParts:
    """Those of a server."""
    if config.store is None:
        return LocalParts()
    role = ("server", config.rank)
    store = RemoteStore(Address.from_json(config.store), secret, role, patience_s=config.deadline_s)
    return StoredParts(store, Path(config.run_dir) / f"fetched-{config.rank}")


def _key(directory: str, name: str) -> str:
    return f"checkpoints/{directory}/{name}"
