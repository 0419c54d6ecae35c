"""HostMirror: gradients and parameters of a device travel to and from memory of the host slice by slice.

    backward ─► gradients ─► left ══► pushed ─► servers ─► fetched ══► parameters ─► forward
                 (device)  (device)   (host)                (host)      (device)
                                  ══ the mirror's own queue ══

A slice of the gradient leaves as soon as backward is through with it. A slice of the parameters comes as
soon as its server has raised the slice's flag; the layers before it compute meanwhile. The CPU waits once in
a step, for the last slice of the gradient.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from paceline.comm.device import Mark, SharedDevice
from paceline.params import Layout
from paceline.worker.exchange.early_slices import EarlySlices, slice_of
from paceline.worker.exchange.mirrored_link import MirroredLink
from paceline.worker.exchange.server_links import ServerLink

__all__ = ["HostMirror"]


class HostMirror:
    """Copies between a device and the memory that servers on its host see. The script's thread only.

    Args:
        links: to all servers; their carriers are MirroredLinks.
        gradients, parameters: bytes on the device.
        host: all memory that the servers see.
        pushed, fetched: its bytes for gradients and for parameters.
    """

    def __init__(
        self,
        device: SharedDevice,
        layout: Layout,
        links: Sequence[ServerLink],
        *,
        gradients: Tensor,
        parameters: Tensor,
        host: Tensor,
        pushed: Tensor,
        fetched: Tensor,
    ) -> None:
        self._layout = layout
        self._links = links
        self._gradients = gradients
        self._parameters = parameters
        self._pushed = pushed
        self._fetched = fetched
        self._left = torch.empty_like(gradients)
        """The slices that have left, as they were then."""
        self._queue = device.queue()
        self._early = EarlySlices(layout, self._leave)
        self._coming: dict[int, Mark] = {}
        """Slices of the parameters that the script's work has not waited for."""
        device.pin(host)  # all at once: a page is pinned once

    # --- gradients --------------------------------------------------------------------------------

    def watch(self) -> Callable[[int], None]:
        """Let slices leave during backward. Returns the function to call with each tensor that got its
        gradient."""
        return self._early.got

    def _leave(self, index: int) -> bool:
        left = slice_of(self._left, self._layout, index)
        left.copy_(slice_of(self._gradients, self._layout, index))
        self._queue.follow()
        with self._queue as queue:
            queue.copy(slice_of(self._pushed, self._layout, index), left)
        return True

    def push(self, slices: Collection[int]) -> None:
        """Have these slices of the gradient in the host's memory, as they are now; blocks until they are."""
        left = self._early.begin_anew() & set(slices)
        # A slice that changed since it left (a second backward, clipping) goes again.
        right = self._unchanged(left)
        self._early.judge(all_right=right == left)
        self._queue.follow()
        with self._queue as queue:
            for index in sorted(set(slices) - right):
                mine = slice_of(self._gradients, self._layout, index)
                queue.copy(slice_of(self._pushed, self._layout, index), mine)
        self._queue.mark().wait()

    def _unchanged(self, left: set[int]) -> set[int]:
        if len(left) == len(self._layout.slices) and _same(self._left, self._gradients):
            return left
        layout = self._layout
        return {
            i for i in left if _same(slice_of(self._left, layout, i), slice_of(self._gradients, layout, i))
        }

    # --- parameters -------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Have the parameters of the newest replies come, first slice first."""
        coming: list[tuple[int, MirroredLink]] = []
        for link in self._links:
            assert isinstance(link.carrier, MirroredLink)
            coming += [(piece.index, link.carrier) for piece in link.slices]
        self._queue.follow()  # work that reads the parameters of before
        with self._queue as queue:
            for index, carrier in sorted(coming, key=lambda each: each[0]):
                queue.wait_for(carrier.flags, index, carrier.replies)
                fetched = slice_of(self._fetched, self._layout, index)
                queue.copy(slice_of(self._parameters, self._layout, index), fetched)
                self._coming[index] = queue.mark()

    def need(self, slices: frozenset[int]) -> None:
        """Let the script's work that follows wait for these slices of the parameters."""
        if not self._coming:
            return
        for index in slices & self._coming.keys():
            self._coming.pop(index).follow()

    def need_all(self) -> None:
        """Let the script's work that follows wait for all parameters."""
        self.need(frozenset(self._coming))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two pieces of a device's memory hold the same bytes. Waits for the device."""
    if a.numel() % 4 == 0 and a.data_ptr() % 4 == 0 and b.data_ptr() % 4 == 0:
        a, b = a.view(torch.int32), b.view(torch.int32)
    return torch.equal(a, b)
