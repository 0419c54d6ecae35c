"""Files that are seen whole or not at all, whatever is killed when."""

import contextlib
import os
import secrets
from pathlib import Path

__all__ = ["sync_directory", "write_all", "write_text_atomically"]


def write_text_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace `path` by `text` (UTF-8), durably.

    A reader, or the next process after a crash or a power cut, finds either the old content or the
    new, never a part. Blocks for two fsyncs. Safe from several threads or processes: the last one
    wins. If it raises (`OSError`), the old content stands and nothing is left beside it.

    Args:
        path: The file; its directory must exist.
        text: The whole new content.
        mode: Permissions, less the umask. The file never exists with wider ones, so 0o600 is safe
            for a secret.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            write_all(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte of `data`; a single `os.write` may stop early (Linux: at 2 GiB)."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: fsync of a file does not cover its own name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
