"""A checkpoint's manifest: what it must hold, and what is wrong with one.

    {"format": 1, "version": 50, "created": "…", "files": {name: {"sha256": …, "bytes": …}},
     "meta": {…}, "digest": sha256 of the canonical JSON of the rest}

Its digest finds accidents only: an attacker who alters a manifest makes a new one. So every field is checked,
and names cannot lead out of the directory.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from paceline.exceptions import CheckpointError
from paceline.storage.json_files import parse_json
from paceline.storage.plain_files import check_directory, plain_size, read_bytes
from paceline.storage.typed_json import checked

__all__ = [
    "FORMAT",
    "MANIFEST",
    "UNUSABLE",
    "FileInfo",
    "Manifest",
    "check_file_name",
    "explained",
    "manifest_text",
    "parsed",
    "read_manifest",
    "to_text",
]

FORMAT = 1
"""Number of the layout described above; a manifest with another number is refused."""

MANIFEST = "manifest.json"
UNUSABLE = "Resume from an earlier checkpoint, or restore this one from a copy."

_MOST_BYTES = 64 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileInfo:
    """What the manifest says of one file. All fields are JSON, so it travels between processes."""

    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest that was checked."""

    version: int
    created: str
    meta: dict[str, Any]
    files: dict[str, FileInfo]


class _FileEntry(TypedDict):
    sha256: str
    bytes: int


class _Content(TypedDict):
    version: int
    created: str
    files: dict[str, _FileEntry]
    meta: dict[str, Any]


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint's directory.

    Raises:
        CheckpointError: it cannot be read, or does not describe a checkpoint; or the directory is a link.
    """
    file = path / MANIFEST
    with explained("read", file):
        check_directory(path)
        plain_size(file)
        manifest = parsed(file, read_bytes(file, most=_MOST_BYTES))
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{file} is not a JSON object. {UNUSABLE}")
    if type(manifest.get("format")) is not int or manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{file} has format {manifest.get('format')!r:.40}, this Paceline reads format {FORMAT}. "
            "Use the version of Paceline that wrote it, or an earlier checkpoint."
        )
    stored, computed = manifest.get("digest"), _digest(manifest)
    if stored != computed:
        raise CheckpointError(
            f"{file} was altered: its content has digest {computed}, it says {stored!s:.70}. {UNUSABLE}"
        )
    try:
        return _manifest_of(checked(_Content, manifest))
    except ValueError as error:
        raise CheckpointError(f"{file} does not describe a checkpoint: {error}. {UNUSABLE}") from error


def _manifest_of(content: _Content) -> Manifest:
    if content["version"] < 0:
        raise ValueError(f"version {content['version']}")
    files = {}
    for name, entry in content["files"].items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"file name {name!r:.80}")
        if not _SHA256.fullmatch(entry["sha256"]):
            raise ValueError(f"sha256 {entry['sha256']!r:.80} of {name}")
        if entry["bytes"] < 0:
            raise ValueError(f"bytes {entry['bytes']} of {name}")
        files[name] = FileInfo(name, entry["sha256"], entry["bytes"])
    return Manifest(version=content["version"], created=content["created"], meta=content["meta"], files=files)


def manifest_text(version: int, created: str, files: Mapping[str, FileInfo], meta: Mapping[str, Any]) -> str:
    """A manifest, ready to be written. Raises CheckpointError if `meta` is not JSON."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": version,
        "created": created,
        "files": {name: {"sha256": info.sha256, "bytes": info.bytes} for name, info in sorted(files.items())},
        # As it will be read: JSON turns integer keys to text, which sorts differently.
        "meta": json.loads(to_text(MANIFEST, dict(meta))),
    }
    return to_text(MANIFEST, {**manifest, "digest": _digest(manifest)})


def check_file_name(name: str, suffix: str = "") -> None:
    """Refuse a name that no file of a checkpoint can have. Raises CheckpointError."""
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST or not name.endswith(suffix):
        ending = f", ends in {suffix}" if suffix else ""
        raise CheckpointError(
            f"{name!r} cannot be a file of a checkpoint: a name has 1 to 200 of the characters "
            f"A-Z a-z 0-9 . _ -, starts with a letter or digit{ending}, and is not {MANIFEST}"
        )


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(to_text(MANIFEST, rest, sort_keys=True).encode()).hexdigest()


def to_text(name: str, value: Any, *, sort_keys: bool = False) -> str:
    """A value as JSON. Raises CheckpointError if it cannot be."""
    try:
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{name}: the value is not JSON ({error}); tensors belong in a part, "
            "NaN and infinity cannot be kept"
        ) from error


def parsed(path: Path, data: bytes) -> Any:
    """The JSON value in a file. Raises CheckpointError."""
    try:
        return parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}. {UNUSABLE}") from error


@contextlib.contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
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
        case errno.EINVAL | errno.EISDIR | errno.EFBIG | errno.ELOOP:
            return UNUSABLE
        case errno.EMFILE | errno.ENFILE:
            return "Allow more open files (ulimit -n)."
        case _:
            return "Check the disk, or choose another run directory (--run-dir)."
