"""HostDevice: takes a GPU's place in tests. Its memory is the host's, and the CPU does its work at once.

`paceline run --device paceline.testing.host_device:HostDevice` runs all that a run on a GPU does, in every
process of it, except for what CUDA does.
"""

import json
import os
import time
from typing import Self

import torch
from torch import Tensor

from paceline.comm.device import Flags
from paceline.comm.memory import Region
from paceline.exceptions import LinkError

__all__ = ["HostDevice"]

_PATIENCE_S = 60.0


class HostBlock:
    """See DeviceBlock. The handle names a descriptor of the process that made it."""

    def __init__(self, region: Region, handle: bytes) -> None:
        self.memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
        self.handle = handle
        self._region = region

    def close(self) -> None:
        """See DeviceBlock."""
        self._region.close()


class HostFlags(Flags):
    """See Flags. A thread waits where a device would."""

    def raise_in_order(self, flag: int, value: int) -> None:
        """See Flags."""
        self.raise_now(flag, value)

    def wait_in_order(self, flag: int, value: int) -> None:
        """See Flags. LinkError after a minute."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.raised(flag, value):
            if time.monotonic() > deadline:
                raise LinkError(f"flag {flag} was not raised to {value} within {_PATIENCE_S:g} s")
            time.sleep(0.0001)


class HostTimeMark:
    """See TimeMark."""

    def __init__(self) -> None:
        self.at = 0

    def record(self) -> bool:
        """See TimeMark."""
        self.at = time.perf_counter_ns()
        return True

    def passed(self) -> bool:
        """See TimeMark."""
        return True

    def ms_since(self, earlier: Self) -> float:
        """See TimeMark."""
        return (self.at - earlier.at) / 1e6


class HostMark:
    """See Mark. It is past when it is made."""

    def follow(self) -> None:
        """See Mark."""

    def wait(self) -> None:
        """See Mark."""

    def reached(self) -> bool:
        """See Mark."""
        return True


class HostQueue:
    """See WorkQueue. The CPU does the work at once."""

    def __enter__(self) -> "HostQueue":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def follow(self) -> None:
        """See WorkQueue."""

    def wait_for(self, flags: Flags, flag: int, value: int) -> None:
        """See WorkQueue."""
        flags.wait_in_order(flag, value)

    def copy(self, to: Tensor, of: Tensor) -> None:
        """See WorkQueue."""
        to.copy_(of)

    def mark(self) -> HostMark:
        """See WorkQueue."""
        return HostMark()


class HostDevice:
    """See SharedDevice."""

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        self.id = "host:0"

    def allocate(self, nbytes: int) -> HostBlock:
        """See SharedDevice."""
        region = Region.create(nbytes)
        return HostBlock(region, json.dumps([os.getpid(), region.fd]).encode())

    def open(self, handle: bytes, nbytes: int) -> HostBlock:
        """See SharedDevice."""
        pid, fd = json.loads(handle)
        try:
            mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LinkError(f"the memory of another process cannot be opened: {error}") from error
        return HostBlock(Region.attach(mine, nbytes), handle)

    def flags(self, region: Region) -> HostFlags:
        """See SharedDevice."""
        return HostFlags(region)

    def queue(self) -> HostQueue:
        """See SharedDevice."""
        return HostQueue()

    def pin(self, memory: Tensor) -> None:
        """See SharedDevice."""

    def pinned(self, nbytes: int) -> Tensor:
        """See SharedDevice."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def free_bytes(self) -> int:
        """See SharedDevice."""
        return 1 << 40

    def time_mark(self) -> HostTimeMark:
        """See TimeMark: all work is done when it was given."""
        return HostTimeMark()
