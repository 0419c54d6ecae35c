"""Shared memory without a name.

A Region is a memfd: it has no name to guess, is not counted against /dev/shm, and the kernel frees
it when its last holder dies, so a crash or a SIGKILL leaves nothing behind. Its descriptor travels
over a unix socket. Its size is sealed when it is made, so no holder can shrink it under another's
feet.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
from enum import Enum

from paceline.exceptions import LinkError

__all__ = ["Access", "Region"]

_PRESENT, _OF_FILE = 1 << 63, 1 << 61  # of an entry of /proc/self/pagemap
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Access(Enum):
    """How a process maps a region."""

    SHARED = mmap.MAP_SHARED
    """Reads and writes are seen by all."""
    PRIVATE = mmap.MAP_PRIVATE
    """Sees the others' writes; own writes stay private to the page (and can be taken back)."""


class Region:
    """One mapped piece of shared memory. `buffer` is the mapping."""

    def __init__(self, fd: int, size: int, access: Access) -> None:
        self.fd = fd
        self.size = size
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        self.buffer = mmap.mmap(fd, size, flags=access.value, prot=prot)
        with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory
            self.buffer.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def create(cls, size: int) -> "Region":
        """New zeroed memory, mapped shared. Pages cost nothing until they are touched.

        Raises:
            LinkError: the system has no room for it.
        """
        fd = -1
        try:
            fd = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            return cls(fd, size, Access.SHARED)
        except (OSError, ValueError, OverflowError) as error:  # mmap has all three
            if fd >= 0:
                os.close(fd)
            raise LinkError(f"cannot make {size:,} bytes of shared memory: {error}") from error

    @classmethod
    def attach(cls, fd: int, size: int, access: Access = Access.SHARED) -> "Region":
        """Map memory that another role made, after checking owner, size and seals.

        The descriptor belongs to the region from here on; one that is refused is closed.

        Raises:
            LinkError: it is not what it should be.
        """
        try:
            _check(fd, size)
            return cls(fd, size, access)
        except (OSError, ValueError, OverflowError) as error:
            _close(fd)
            raise LinkError(f"cannot map the shared memory received: {error}") from error
        except LinkError:
            _close(fd)
            raise

    def read_only_fd(self) -> int:
        """A descriptor through which it can be mapped for reading, and privately, but not for shared writing.
        The caller's to close.

        (A seal on future writing would hold for servers that come later, too.)
        """
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def private_pages(self) -> int:
        """Of a PRIVATE mapping: how many of its pages were written to here. Read off the kernel's page
        map, so it costs 8 bytes a page; 0 where that map cannot be read."""
        import numpy as np  # here, because the controller has no other use for it

        start = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        count = -(-self.size // mmap.PAGESIZE)
        try:
            with open("/proc/self/pagemap", "rb") as pages:
                pages.seek(start // mmap.PAGESIZE * 8)
                entries = np.frombuffer(pages.read(count * 8), dtype=np.uint64)
        except OSError:
            return 0
        both, present = np.uint64(_PRESENT | _OF_FILE), np.uint64(_PRESENT)
        return int(((entries & both) == present).sum())

    def forget_private_writes(self) -> None:
        """Of a PRIVATE mapping: drop own writes and see the shared memory again."""
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def close_descriptor(self) -> None:
        """No other process will be given it. The mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Drop the descriptor; the mapping goes when its last view does."""
        self.close_descriptor()
        with contextlib.suppress(BufferError):  # views are alive: the mapping goes with them
            self.buffer.close()


def _check(fd: int, size: int) -> None:
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise LinkError(f"the descriptor received is not a memfd: {error}") from error
    mine = os.geteuid()
    sealed = seals & _SIZE_SEALS == _SIZE_SEALS
    if status.st_uid != mine or status.st_size != size or not sealed:
        raise LinkError(
            f"shared memory received has {status.st_size:,} bytes, owner {status.st_uid}, "
            f"seals {seals:#x}; expected {size:,} bytes, owner {mine}, sealed size"
        )


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # it never was one
        os.close(fd)
