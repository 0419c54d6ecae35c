"""SharedDevice: a device whose memory several processes of one host share, and whose work is done in order.

Processes keep the order between each other's work by flags: counters in memory that is shared by the host's
processes, which the device raises and waits for in the order of its work, and which a CPU can read and raise,
too. So no process waits on the CPU for work of the device, and work that waits for a process that died can be
let go.
"""

import re
import struct
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.loading import load
from paceline.comm.memory import Region

__all__ = [
    "FLAGS_BYTES",
    "FLAG_STRIDE",
    "DeviceBlock",
    "FlagFence",
    "FlagWords",
    "Flags",
    "Mark",
    "SharedDevice",
    "WorkQueue",
    "device_of",
    "device_with_id",
    "flags_bytes",
    "is_stand_in",
]

FLAGS_BYTES = 4096
"""Size of a region that holds a few flags: a page."""
FLAG_STRIDE = 64
"""Bytes from one flag to the next: a cache line each."""
_FOR_EVER = 0x3FFFFFFF
"""A value that no count of steps reaches. Devices compare as if numbers went round."""


def flags_bytes(count: int) -> int:
    """Size of a region that holds so many flags: whole pages."""
    return -(-count * FLAG_STRIDE // FLAGS_BYTES) * FLAGS_BYTES


class DeviceBlock(Protocol):
    """Memory on a device that another process can open. It is freed when the process that made it ends."""

    memory: Tensor
    """Its bytes."""
    handle: bytes
    """Opens it in another process of this host."""

    def close(self) -> None:
        """Free it, or the mapping of it. No work that uses it may be under way."""
        ...


class FlagWords:
    """Counters that only rise, in a region of whole pages (`flags_bytes`), as a CPU sees them."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def raised(self, flag: int, value: int) -> bool:
        """Whether a flag is raised to this value."""
        found: int = struct.unpack_from("<i", self.region.buffer, flag * FLAG_STRIDE)[0]
        return found >= value

    def raise_now(self, flag: int, value: int) -> None:
        """Raise a flag from the CPU."""
        struct.pack_into("<i", self.region.buffer, flag * FLAG_STRIDE, value)

    def release(self, flag: int) -> None:
        """Let go all that waits for a flag, now and later."""
        self.raise_now(flag, _FOR_EVER)

    def release_all(self) -> None:
        """Let go all that waits for any flag, now and later."""
        for flag in range(self.region.size // FLAG_STRIDE):
            self.release(flag)


class Flags(FlagWords, ABC):
    """Flags that a device raises and waits for, too."""

    @abstractmethod
    def raise_in_order(self, flag: int, value: int) -> None:
        """Raise a flag when the device has done all work that it was given so far. Does not block."""

    @abstractmethod
    def wait_in_order(self, flag: int, value: int) -> None:
        """Let work that the device is given from now on wait until a flag is raised. Does not block."""


class Mark(Protocol):
    """A moment in a queue: all work that it had been given is done."""

    def follow(self) -> None:
        """What the script gives the device from now on comes after it. Does not block."""
        ...

    def wait(self) -> None:
        """Block until then."""
        ...

    def reached(self) -> bool:
        """Whether it is past. Does not block."""
        ...


class WorkQueue(Protocol):
    """Work of a device in an order of its own, beside what the script gives the device. None of it blocks.

    `with` the queue, work is given to it; entering and leaving costs more than a copy.
    """

    def __enter__(self) -> "WorkQueue": ...

    def __exit__(self, *_: object) -> None: ...

    def follow(self) -> None:
        """Work given from now on comes after all that the script has given the device so far."""
        ...

    def wait_for(self, flags: Flags, flag: int, value: int) -> None:
        """Work given from now on waits until a flag is raised. Within the queue only."""
        ...

    def copy(self, to: Tensor, of: Tensor) -> None:
        """Copy between the device and pinned memory of the host. Within the queue only."""
        ...

    def mark(self) -> Mark:
        """The moment when all work given so far is done."""
        ...


class SharedDevice(Protocol):
    """One device, as one process uses it."""

    where: torch.device
    id: str
    """Names the device, the same in every process of this host."""

    def allocate(self, nbytes: int) -> DeviceBlock:
        """New memory, zeroed.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """
        ...

    def open(self, handle: bytes, nbytes: int) -> DeviceBlock:
        """Memory that another process has made.

        Raises:
            LinkError: it cannot be opened.
        """
        ...

    def flags(self, region: Region) -> Flags:
        """Flags in a shared region of whole pages."""
        ...

    def queue(self) -> WorkQueue:
        """A new queue."""
        ...

    def pin(self, memory: Tensor) -> None:
        """Let the device copy to and from memory of the host by itself. It stays mapped from now on."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Bytes of host memory that the device copies to and from without the CPU."""
        ...

    def free_bytes(self) -> int:
        """Bytes that are left on the device."""
        ...


class FlagFence:
    """The moment at which a flag is raised to a value. See Fence."""

    def __init__(self, flags: Flags, flag: int, value: int) -> None:
        self._flags = flags
        self._flag = flag
        self._value = value

    def reached(self) -> bool:
        """See Fence."""
        return self._flags.raised(self._flag, self._value)

    def wait(self) -> None:
        """See Fence."""
        self._flags.wait_in_order(self._flag, self._value)


def device_of(where: torch.device, asked: str | None = None) -> SharedDevice | None:
    """The device that a tensor is on, if processes can share its memory.

    Args:
        asked: the job's device; `module:function` names one that takes the place of the CPU, for tests.
    """
    if where.type == "cuda":
        from paceline.comm.cuda_device import CudaDevice  # needs NVIDIA's driver

        return CudaDevice(where)
    if asked is not None and is_stand_in(asked):
        made: SharedDevice = load(asked)()
        return made
    return None


def device_with_id(id: str, asked: str | None = None) -> SharedDevice | None:
    """The device that another process names; None: this process does not see it."""
    if asked is not None and is_stand_in(asked):
        made: SharedDevice = load(asked)()
        return made if made.id == id else None
    if not id.startswith("cuda:") or not torch.cuda.is_available():
        return None
    from paceline.comm.cuda_device import CudaDevice

    for index in range(torch.cuda.device_count()):
        if CudaDevice.id_of(index) == id:
            return CudaDevice(torch.device("cuda", index))
    return None


def is_stand_in(asked: str) -> bool:
    """Whether a job's device is the name of a function, as `module:function`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", asked) is not None
