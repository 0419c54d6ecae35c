"""A run's state on disk: written atomically, verified before a byte of it is used.

A checkpoint is a directory in RUN/checkpoints/:

    version-000000000050/
        server-0.safetensors   tensors, as many parts as there were servers
        rng.json               anything that is not a tensor
        manifest.json          written last: format, version, created,
                               files {name: {sha256, bytes}}, meta (free JSON),
                               digest (sha256 of the canonical JSON of the rest)

It is written as `.version-….tmp-<random>` beside its final place and renamed when every file is on
the disk, so a kill at any point leaves the checkpoint before it loadable. When the same version is
written again, the earlier one waits as `version-….old` (which `latest` reads too) until the new one
stands in its place.

Nothing here unpickles: parts are safetensors, the rest is JSON.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.exceptions import CheckpointError, UsageError
from paceline.storage.atomic import sync_directory, write_all, write_text_atomically
from paceline.storage.manifest import (
    FORMAT,
    MANIFEST,
    UNUSABLE,
    FileInfo,
    check_file_name,
    explained,
    manifest_text,
    parsed,
    read_manifest,
    to_text,
)
from paceline.storage.plain_files import check_directory, open_plain, plain_size, read_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Checkpoint",
    "CheckpointWriter",
    "FileInfo",
    "clean_temporary",
    "committed",
    "latest",
    "load",
    "new_directory",
    "part_chunks",
    "prune",
    "write_part",
]

_CHUNK_BYTES = 1 << 20  # hashed, then written while still in the processor's cache

_COMMITTED = re.compile(r"version-([0-9]{12,18})(\.old)?")
_TEMPORARY = re.compile(r"\.version-[0-9]{12,18}(\.old)?\.tmp-[0-9a-f]+")

# By name, so that this module need not import torch to be imported.
DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.complex64": "C64",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint64": "U64",
    "torch.uint32": "U32",
    "torch.uint16": "U16",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}

_MOST_JSON_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was verified by `load`; its files are read when asked for."""

    path: Path
    version: int
    created: str
    """UTC, ISO 8601."""
    meta: dict[str, Any]
    files: Mapping[str, FileInfo]

    def tensors(self, name: str) -> dict[str, "Tensor"]:
        """The tensors of one part, on the CPU.

        They are mapped from the file: memory is used as they are touched, and changing them in
        place does not change the file.
        """
        # Imported here and not above: listing checkpoints must not cost torch's import.
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self._path(name)
        with explained("read", path):
            plain_size(path)
            try:
                return load_file(path)
            except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                # Of a type that torch does not have, safetensors raises what it comes upon.
                raise CheckpointError(f"{path} is not safetensors: {error!r:.200}. {UNUSABLE}") from error

    def json(self, name: str) -> Any:
        """The content of one JSON file."""
        path = self._path(name)
        with explained("read", path):
            return parsed(path, read_bytes(path, most=_MOST_JSON_BYTES))

    def _path(self, name: str) -> Path:
        if name not in self.files:
            known = ", ".join(sorted(self.files)) or "none"
            raise CheckpointError(
                f"checkpoint {self.path} has no file {name!r}; its files: {known}. "
                "It may come from another version of Paceline."
            )
        return self.path / name


def new_directory(root: Path, version: int) -> Path:
    """A name for the directory of a checkpoint in the making; no other call returns it."""
    return _hidden(root / f"version-{version:012d}")


class CheckpointWriter:
    """Writes one checkpoint: parts and JSON files in any order, then `commit` or `abort`.

    Thread-safe. Other processes write their parts into `dir` with the function `write_part` and
    send back the FileInfo, which `add` takes in. Nothing is visible to `latest` before `commit`.

    Args:
        root: The run's checkpoints directory; made if it does not exist.
        version: Number of updates the state contains.
        directory: Where the files are written until `commit`: one that `new_directory` named.
    """

    def __init__(self, root: Path, version: int, directory: Path | None = None) -> None:
        if not 0 <= version < 10**18:
            raise UsageError(f"a checkpoint's version must be from 0 to 10^18 - 1, got {version}")
        self.root = root
        self.version = version
        self.dir = directory or new_directory(root, version)
        self._files: dict[str, FileInfo] = {}
        self._lock = threading.Lock()
        self._ended = ""
        with explained("create", self.dir):
            if not root.exists():
                root.mkdir(parents=True, exist_ok=True, mode=0o700)
                sync_directory(root.parent)
            os.mkdir(self.dir, 0o700)

    def write_part(self, name: str, tensors: Mapping[str, "Tensor"]) -> FileInfo:
        """Write tensors into `name` (which ends in .safetensors); see the function `write_part`."""
        info = write_part(self.dir, name, tensors)
        self.add(info)
        return info

    def write_json(self, name: str, value: Any) -> FileInfo:
        """Write a JSON value into `name` (which ends in .json). Keys become strings."""
        check_file_name(name, ".json")
        info = _write_file(self.dir / name, [to_text(name, value).encode()])
        self.add(info)
        return info

    def add(self, info: FileInfo) -> None:
        """Take in a file that another process wrote into `dir`."""
        check_file_name(info.name)
        with self._lock:
            self._check_open()
            if info.name in self._files:
                raise CheckpointError(f"{self.dir / info.name} was written twice in one checkpoint")
            self._files[info.name] = info

    def commit(self, meta: Mapping[str, Any]) -> Path:
        """Make the checkpoint durable and visible; return its directory.

        An error loses no earlier checkpoint; then try again, or `abort` to free the space.
        """
        final = self.root / f"version-{self.version:012d}"
        with self._lock:
            self._check_open()
            with explained("commit", self.dir):
                self._check_files()
                created = datetime.now(UTC).isoformat(timespec="microseconds")
                text = manifest_text(self.version, created, self._files, meta)
                write_text_atomically(self.dir / MANIFEST, text, mode=0o600)
                _publish(self.dir, final)
            self._ended = "committed"
        return final

    def abort(self) -> None:
        """Remove what was written. Does nothing after `commit` or a first `abort`."""
        with self._lock:
            self._ended = self._ended or "aborted"
            # A process still writing its part may add a name meanwhile; clean_temporary gets that.
            shutil.rmtree(self.dir, ignore_errors=True)

    def _check_open(self) -> None:
        if self._ended:
            raise CheckpointError(
                f"checkpoint of version {self.version} in {self.root} was already {self._ended}; "
                "start another CheckpointWriter"
            )

    def _check_files(self) -> None:
        found = {entry.name: entry.stat().st_size for entry in os.scandir(self.dir)}
        found.pop(MANIFEST, None)  # of a commit that failed after it and is tried again
        expected = {info.name: info.bytes for info in self._files.values()}
        wrong = [
            f"{name}: {found.get(name, 'missing')}, expected {expected.get(name, 'not added')}"
            for name in sorted(found.keys() | expected.keys())
            if found.get(name) != expected.get(name)
        ]
        if wrong:
            raise CheckpointError(
                f"checkpoint of version {self.version} is not complete in {self.dir} "
                f"(bytes found, bytes added): {'; '.join(wrong)}. Every part must be written and "
                "added before commit; this checkpoint is not used."
            )


def write_part(
    directory: Path,
    name: str,
    tensors: Mapping[str, "Tensor"],
    *,
    before_write: Callable[[int], None] | None = None,
) -> FileInfo:
    """Write tensors into `directory/name` as safetensors, durably; for any process and thread.

    Takes any dense tensors: on any device, contiguous or not. They must not change meanwhile. The
    file must not exist yet, and does not exist after an error.

    Args:
        before_write: called before each of the writes (1 MB at most) with its bytes, to follow how it gets
            on; an OSError from it is the disk's (faults on purpose).
    """
    check_file_name(name, ".safetensors")
    path = directory / name
    return _write_file(path, part_chunks(path, tensors, before_write))


def part_chunks(
    path: Path, tensors: Mapping[str, "Tensor"], before_write: Callable[[int], None] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a part, in pieces of 1 MB at most; see `write_part`.

    Args:
        path: the name of the part, for messages.
    """
    chunks = _safetensors(path, tensors)
    return chunks if before_write is None else _each(chunks, before_write)


def load(path: Path) -> Checkpoint:
    """Verify a checkpoint completely (reads every byte of it once) and open it.

    Files that the manifest does not list are never looked at.

    Raises:
        CheckpointError: Something is missing, truncated, altered or of an unknown format.
    """
    checkpoint = _opened(path)
    for info in checkpoint.files.values():
        _verify_size(path / info.name, info)
        with explained("read", path / info.name), open(open_plain(path / info.name), "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != info.sha256:
            raise CheckpointError(
                f"{path / info.name} was altered: its sha256 is {sha256}, "
                f"the manifest says {info.sha256}. {UNUSABLE}"
            )
    return checkpoint


def latest(
    root: Path,
    *,
    on_refused: Callable[[Path, CheckpointError], None] | None = None,
    check: Callable[[Checkpoint], object] | None = None,
) -> Checkpoint | None:
    """The checkpoint of the highest version that verifies, or None if there is none.

    Args:
        root: The run's checkpoints directory; it need not exist.
        on_refused: Called for each one that is passed over, newest first, with the reason.
        check: Called for each one that verifies; one for which it raises CheckpointError is passed over, too.
    """
    for path in committed(root):
        try:
            found = load(path)
            if check is not None:
                check(found)
            return found
        except CheckpointError as error:
            if on_refused is not None:
                on_refused(path, error)
    return None


def prune(root: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints.

    One that is visibly incomplete does not count as kept. The one created last always stays, even
    below an altered one of a higher version, so a run that fell back cannot lose its new work.
    """
    if keep < 1:
        raise UsageError(f"checkpoints to keep must be at least 1, got {keep}")
    paths = committed(root)
    complete = []
    for path in paths:
        with contextlib.suppress(CheckpointError):
            checkpoint = _opened(path)
            for info in checkpoint.files.values():
                _verify_size(path / info.name, info)
            complete.append(checkpoint)
    if len(complete) <= keep:
        return
    oldest = complete[keep - 1].path
    newest_work = max(complete, key=lambda checkpoint: checkpoint.created).path
    for path in paths[paths.index(oldest) + 1 :]:
        if path != newest_work:
            with explained("remove", path):
                _discard(path)


def discard_after(root: Path, version: int) -> None:
    """Remove the checkpoints of higher versions: what they hold is of no use."""
    for path in committed(root):
        found = _COMMITTED.fullmatch(path.name)
        if found is not None and int(found[1]) > version:
            with explained("remove", path):
                _discard(path)


def clean_temporary(root: Path) -> None:
    """Remove what killed processes left behind. Only while no process writes a checkpoint in `root`."""
    whole = committed(root)
    with explained("clean", root):
        for path in list(root.iterdir()) if root.exists() else []:
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)  # a server that is told late may still write there
            elif path.suffix == ".old" and path.with_suffix("") in whole:
                # Its replacement got its name only when it was complete.
                _discard(path)


def _safetensors(path: Path, tensors: Mapping[str, "Tensor"]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: header length, JSON header, raw tensors.

    Written by hand for one pass: written and hashed as streamed, no second copy of a shard in
    memory. Only a tensor that is not contiguous or not on the CPU is copied, one at a time.
    """
    import torch

    assert sys.byteorder == "little", "safetensors holds little-endian numbers"
    # Widest first: every tensor is then aligned to its own element size without padding.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in ordered:
        dtype = DTYPES.get(str(tensor.dtype))
        if dtype is None or tensor.layout != torch.strided or name == "__metadata__":
            raise CheckpointError(
                f"{path}: tensor {name!r} ({tensor.dtype}, {tensor.layout}) cannot be saved: "
                "safetensors holds dense tensors of real, integer, bool or complex64 type, "
                "not named __metadata__"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().data
        for offset in range(0, len(data), _CHUNK_BYTES):
            yield data[offset : offset + _CHUNK_BYTES]


def _each(chunks: Iterable[bytes | memoryview], call: Callable[[int], None]) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        call(len(chunk))
        yield chunk


def _write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileInfo:
    sha256 = hashlib.sha256()
    size = 0
    with explained("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for chunk in chunks:
                sha256.update(chunk)
                write_all(descriptor, chunk)
                size += len(chunk)
            os.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)
    return FileInfo(path.name, sha256.hexdigest(), size)


def _opened(path: Path) -> Checkpoint:
    """A checkpoint of which only the manifest was read."""
    manifest = read_manifest(path)
    match = _COMMITTED.fullmatch(path.name)
    if match and int(match[1]) != manifest.version:
        raise CheckpointError(
            f"{path / MANIFEST} is of version {manifest.version}, its directory's name says {match[1]}: "
            f"it was moved there. {UNUSABLE}"
        )
    return Checkpoint(
        path=path,
        version=manifest.version,
        created=manifest.created,
        meta=manifest.meta,
        files=manifest.files,
    )


def _verify_size(path: Path, info: FileInfo) -> None:
    with explained("read", path):
        size = plain_size(path)
    if size != info.bytes:
        change = "truncated" if size < info.bytes else "altered"
        raise CheckpointError(
            f"{path} was {change}: it has {size} bytes, the manifest says {info.bytes}. {UNUSABLE}"
        )


def committed(root: Path) -> list[Path]:
    """Committed checkpoints, the highest version first, a replaced one after its replacement."""
    with explained("list", root):
        names = []
        with contextlib.suppress(FileNotFoundError):
            check_directory(root)
            names = os.listdir(root)
    matches = filter(None, map(_COMMITTED.fullmatch, names))
    ordered = sorted(matches, key=lambda match: (int(match[1]), match[2] is None), reverse=True)
    return [root / match[0] for match in ordered]


def _publish(temporary: Path, final: Path) -> None:
    old = final.with_name(final.name + ".old")
    if final.exists():
        if old.exists():
            _discard(old)
        os.rename(final, old)
    os.rename(temporary, final)
    sync_directory(final.parent)
    if old.exists():
        _discard(old)


def _discard(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
        return
    # Renamed first: a kill in the middle must not leave a half-removed checkpoint under its name.
    hidden = _hidden(path)
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
