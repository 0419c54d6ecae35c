"""PlacementChanges: servers that come and go, and the placement that follows.

A placement is a step of the order. Before one in which servers are new, workers are told of it: they connect
to the new servers, and send them what they will need. When all workers are ready, it is ordered. Slices then
change hands, and a server that leaves may end when it has given everything away and every worker knows.

    come ──knows the model──► plan ──every worker ready──► take_ready ──► ordered ──► settled
    leave ──────────────────► plan   …                                              ──► free to end
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from paceline.core.json_types import Json, JsonObject
from paceline.core.layout import Layout
from paceline.core.notes import Notes
from paceline.core.placement import Placement

__all__ = ["PlacementChange", "PlacementChanges"]


@dataclass
class PlacementChange:
    """A placement to come."""

    placement: Placement
    addresses: dict[int, JsonObject]
    """Of the servers that are new."""
    uninformed: set[int]
    """Workers that have not been told of it."""
    unready: set[int]
    """Workers that have not said that they are ready for it."""

    def to_json(self) -> Json:
        return [self.placement.to_json(), {str(rank): where for rank, where in self.addresses.items()}]


class PlacementChanges:
    """One owner: the leader.

    Args:
        replicas: number of copies of every slice.
    """

    def __init__(self, replicas: int) -> None:
        self.newcomers: dict[int, JsonObject] = {}
        """Servers that are not in the order yet, and where workers reach them."""
        self.adopted: set[int] = set()
        """Those of them that know the model."""
        self.departing: set[int] = set()
        """Servers that are to leave."""
        self.settling: set[int] = set()
        """Servers of which slices that change hands are not known to be where they should be."""
        self.departed: set[int] = set()
        """Servers that have given everything away, and that workers may still send to."""
        self.change: PlacementChange | None = None
        self.outdated: set[int] = set()
        """Workers that have not been told of the present placement."""
        self.highest = 0
        """The highest number that a placement was given."""
        self._replicas = replicas

    # Servers

    def gone(self, rank: int) -> None:
        """A server that was not in the order yet is gone."""
        self.newcomers.pop(rank, None)
        self.adopted.discard(rank)

    def target(self, latest: Placement) -> Set[int]:
        """The servers that should hold slices."""
        return (latest.servers | self.adopted) - self.departing

    def complete(self, placement: Placement) -> bool:
        """Whether every slice has as many copies as there can be."""
        copies = min(self._replicas, len(placement.servers) - 1)
        return all(len(holders) == copies + 1 for holders in placement.holders)

    def needed(self, latest: Placement) -> bool:
        """Whether slices should change hands. If not, a change that was planned is given up."""
        if self.target(latest) == latest.servers and self.complete(latest):
            self.change = None
            return False
        return True

    def plan(self, layout: Layout, latest: Placement, workers: Iterable[int]) -> None:
        """Plan a placement over the servers that there are now; in place of one that was planned before."""
        servers = self.target(latest)
        self.highest = number = max(latest.number, self.highest) + 1
        placement = Placement.over(layout, sorted(servers), self._replicas, number)
        if placement.holders == latest.holders and servers == latest.servers:
            self.change = None
            return
        addresses = {rank: where for rank, where in self.newcomers.items() if rank in servers}
        self.change = PlacementChange(placement, addresses, set(workers), set(workers))

    def take_ready(self, workers: Set[int]) -> PlacementChange | None:
        """The planned change, if all workers that are here are ready for it: it is to be ordered now."""
        change = self.change
        if change is None or change.unready & workers:
            return None
        self.change = None
        for rank in change.addresses:
            self.gone(rank)
        return change

    def placed(self, rank: int, *, leaves: bool) -> bool:
        """A server has all its slices of the latest placement. Returns whether it was the last one."""
        if leaves:
            self.departed.add(rank)
        if rank not in self.settling:
            return False
        self.settling.discard(rank)
        return not self.settling

    def release_idle(self, latest: Placement) -> list[int]:
        """Servers that are to leave and are in no placement: they have come only now, or an earlier leader
        has ordered a placement without them. There is nothing that they could give away."""
        idle = sorted(self.departing - latest.servers)
        for rank in idle:
            self.departing.discard(rank)
            self.gone(rank)
            self.departed.add(rank)
        return idle

    def free_to_end(self, workers: Set[int], speaks: Callable[[int], bool]) -> list[int]:
        """Servers that hold nothing, once every worker has been told to do without them."""
        if any(speaks(worker) for worker in self.outdated & workers):
            return []
        return sorted(self.departed)

    # Workers

    def attached(self, worker: int) -> Json:
        """A worker attaches, and is told of the present placement. Returns the next one, if there is one."""
        self.outdated.discard(worker)
        if self.change is None:
            return None
        self.change.unready.add(worker)
        self.change.uninformed.discard(worker)
        return self.change.to_json()

    def ready(self, worker: int, number: int | None) -> bool:
        """A worker says that it is ready for a placement. Returns whether it is the planned one."""
        if self.change is None or number != self.change.placement.number:
            return False
        self.change.unready.discard(worker)
        return True

    def left(self, worker: int) -> None:
        """A worker is gone: it is not waited for."""
        if self.change is not None:
            self.change.unready.discard(worker)

    def inform(self, worker: int, present: Placement, notes: Notes) -> None:
        """With a reply that a worker gets anyway, tell it of the next and of the present placement."""
        if self.change is not None and worker in self.change.uninformed:
            self.change.uninformed.discard(worker)
            notes["next"] = self.change.to_json()
        if worker in self.outdated:
            self.outdated.discard(worker)
            notes["placement"] = present.to_json()
