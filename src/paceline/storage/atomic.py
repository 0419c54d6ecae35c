"""Files that are seen whole or not at all, whatever is killed when."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing", "sync_directory", "write_all", "write_text_atomically"]


def write_text_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace `path` by `text` (UTF-8; half characters are written out), durably.

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
            write_all(descriptor, text.encode(errors="backslashreplace"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write in the place of `path`, which it replaces at the end; after an error it is removed.

    It exists from the beginning on, with the permissions that the umask leaves, so a place that cannot be
    written is known before there is anything to write. Raises OSError.
    """
    temporary = path.with_name(f".{path.name[:200]}.tmp-{secrets.token_hex(4)}")
    with temporary.open("xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        yield temporary
        os.chmod(temporary, mode)  # `write` may have made another file, with permissions of its own
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


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
