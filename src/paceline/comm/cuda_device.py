"""CudaDevice: memory of an NVIDIA GPU that processes share, and flags that its streams raise and wait for.

NVIDIA's driver library is called directly (its interface is stable across releases), in the context that
torch uses. torch's own way to share CUDA tensors, and interprocess events, leave files in /dev/shm when a
process is killed. A handle here is 64 bytes, and the kernel frees everything with the process.

Flags are 32-bit words of a memfd that both processes map and register with the driver. A stream writes and
waits for them by itself (stream memory operations).
"""

import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.comm.device import FLAG_STRIDE, Flags
from paceline.comm.memory import Region
from paceline.exceptions import LinkError

__all__ = ["CudaDevice"]

_OUT_OF_MEMORY = 2
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_REGISTER_MAPPED = 2
_WAIT_GREATER_OR_EQUAL = 0
_GRANULE = 2 << 20
"""Smaller allocations may share a page of the device with others, and with it a handle."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


@functools.cache
def _driver() -> Any:
    """NVIDIA's library. LinkError if it is missing or too old."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        _ = library.cuStreamWaitValue32_v2, library.cuIpcOpenMemHandle_v2
    except (OSError, AttributeError) as error:
        raise LinkError(f"NVIDIA's driver cannot share a GPU between processes: {error}") from error
    return library


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        said = (text.value or b"unknown error").decode()
        raise LinkError(f"CUDA error: {what}: {said} (code {status})")


class _Raw:
    """Device memory as torch.as_tensor reads it. It lives as long as the tensor that is made of it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaBlock:
    """See DeviceBlock."""

    def __init__(
        self, address: int, nbytes: int, where: torch.device, handle: bytes, release: Callable[[int], None]
    ) -> None:
        self.memory: Tensor = torch.as_tensor(_Raw(address, nbytes), device=where)
        self.handle = handle
        self._address = address
        self._release: Callable[[int], None] | None = release

    def close(self) -> None:
        """See DeviceBlock."""
        if self._release is not None:
            self._release(self._address)
            self._release = None


def _mapped_for_ever(region: Region) -> ctypes.c_void_p:
    """One more mapping of a region, which holds no descriptor (one of Python's would)."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    found = library.mmap(None, region.size, prot, mmap.MAP_SHARED, region.fd, 0)
    if found == ctypes.c_void_p(-1).value:
        raise LinkError(f"memory for flags cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return ctypes.c_void_p(found)


class CudaFlags(Flags):
    """See Flags. The page is mapped once more for the driver, and stays so until the process ends: work that
    waits for its flags may be under way, and the driver, which does not notice unmapping, would refuse the
    next page at the same address."""

    def __init__(self, region: Region, where: torch.device) -> None:
        super().__init__(region)
        self._where = where
        self._bound = threading.local()
        """Threads in which torch's context is current: the driver takes a stream's work from no other."""
        host = _mapped_for_ever(region)
        runtime: Any = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(host.value, region.size, _REGISTER_MAPPED))
        if status:
            raise LinkError(f"CUDA error: memory for flags cannot be registered (code {status})")
        seen = ctypes.c_uint64()
        _check(_driver().cuMemHostGetDevicePointer_v2(ctypes.byref(seen), host, 0), "flags on the device")
        self._at = seen.value
        driver = _driver()
        self._write, self._wait = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2

    def raise_in_order(self, flag: int, value: int) -> None:
        """See Flags."""
        stream, at = self._stream(), ctypes.c_uint64(self._at + flag * FLAG_STRIDE)
        _check(self._write(stream, at, ctypes.c_uint32(value), 0), "a flag cannot be raised")

    def wait_in_order(self, flag: int, value: int) -> None:
        """See Flags."""
        stream, at = self._stream(), ctypes.c_uint64(self._at + flag * FLAG_STRIDE)
        status = self._wait(stream, at, ctypes.c_uint32(value), _WAIT_GREATER_OR_EQUAL)
        _check(status, "a flag cannot be waited for")

    def _stream(self) -> ctypes.c_void_p:
        if not getattr(self._bound, "done", False):
            # A new thread has no context until something of torch's runtime needs one there.
            torch.cuda.set_device(self._where)
            torch.cuda.current_stream(self._where).query()
            self._bound.done = True
        return ctypes.c_void_p(torch.cuda.current_stream(self._where).cuda_stream)


class CudaMark:
    """See Mark."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def follow(self) -> None:
        """See Mark."""
        self._event.wait()

    def wait(self) -> None:
        """See Mark."""
        self._event.synchronize()

    def reached(self) -> bool:
        """See Mark."""
        return bool(self._event.query())


class CudaQueue:
    """See WorkQueue."""

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._stream = torch.cuda.Stream(where)
        self._before: torch.cuda.Stream | None = None

    def __enter__(self) -> "CudaQueue":
        self._before = torch.cuda.current_stream(self._where)
        torch.cuda.set_stream(self._stream)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        torch.cuda.set_stream(self._before)

    def follow(self) -> None:
        """See WorkQueue."""
        self._stream.wait_stream(torch.cuda.current_stream(self._where))

    def wait_for(self, flags: Flags, flag: int, value: int) -> None:
        """See WorkQueue."""
        flags.wait_in_order(flag, value)

    def copy(self, to: Tensor, of: Tensor) -> None:
        """See WorkQueue."""
        to.copy_(of, non_blocking=True)

    def mark(self) -> CudaMark:
        """See WorkQueue."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaMark(event)


class CudaDevice:
    """See SharedDevice. Using it makes this process one that uses CUDA.

    Raises:
        LinkError: the driver cannot share memory between processes.
    """

    def __init__(self, where: torch.device) -> None:
        self.where = torch.empty(1, device=where).device  # with its number
        torch.cuda.set_device(self.where)
        torch.empty(1, device=self.where)  # makes torch's context the one of this thread
        self.id = self.id_of(self.where.index)
        self._driver = _driver()

    @staticmethod
    def id_of(index: int) -> str:
        """The name of a device by its number in this process."""
        return f"cuda:{torch.cuda.get_device_properties(index).uuid}"

    def allocate(self, nbytes: int) -> CudaBlock:
        """See SharedDevice."""
        size = ctypes.c_size_t(-(-nbytes // _GRANULE) * _GRANULE)
        address = ctypes.c_uint64()
        status = self._driver.cuMemAlloc_v2(ctypes.byref(address), size)
        if status == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            status = self._driver.cuMemAlloc_v2(ctypes.byref(address), size)
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {nbytes / 1e9:,.2f} GB are needed on {self.where}, "
                f"{self.free_bytes() / 1e9:,.2f} GB are left."
            )
        _check(status, f"{nbytes:,} bytes cannot be allocated")
        handle = _Handle()
        _check(self._driver.cuIpcGetMemHandle(ctypes.byref(handle), address), "memory cannot be shared")
        block = CudaBlock(address.value, nbytes, self.where, bytes(handle.bytes), self._free)
        block.memory.zero_()
        return block

    def open(self, handle: bytes, nbytes: int) -> CudaBlock:
        """See SharedDevice."""
        if len(handle) != _HANDLE_BYTES:
            raise LinkError(f"a handle of {len(handle)} bytes, expected {_HANDLE_BYTES}")
        given, address = _Handle(), ctypes.c_uint64()
        ctypes.memmove(ctypes.byref(given), handle, _HANDLE_BYTES)
        status = self._driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, _LAZY_PEER_ACCESS)
        _check(status, "the memory of another process cannot be opened")
        return CudaBlock(address.value, nbytes, self.where, handle, self._unmap)

    def flags(self, region: Region) -> CudaFlags:
        """See SharedDevice."""
        return CudaFlags(region, self.where)

    def queue(self) -> CudaQueue:
        """See SharedDevice."""
        return CudaQueue(self.where)

    def pin(self, memory: Tensor) -> None:
        """See SharedDevice."""
        runtime: Any = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0))
        if status:
            raise LinkError(f"CUDA error: memory of the host cannot be pinned (code {status})")

    def pinned(self, nbytes: int) -> Tensor:
        """See SharedDevice."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def free_bytes(self) -> int:
        """See SharedDevice."""
        return int(torch.cuda.mem_get_info(self.where)[0])

    def _free(self, address: int) -> None:
        _check(self._driver.cuMemFree_v2(ctypes.c_uint64(address)), "memory cannot be freed")

    def _unmap(self, address: int) -> None:
        _check(self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address)), "memory cannot be unmapped")
