"""Store: immutable blobs under keys, wherever they are. The local disk is the first implementation.

A key is a relative path, `checkpoints/version-000000000050/server-0.safetensors`. A blob is seen whole or not
at all, and is on the disk when `put` returns. Servers on other hosts than the controller's put their parts of
checkpoints into its store, and get those that they begin from (`comm/store_link.py`).
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from paceline.exceptions import StoreError
from paceline.storage.atomic import sync_directory, write_all
from paceline.storage.manifest import FileInfo
from paceline.storage.plain_files import open_plain, plain_size

__all__ = ["CHUNK_BYTES", "BlobWriter", "LocalStore", "Store", "check_key"]

CHUNK_BYTES = 1 << 20
_PART = re.compile(r"\.?[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
_MOST_PARTS = 8
_UNFINISHED = ".unfinished"


class Store(Protocol):
    """Keeps blobs. For one thread at a time."""

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> FileInfo:
        """Keep a new blob. Raises StoreError: it is there already, or cannot be kept."""

    def get(self, key: str, at: int = 0, size: int | None = None) -> Iterator[bytes]:
        """Bytes of a blob, in pieces; from `at` on, at most `size` of them. Raises StoreError."""

    def list(self, prefix: str) -> list[str]:
        """Keys of the blobs in a directory and below it, sorted. Empty if there is no such directory."""

    def local_path(self, key: str) -> Path | None:
        """Where the blob is a file of this host; None: it is not."""

    def close(self) -> None:
        """Release everything."""


class LocalStore:
    """Blobs as files below a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> FileInfo:
        """See Store."""
        with BlobWriter(self._root, key) as writer:
            for chunk in chunks:
                writer.write(chunk)
            return writer.seal()

    def get(self, key: str, at: int = 0, size: int | None = None) -> Iterator[bytes]:
        """See Store."""
        path, left = self._root / check_key(key), size
        try:
            with open(open_plain(path), "rb") as file:
                file.seek(at)
                while left is None or left > 0:
                    piece = file.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
                    if not piece:
                        return
                    left = None if left is None else left - len(piece)
                    yield piece
        except OSError as error:
            raise _refused("read", key, error) from error

    def list(self, prefix: str) -> list[str]:
        """See Store."""
        top = self._root / check_key(prefix)
        found = []
        for where, _, names in os.walk(top):
            below = Path(where).relative_to(self._root).as_posix()
            found += [f"{below}/{name}" for name in names if not name.endswith(_UNFINISHED)]
        return sorted(found)

    def local_path(self, key: str) -> Path | None:
        """See Store."""
        path = self._root / check_key(key)
        try:
            plain_size(path)
        except OSError:
            return None
        return path

    def close(self) -> None:
        """See Store."""


class BlobWriter:
    """Writes one blob of a LocalStore; a context manager that removes what was not sealed.

    Raises:
        StoreError: it is there already, or cannot be written; from the methods, too.
    """

    def __init__(self, root: Path, key: str) -> None:
        self._key = key
        self._path = root / check_key(key)
        self._temporary = self._path.with_name(self._path.name + _UNFINISHED)
        self._sha256 = hashlib.sha256()
        self.size = 0
        self._file: int | None = None
        try:
            if self._path.exists():
                raise FileExistsError(17, os.strerror(17), str(self._path))
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise _refused("write", key, error) from error

    def __enter__(self) -> "BlobWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, chunk: bytes | memoryview) -> None:
        """Append bytes."""
        assert self._file is not None
        try:
            write_all(self._file, chunk)
        except OSError as error:
            raise _refused("write", self._key, error) from error
        self._sha256.update(chunk)
        self.size += len(chunk)

    def seal(self) -> FileInfo:
        """Make the blob durable and visible."""
        assert self._file is not None
        try:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None
            os.rename(self._temporary, self._path)
            sync_directory(self._path.parent)
        except OSError as error:
            raise _refused("write", self._key, error) from error
        return FileInfo(self._path.name, self._sha256.hexdigest(), self.size)

    def close(self) -> None:
        """Remove what was not sealed."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._temporary.unlink(missing_ok=True)


def check_key(key: str) -> str:
    """Refuse a key that is none, or leads elsewhere. Raises StoreError."""
    parts = key.split("/")
    if len(parts) > _MOST_PARTS or not all(map(_PART.fullmatch, parts)):
        raise StoreError(f"{key!r:.80} is no key of a blob")
    return key


def _refused(action: str, key: str, error: OSError) -> StoreError:
    return StoreError(f"cannot {action} {key}: {error.strerror or error}")
