"""SliceTransfers: slices that change hands between servers, because a placement says so.

Before a server executes a PlaceStep it sends others the slices that it owned and that they lack. It executes
the step when all slices that it lacks itself have come.
"""

from typing import Generic, TypeVar

from paceline.core.placement import Placement

__all__ = ["SliceTransfers"]

T = TypeVar("T")


class SliceTransfers(Generic[T]):
    """One owner: a server, which has slices of type T."""

    def __init__(self) -> None:
        self._told = 0
        """Number of the last placement for which slices were sent to others."""
        self._arrived: dict[int, list[T]] = {}
        """Slices that others sent, by the number of the placement in which this server holds them."""

    def due(self, before: Placement, after: Placement, rank: int) -> list[tuple[int, list[int]]]:
        """Servers that lack slices in the next placement which this server owns now, and those slices. Each
        placement is asked about once; then the answer is empty."""
        if self._told >= after.number:
            return []
        self._told = after.number
        found = []
        for server in after.servers - {rank}:
            if slices := before.gains(after, server).get(rank):
                found.append((server, slices))
        return found

    def receive(self, number: int, slices: T) -> None:
        """Another server sent slices, for the placement of this number."""
        self._arrived.setdefault(number, []).append(slices)

    def complete(self, before: Placement, after: Placement, rank: int) -> bool:
        """Whether all slices that this server gains are here."""
        return len(self._arrived.get(after.number, ())) >= len(before.gains(after, rank))

    def take(self, number: int) -> list[T]:
        """What others sent for a placement."""
        return self._arrived.pop(number, [])
