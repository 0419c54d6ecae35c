"""CheckpointFiles: the files of the checkpoint in the making. What is cut when is decided in the core.

Server parts are written by every server while training goes on. The leader keeps the workers' parts, which
are small, and writes them when it commits.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from paceline.core.json_types import JsonObject
from paceline.exceptions import CheckpointError
from paceline.storage.checkpoint import CheckpointWriter, FileInfo, clean_temporary, new_directory, prune

__all__ = ["CheckpointFiles", "directories_in"]

Parts = dict[str, dict[str, Tensor]]
"""Tensors by file."""


def directories_in(run_dir: str) -> Callable[[int], str]:
    """Names the directory in which a checkpoint of a version is written, until it is committed."""
    root = Path(run_dir) / "checkpoints"
    return lambda version: str(new_directory(root, version))


class CheckpointFiles:
    """One owner: the leader. The main thread only.

    Args:
        root: directory of the run's checkpoints.
        keep: number of checkpoints that are kept.
        post: called from another thread with the path of a committed checkpoint, or the error.
    """

    def __init__(self, root: Path, keep: int, post: Callable[[Path | CheckpointError], None]) -> None:
        self.states: Parts = {}
        """The newest parts of the workers."""
        self._root = root
        self._keep = keep
        self._post = post
        self._writer: CheckpointWriter | None = None
        self._meta: JsonObject = {}
        self._of_this_one: Parts = {}
        """Workers' parts of the checkpoint in the making: later ones may come before it is complete."""
        self._thread: threading.Thread | None = None

    def open(self, version: int, directory: Path, meta: JsonObject) -> None:
        """Make the directory of a checkpoint.

        Args:
            meta: goes into its manifest.

        Raises:
            CheckpointError: it cannot be made.
        """
        self._of_this_one = dict(self.states)
        self._meta = meta
        self._writer = CheckpointWriter(self._root, version, directory)

    def keep_part(self, name: str, tensors: dict[str, Tensor], *, of_this_one: bool) -> None:
        """A worker's part is here.

        Args:
            of_this_one: whether the checkpoint in the making waits for it.
        """
        self.states[name] = tensors
        if of_this_one:
            self._of_this_one[name] = tensors

    def add(self, directory: str, info: FileInfo) -> None:
        """A server wrote its part into a directory. A part of a checkpoint that was given up is ignored."""
        if self._writer is not None and directory == str(self._writer.dir) and self._thread is None:
            self._writer.add(info)

    def commit(self, extras: dict[str, Tensor]) -> None:
        """Commit the checkpoint, in a thread.

        Args:
            extras: frozen parameters and initial buffers.
        """
        assert self._writer is not None
        parts = {**self._of_this_one, **({"extras.safetensors": extras} if extras else {})}
        arguments = (self._writer, self._meta, parts)
        self._thread = threading.Thread(target=self._commit, args=arguments, name="checkpoint")
        self._thread.start()

    def _commit(self, writer: CheckpointWriter, meta: JsonObject, parts: Parts) -> None:
        try:
            for name, tensors in parts.items():
                writer.write_part(name, tensors)
            path = writer.commit(meta)
            prune(self._root, self._keep)
            with contextlib.suppress(CheckpointError):
                clean_temporary(self._root)  # of a leader that died while it saved
        except CheckpointError as error:
            writer.abort()
            self._post(error)
        else:
            self._post(path)

    def close(self) -> None:
        """Be done with the checkpoint in the making: wait for a commit in progress, else remove its files."""
        if self._thread is not None:
            self._thread.join()
        elif self._writer is not None:
            self._writer.abort()
        self._thread = self._writer = None
