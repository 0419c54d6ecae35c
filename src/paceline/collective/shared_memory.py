"""Members on one host: each averages a part of the gradient, in the memory of all of them."""

from collections.abc import Sequence

import torch

from paceline.collective.group_messages import GroupMessages
from paceline.collective.reducer import Reducer, is_finite, weighted_mean
from paceline.comm import Region
from paceline.exceptions import LinkError
from paceline.params import Layout, flat_view

__all__ = ["SharedMemoryReducer"]

_BLOCK = 1 << 18
"""Elements that are averaged at a time: they stay in the cache from the sum to the last copy. A multiple of
1,024, so that every element is computed as in the whole tensor (docs/decisions.md)."""


class SharedMemoryReducer(Reducer):
    """All members map each other's memory: each averages a part of the gradient, for everybody."""

    def __init__(self, group: GroupMessages, region: Region, layout: Layout) -> None:
        self._group = group
        self._others: dict[int, Region] = {}
        for rank in group.ranks:
            if rank == group.rank:
                self._show(region)
            else:
                self._others[rank] = self._see(rank, region.size)
        regions = [region if rank == group.rank else self._others[rank] for rank in group.ranks]
        half = layout.nbytes
        memories = [torch.frombuffer(r.buffer, dtype=torch.uint8) for r in regions]
        blocks = [
            block
            for piece in layout.slices
            for block in zip(
                *(flat_view(memory[:half], piece).split(_BLOCK) for memory in memories), strict=True
            )
        ]
        self._mine = blocks[group.place :: group.size]
        self._parameters, self._roots = memories[group.place][half:], memories[0][half:]

    def _show(self, region: Region) -> None:
        """Give the others this member's memory, through the root, which alone has links to all."""
        for rank in self._group.links:
            self._group.send(rank, {"of": self._group.rank}, [region.fd])

    def _see(self, rank: int, size: int) -> Region:
        """Map another member's memory; the root passes it on."""
        group = self._group
        frame = group.receive(rank if group.is_root else group.root)
        if frame.body.get("of") != rank or len(frame.descriptors) != 1:
            raise LinkError(f"{group.name}: expected the memory of worker:{rank}")
        region = Region.attach(frame.descriptors[0], size)
        if group.is_root:
            for other in group.links:
                if other != rank:
                    group.send(other, {"of": rank}, [region.fd])
        return region

    def mean(self, weights: Sequence[float]) -> bool:
        """Average this member's blocks into everybody's memory."""
        heavy = [i for i, weight in enumerate(weights) if weight]
        finite = True
        for block in self._mine:
            out = block[heavy[0]]
            weighted_mean(out, [block[i] for i in heavy], [weights[i] for i in heavy])
            finite = finite and is_finite(out)
            for i, other in enumerate(block):
                if i != heavy[0]:
                    other.copy_(out)
        return self._group.agree(finite)

    def share(self) -> None:
        """Copy the parameters out of the root's memory."""
        group = self._group
        if not group.is_root:
            self._parameters.copy_(self._roots)
            group.send(group.root, {})
            return
        # The script may write to the root's parameters next (load_state_dict), when all have copied them.
        for rank in group.ranks[1:]:
            group.receive(rank)

    def close(self) -> None:
        """Unmap the others' memory."""
        self._mine.clear()
        del self._parameters, self._roots
        for region in self._others.values():
            region.close()
