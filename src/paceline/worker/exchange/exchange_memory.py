"""The memory of a worker that servers on its host see, too."""

from collections.abc import Iterable

import torch

from paceline.comm import Region
from paceline.core.modes import ModeSpec
from paceline.params import Layout, Slice, bytes_of, flat_view

__all__ = ["ExchangeMemory"]


class ExchangeMemory:
    """What a worker pushes, its copy of the parameters, and its view of the servers' own memory.

    Args:
        shared: the servers' memory, if all of them are on this host.
        may_share: whether the worker may compute with the servers' memory, where the mode allows it.
    """

    checks_gradients = True
    """Whether the worker looks for NaN and Inf before it pushes. Otherwise the servers do."""

    def __init__(self, layout: Layout, shared: Region | None, *, may_share: bool) -> None:
        self.layout = layout
        self.region = Region.create(2 * layout.nbytes)
        """What is pushed, and behind it the copy of the parameters."""
        self.all_bytes = memory = torch.frombuffer(self.region.buffer, dtype=torch.uint8)
        self.gradients, self.copy = memory[: layout.nbytes], memory[layout.nbytes :]
        self.may_share = may_share and shared is not None
        self._shared = shared

    def in_place(self, mode: ModeSpec) -> bool:
        """Whether this worker reads the servers' memory in this mode."""
        return self.may_share and (mode.in_place or mode.needs_memory)

    def parameters(self, mode: ModeSpec) -> torch.Tensor:
        """The bytes of the parameters in this mode: the servers' memory, or this worker's copy."""
        if not self.in_place(mode):
            return self.copy
        assert self._shared is not None
        return torch.frombuffer(self._shared.buffer, dtype=torch.uint8)

    def outgoing(self, slices: Iterable[Slice]) -> list[memoryview]:
        """The bytes of these slices that are pushed."""
        return [bytes_of(flat_view(self.gradients, piece)) for piece in slices]

    def incoming(self, indices: Iterable[int]) -> list[memoryview]:
        """Where the parameters of these slices go."""
        return [bytes_of(flat_view(self.copy, self.layout.slices[i])) for i in indices]

    def private_pages(self, mode: ModeSpec) -> int:
        """Number of pages of the servers' memory that this worker has written to, in its own view only."""
        return self._shared.private_pages() if self.in_place(mode) and self._shared is not None else 0

    def forget_private_writes(self, mode: ModeSpec) -> None:
        """After an assign: see the servers' memory again where this worker wrote to its view of it."""
        if self.in_place(mode) and self._shared is not None:
            self._shared.forget_private_writes()
