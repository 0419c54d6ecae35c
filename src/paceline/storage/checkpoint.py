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
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.exceptions import CheckpointError, UsageError
from paceline.storage.atomic import sync_directory, write_all, write_text_atomically

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Checkpoint",
    "CheckpointWriter",
    "FileInfo",
    "clean_temporary",
    "latest",
    "load",
    "prune",
    "write_part",
]

FORMAT = 1
"""Number of the layout described above; a manifest with another number is refused."""

MANIFEST = "manifest.json"

_MAX_MANIFEST_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20  # hashed, then written while still in the processor's cache

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
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

_UNUSABLE = "Resume from an earlier checkpoint, or restore this one from a copy."


@dataclass(frozen=True)
class FileInfo:
    """What the manifest says of one file. All fields are JSON, so it travels between processes."""

    name: str
    sha256: str
    bytes: int


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
        with _explained("read", path):
            try:
                return load_file(path)
            except SafetensorError as error:
                raise CheckpointError(f"{path} is not safetensors: {error}. {_UNUSABLE}") from error

    def json(self, name: str) -> Any:
        """The content of one JSON file."""
        path = self._path(name)
        with _explained("read", path):
            return _parse(path, path.read_bytes())

    def _path(self, name: str) -> Path:
        if name not in self.files:
            known = ", ".join(sorted(self.files)) or "none"
            raise CheckpointError(
                f"checkpoint {self.path} has no file {name!r}; its files: {known}. "
                "It may come from another version of Paceline."
            )
        return self.path / name


class CheckpointWriter:
    """Writes one checkpoint: parts and JSON files in any order, then `commit` or `abort`.

    Thread-safe. Other processes write their parts into `dir` with the function `write_part` and
    send back the FileInfo, which `add` takes in. Nothing is visible to `latest` before `commit`.

    Args:
        root: The run's checkpoints directory; made if it does not exist.
        version: Number of updates the state contains.
    """

    def __init__(self, root: Path, version: int) -> None:
        if not 0 <= version < 10**18:
            raise UsageError(f"a checkpoint's version must be from 0 to 10^18 - 1, got {version}")
        self.root = root
        self.version = version
        self.dir = _hidden(root / f"version-{version:012d}")
        self._files: dict[str, FileInfo] = {}
        self._lock = threading.Lock()
        self._ended = ""
        with _explained("create", self.dir):
            if not root.exists():
                root.mkdir(parents=True, exist_ok=True)
                sync_directory(root.parent)
            os.mkdir(self.dir)

    def write_part(self, name: str, tensors: Mapping[str, "Tensor"]) -> FileInfo:
        """Write tensors into `name` (which ends in .safetensors); see the function `write_part`."""
        info = write_part(self.dir, name, tensors)
        self.add(info)
        return info

    def write_json(self, name: str, value: Any) -> FileInfo:
        """Write a JSON value into `name` (which ends in .json). Keys become strings."""
        _check_name(name, ".json")
        info = _write_file(self.dir / name, [_json(name, value).encode()])
        self.add(info)
        return info

    def add(self, info: FileInfo) -> None:
        """Take in a file that another process wrote into `dir`."""
        _check_name(info.name)
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
            with _explained("commit", self.dir):
                self._check_files()
                manifest = {
                    "format": FORMAT,
                    "version": self.version,
                    "created": datetime.now(UTC).isoformat(timespec="microseconds"),
                    "files": {
                        name: {"sha256": info.sha256, "bytes": info.bytes}
                        for name, info in sorted(self._files.items())
                    },
                    # As it will be read: JSON turns integer keys to text, which sorts differently.
                    "meta": json.loads(_json(MANIFEST, dict(meta))),
                }
                manifest["digest"] = _digest(manifest)
                write_text_atomically(self.dir / MANIFEST, _json(MANIFEST, manifest))
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
    _check_name(name, ".safetensors")
    chunks = _safetensors(directory / name, tensors)
    return _write_file(directory / name, chunks if before_write is None else _each(chunks, before_write))


def load(path: Path) -> Checkpoint:
    """Verify a checkpoint completely (reads every byte of it once) and open it.

    Files that the manifest does not list are never looked at.

    Raises:
        CheckpointError: Something is missing, truncated, altered or of an unknown format.
    """
    checkpoint = _read_manifest(path)
    for info in checkpoint.files.values():
        _verify_size(path / info.name, info)
        with _explained("read", path / info.name), open(path / info.name, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != info.sha256:
            raise CheckpointError(
                f"{path / info.name} was altered: its sha256 is {sha256}, "
                f"the manifest says {info.sha256}. {_UNUSABLE}"
            )
    return checkpoint


def latest(
    root: Path, *, on_refused: Callable[[Path, CheckpointError], None] | None = None
) -> Checkpoint | None:
    """The checkpoint of the highest version that verifies, or None if there is none.

    Args:
        root: The run's checkpoints directory; it need not exist.
        on_refused: Called for each one that is passed over, newest first, with the reason.
    """
    for path in _committed(root):
        try:
            return load(path)
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
    paths = _committed(root)
    complete = []
    for path in paths:
        with contextlib.suppress(CheckpointError):
            checkpoint = _read_manifest(path)
            for info in checkpoint.files.values():
                _verify_size(path / info.name, info)
            complete.append(checkpoint)
    if len(complete) <= keep:
        return
    oldest = complete[keep - 1].path
    newest_work = max(complete, key=lambda checkpoint: checkpoint.created).path
    for path in paths[paths.index(oldest) + 1 :]:
        if path != newest_work:
            with _explained("remove", path):
                _discard(path)


def discard_after(root: Path, version: int) -> None:
    """Remove the checkpoints of higher versions: what they hold is of no use."""
    for path in _committed(root):
        found = _COMMITTED.fullmatch(path.name)
        if found is not None and int(found[1]) > version:
            with _explained("remove", path):
                _discard(path)


def clean_temporary(root: Path) -> None:
    """Remove what killed processes left behind. Only while no process writes a checkpoint in `root`."""
    committed = _committed(root)
    with _explained("clean", root):
        for path in list(root.iterdir()) if root.exists() else []:
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)  # a server that is told late may still write there
            elif path.suffix == ".old" and path.with_suffix("") in committed:
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
    with _explained("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
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


def _read_manifest(path: Path) -> Checkpoint:
    file = path / MANIFEST
    with _explained("read", file):
        size = _size(file)
        if size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{file} has {size} bytes, at most {_MAX_MANIFEST_BYTES} are read. {_UNUSABLE}"
            )
        manifest = _parse(file, file.read_bytes())
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{file} is not a JSON object. {_UNUSABLE}")
    if type(manifest.get("format")) is not int or manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{file} has format {manifest.get('format')!r}, this Paceline reads format {FORMAT}. "
            "Use the version of Paceline that wrote it, or an earlier checkpoint."
        )
    stored, computed = manifest.get("digest"), _digest(manifest)
    if stored != computed:
        raise CheckpointError(
            f"{file} was altered: its content has digest {computed}, it says {stored}. {_UNUSABLE}"
        )
    # The digest only finds accidents: an attacker who alters a manifest makes a new digest.
    try:
        checkpoint = _checkpoint_of(path, manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} does not describe a checkpoint: {error!r}. {_UNUSABLE}") from error
    match = _COMMITTED.fullmatch(path.name)
    if match and int(match[1]) != checkpoint.version:
        raise CheckpointError(
            f"{file} is of version {checkpoint.version}, its directory's name says {match[1]}: "
            f"it was moved there. {_UNUSABLE}"
        )
    return checkpoint


def _checkpoint_of(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    version, created, meta = manifest["version"], manifest["created"], manifest["meta"]
    if type(version) is not int or version < 0:
        raise ValueError(f"version {version!r}")
    if not isinstance(created, str) or not isinstance(meta, dict):
        raise ValueError("created must be text and meta an object")
    if not isinstance(manifest["files"], dict):
        raise ValueError("files must be an object")
    files = {}
    for name, entry in manifest["files"].items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"file name {name!r}")
        sha256, size = entry["sha256"], entry["bytes"]
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise ValueError(f"sha256 {sha256!r} of {name}")
        if type(size) is not int or size < 0:
            raise ValueError(f"bytes {size!r} of {name}")
        files[name] = FileInfo(name, sha256, size)
    return Checkpoint(path=path, version=version, created=created, meta=meta, files=files)


def _verify_size(path: Path, info: FileInfo) -> None:
    with _explained("read", path):
        size = _size(path)
    if size != info.bytes:
        change = "truncated" if size < info.bytes else "altered"
        raise CheckpointError(
            f"{path} was {change}: it has {size} bytes, the manifest says {info.bytes}. {_UNUSABLE}"
        )


def _size(path: Path) -> int:
    status = os.lstat(path)
    # A link could lead out of the directory; a pipe would block the reader.
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a plain file. {_UNUSABLE}")
    return status.st_size


def _committed(root: Path) -> list[Path]:
    """Committed checkpoints, the highest version first, a replaced one after its replacement."""
    with _explained("list", root):
        names = os.listdir(root) if root.exists() else []
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
    # Renamed first: a kill in the middle must not leave a half-removed checkpoint under its name.
    hidden = _hidden(path)
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


def _check_name(name: str, suffix: str = "") -> None:
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST or not name.endswith(suffix):
        ending = f", ends in {suffix}" if suffix else ""
        raise CheckpointError(
            f"{name!r} cannot be a file of a checkpoint: a name has 1 to 200 of the characters "
            f"A-Z a-z 0-9 . _ -, starts with a letter or digit{ending}, and is not {MANIFEST}"
        )


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(_json(MANIFEST, rest, sort_keys=True).encode()).hexdigest()


def _json(name: str, value: Any, *, sort_keys: bool = False) -> str:
    try:
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{name}: the value is not JSON ({error}); tensors belong in a part, "
            "NaN and infinity cannot be kept"
        ) from error


def _parse(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}. {_UNUSABLE}") from error


@contextlib.contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a CheckpointError that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        where = error.filename or path
        raise CheckpointError(f"cannot {action} {where}: {reason}. {_advice(error)}") from error


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "Free space there, or choose a run directory on a larger disk (--run-dir)."
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"Give user {os.geteuid()} permission there, or choose another run directory (--run-dir)."
        case errno.ENOENT | errno.ENOTDIR:
            return "The checkpoint was removed, aborted or never finished; use another one."
        case errno.EEXIST:
            return "Something of that name is there already; a checkpoint's file is written once."
        case _:
            return "Check the disk, or choose another run directory (--run-dir)."
