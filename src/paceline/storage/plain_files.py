"""Plain files: opened without following a link, read up to a limit.

A run directory may hold anything: a link out of it, a pipe that would block its reader for ever, a device, a
file without an end. All of that is refused with an OSError that says what it is, so a caller treats it as a
file that cannot be read.
"""

import errno
import os
import stat
from pathlib import Path

__all__ = ["append_to", "check_directory", "open_plain", "plain_size", "read_bytes", "reason_of"]

_CHUNK_BYTES = 1 << 20
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def open_plain(path: Path, flags: int = os.O_RDONLY, *, mode: int = 0o600) -> int:
    """Open a plain file and return its descriptor. Never blocks, never follows a link.

    Args:
        flags: as for `os.open`. With O_CREAT the file may be new.
        mode: permissions of a new file, less the umask.

    Raises:
        OSError: it is not there, or is not a plain file.
    """
    try:
        # Looked at before it is opened: to open a device can have an effect.
        _check_plain(path, os.lstat(path))
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), repr(str(path))) from None
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    file = os.open(path, (flags & ~os.O_TRUNC) | safe, mode)
    try:
        found = os.fstat(file)
        _check_plain(path, found)  # it may have been replaced meanwhile
        if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
            raise OSError(errno.EMLINK, "it has a second name, under which it may be another file", str(path))
        if flags & os.O_TRUNC:  # not before it is known to be the right one
            os.ftruncate(file, 0)
        if flags & (os.O_WRONLY | os.O_RDWR):
            os.set_blocking(file, True)  # it may become the standard output of a program
    except BaseException:
        os.close(file)
        raise
    return file


def append_to(path: Path) -> int:
    """Open a plain file to append to it. Only this user may read it, also if it was there before."""
    file = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    found = os.fstat(file)
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        os.fchmod(file, 0o600)
    return file


def read_bytes(path: Path, *, most: int, at: int = 0) -> bytes:
    """The content of a plain file, from byte `at` on.

    Raises:
        OSError: it cannot be read, is not a plain file, or has more than `most` bytes there.
    """
    file = open_plain(path)
    try:
        if os.fstat(file).st_size - at > most:
            raise _too_large(path, most)
        if at:
            os.lseek(file, at, os.SEEK_SET)
        parts, left = [], most
        while part := os.read(file, min(left + 1, _CHUNK_BYTES)):
            left -= len(part)
            if left < 0:  # it grows as it is read
                raise _too_large(path, most)
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(file)


def plain_size(path: Path) -> int:
    """Bytes of a plain file. Raises OSError if it is not one."""
    found = os.lstat(path)
    _check_plain(path, found)
    return found.st_size


def check_directory(path: Path) -> None:
    """Refuse what is not a directory itself, such as a link to one. Raises OSError."""
    if not stat.S_ISDIR((found := os.lstat(path)).st_mode):
        raise OSError(errno.ENOTDIR, f"it is {_kind(found)}, not a directory", str(path))


def _check_plain(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
        raise OSError(number, f"it is {_kind(found)}, not a plain file", str(path))


def _kind(found: os.stat_result) -> str:
    for is_kind, name in _KINDS:
        if is_kind(found.st_mode):
            return name
    return "a plain file" if stat.S_ISREG(found.st_mode) else "a device"


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {most:,} bytes, which is the limit", str(path))


def reason_of(error: Exception) -> str:
    """Why a file cannot be read or understood, in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:200]
