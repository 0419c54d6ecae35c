"""DeviceReader: what a server reads of values that a device computes, without waiting for it blindly."""

import collections
import time
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from paceline.comm.device import FLAGS_BYTES, SharedDevice
from paceline.comm.memory import Region

__all__ = ["DeviceReader"]

_PLACES = 256
_PLACE_BYTES = 256
_LOOK_S = 0.0001
_CHECK_S = 0.01
"""How often it looks, while it waits, whether a worker has died whose work the device waits for."""


class _Awaited(NamedTuple):
    """A value on its way to the host."""

    number: int
    into: Tensor
    tell: Callable[[list[float]], None]


class DeviceReader:
    """Of one server. The main thread only.

    The device may wait for a worker's gradient; if that worker dies, its carrier must let the device go. So
    the thread that does this must not block in a call of the device: it waits here.

    Args:
        release_dead: lets the device go on if it waits for a worker that has died.
    """

    def __init__(self, device: SharedDevice, release_dead: Callable[[], None]) -> None:
        region = Region.create(FLAGS_BYTES)
        self._flags = device.flags(region)
        region.close_descriptor()
        self._places = device.pinned(_PLACES * _PLACE_BYTES)
        self._release_dead = release_dead
        self._count = 0
        self._awaited: collections.deque[_Awaited] = collections.deque()

    def read_later(self, values: Tensor, tell: Callable[[list[float]], None]) -> None:
        """Have `collect` call `tell` with a few values, once the device has computed them."""
        if len(self._awaited) == _PLACES:  # the oldest place is used again
            self._await(self._awaited[0].number)
            self.collect()
        self._count += 1
        place = self._count % _PLACES * _PLACE_BYTES
        assert values.nbytes <= _PLACE_BYTES
        into = self._places[place : place + values.nbytes].view(values.dtype)
        into.copy_(values.reshape(-1), non_blocking=True)
        self._flags.raise_in_order(0, self._count)
        self._awaited.append(_Awaited(self._count, into, tell))

    def collect(self) -> None:
        """Tell of all values that are here. Does not block."""
        while self._awaited and self._flags.raised(0, self._awaited[0].number):
            found = self._awaited.popleft()
            found.tell(found.into.tolist())

    @property
    def awaits(self) -> bool:
        """Whether values are on their way."""
        return bool(self._awaited)

    def settle(self) -> None:
        """Wait until the device has done all that it was given: what reads from it does not block then."""
        self._count += 1
        self._flags.raise_in_order(0, self._count)
        self._await(self._count)
        self.collect()

    def _await(self, number: int) -> None:
        looked = time.monotonic()
        while not self._flags.raised(0, number):
            time.sleep(_LOOK_S)
            if time.monotonic() - looked > _CHECK_S:
                self._release_dead()
                looked = time.monotonic()
