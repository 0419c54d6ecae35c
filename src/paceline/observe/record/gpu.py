"""What an NVIDIA GPU is doing, from its driver's own library (NVML), without a package for it."""

import ctypes
import os
from dataclasses import dataclass
from typing import Any

__all__ = ["GpuUsage", "Gpus"]

LIBRARY = "libnvidia-ml.so.1"
"""It comes with the driver."""


@dataclass(frozen=True)
class GpuUsage:
    """All GPUs of a host that this process may use."""

    share: float
    """Of the time in which they computed, 0 to 1; their mean."""
    memory: int
    """Sum of the bytes in use, by all processes of the host."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _GpuMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpus:
    """Asks the driver. Without one, or when it fails, there is nothing to tell, and that is no error.

    Args:
        library: NVML, for tests; the driver's unless given.
    """

    def __init__(self, library: Any = None) -> None:
        self._library: Any = None
        self._devices: list[ctypes.c_void_p] = []
        try:
            self._library = library if library is not None else ctypes.CDLL(LIBRARY)
            if self._library.nvmlInit_v2() == 0:
                self._devices = self._find()
        except (OSError, AttributeError):  # no driver, or one that is too old
            self._devices = []

    @property
    def count(self) -> int:
        """How many there are to ask."""
        return len(self._devices)

    def usage(self) -> GpuUsage | None:
        """As of now; None without a GPU that answers."""
        shares, memory = [], 0
        for device in self._devices:
            utilization, used = _Utilization(), _GpuMemory()
            if self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(utilization)) == 0:
                shares.append(utilization.gpu / 100)
            if self._library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(used)) == 0:
                memory += used.used
        return GpuUsage(sum(shares) / len(shares), memory) if shares else None

    def close(self) -> None:
        """Let go of the driver."""
        if self._devices:
            self._devices = []
            self._library.nvmlShutdown()

    def _find(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        found = []
        for index in _visible(count.value):
            device = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0:
                found.append(device)
        return found


def _visible(count: int) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES names by number; all if it says nothing, or by other names."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(count))
    try:
        numbers = [int(each) for each in chosen.split(",") if each.strip()]
    except ValueError:
        return list(range(count))
    found: list[int] = []
    for number in numbers:
        if not 0 <= number < count:  # as CUDA does: what follows is not seen
            break
        found.append(number)
    return found
