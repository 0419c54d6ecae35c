"""Which servers hold which slices.

Of the servers that hold a slice the first is its owner: it answers workers for it. The others hold a copy,
on which they execute the same order, so that any of them can become the owner at any step of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.layout import Layout, partition
from paceline.exceptions import FrameError

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """The holders of every slice, by its index, the owner first. Placements of a run are numbered."""

    number: int
    servers: frozenset[int]
    """All that take part; of a small model some may hold nothing."""
    holders: tuple[tuple[int, ...], ...]

    @classmethod
    def over(cls, layout: Layout, servers: Sequence[int], replicas: int, number: int = 0) -> "Placement":
        """Deal all slices to these servers, balanced by bytes; the next ones after an owner hold copies.

        The same servers always get the same slices, so who comes back gets what it had.
        """
        ranks = sorted(servers)
        copies = min(replicas, len(ranks) - 1)
        holders: list[tuple[int, ...]] = [()] * len(layout.slices)
        for i, shard in enumerate(partition(layout, len(ranks))):
            for piece in shard:
                holders[piece.index] = tuple(ranks[(i + j) % len(ranks)] for j in range(copies + 1))
        return cls(number, frozenset(ranks), tuple(holders))

    def owned(self, server: int) -> list[int]:
        """Slices that this server answers for."""
        return [i for i, each in enumerate(self.holders) if each[0] == server]

    def held(self, server: int) -> list[int]:
        """Slices that this server owns or has a copy of."""
        return [i for i, each in enumerate(self.holders) if server in each]

    def without(self, server: int) -> "Placement | None":
        """This server is gone: the next holder of each slice that it owned is its owner. None if a slice had
        no other holder."""
        holders = tuple(tuple(rank for rank in each if rank != server) for each in self.holders)
        return Placement(self.number + 1, self.servers - {server}, holders) if all(holders) else None

    def gains(self, new: "Placement", server: int) -> dict[int, list[int]]:
        """Slices that a server holds in a later placement and not in this one, by who owned them here."""
        found: dict[int, list[int]] = {}
        for i in set(new.held(server)) - set(self.held(server)):
            found.setdefault(self.holders[i][0], []).append(i)
        return {owner: sorted(slices) for owner, slices in found.items()}

    def to_json(self) -> list[Any]:
        """As plain JSON."""
        return [self.number, sorted(self.servers), [list(each) for each in self.holders]]

    @classmethod
    def from_json(cls, data: Any) -> "Placement":
        """The inverse of `to_json`; anything odd is a FrameError."""
        try:
            number, servers, holders = data
            placed = tuple(tuple(map(int, each)) for each in holders)
            found = cls(int(number), frozenset(map(int, servers)), placed)
        except (TypeError, ValueError) as error:
            raise FrameError(f"not a placement of slices: {error!r:.200}") from error
        if not all(each and found.servers.issuperset(each) for each in found.holders):
            raise FrameError("a placement of slices that nobody holds, or somebody who takes no part")
        return found
