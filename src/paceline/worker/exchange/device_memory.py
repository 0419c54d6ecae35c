"""DeviceMemory: the memory on a device that a worker shares with its server."""

from collections.abc import Iterable

from torch import Tensor

from paceline.comm.device import DeviceBlock, SharedDevice
from paceline.core.modes import ModeSpec
from paceline.params import Layout, Slice

__all__ = ["DeviceMemory"]


class DeviceMemory:
    """What a worker pushes, its copy of the parameters, and the server's own parameters. See ExchangeMemory.

    The server has made all of it, and says where it is when the worker attaches.
    """

    may_share = True
    checks_gradients = False

    def __init__(self, layout: Layout, device: SharedDevice) -> None:
        self.layout = layout
        self.device = device
        self._blocks: dict[str, DeviceBlock] = {}

    def hear(self, **handles: str | None) -> None:
        """Open memory that a message names: `parameters`, `gradients`, `copy`."""
        for name, handle in handles.items():
            if handle is not None:
                self._blocks[name] = self.open(bytes.fromhex(handle))

    def open(self, handle: bytes) -> DeviceBlock:
        """Memory that the server has made."""
        return self.device.open(handle, self.layout.nbytes)

    @property
    def gradients(self) -> Tensor:
        """The bytes that are pushed."""
        return self._blocks["gradients"].memory

    @property
    def copy(self) -> Tensor:
        """The bytes of the copy of the parameters, in modes in which the worker has one."""
        return self._blocks["copy"].memory

    def in_place(self, mode: ModeSpec) -> bool:
        """Whether this worker reads the server's memory in this mode."""
        return mode.in_place or mode.needs_memory

    def parameters(self, mode: ModeSpec) -> Tensor:
        """The bytes of the parameters in this mode: the server's, or this worker's copy."""
        return self._blocks["parameters"].memory if self.in_place(mode) else self.copy

    def outgoing(self, slices: Iterable[Slice]) -> list[memoryview]:
        """Nothing travels."""
        return []

    def incoming(self, indices: Iterable[int]) -> list[memoryview]:
        """Nothing travels."""
        return []

    def private_pages(self, mode: ModeSpec) -> int:
        """A device's memory has no private pages: what a worker writes to it, all see."""
        return 0

    def forget_private_writes(self, mode: ModeSpec) -> None:
        """There are none."""
