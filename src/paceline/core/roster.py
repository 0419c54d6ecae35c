"""Roster: the processes that are attached as workers, and their last requests."""

from dataclasses import dataclass, field

from paceline.core.leases import Lease

__all__ = ["Roster"]


@dataclass
class Roster:
    """What is known of each worker's process. One owner."""

    incarnations: dict[int, int] = field(default_factory=dict)
    """Of the members."""
    team: set[int] = field(default_factory=set)
    """Workers (of groups: the roots) that the run trains with: also those that have ended their script or are
    being replaced, but not those that were told to leave. EASGD and ConSGD scale by their number."""
    requests: dict[int, int] = field(default_factory=dict)
    """Number of each worker's last request, where requests are numbered."""
    loads: dict[int, int] = field(default_factory=dict)
    """Number of each worker's last optimizer state that is in the order."""
    takes: dict[int, int] = field(default_factory=dict)
    """Number of each worker's last request for leases."""
    grants: dict[int, tuple[int, tuple[Lease, ...], bool]] = field(default_factory=dict)
    """Each worker's last answered request for leases: its number, the leases, whether the epoch is over."""
    keeping: set[int] = field(default_factory=set)
    """Workers whose last push wanted no parameters back."""

    def join(self, worker: int, incarnation: int) -> None:
        """A process attached, perhaps in another one's place."""
        self.incarnations[worker] = incarnation
        for numbers in (self.requests, self.takes, self.grants, self.loads):
            numbers.pop(worker, None)
        self.keeping.discard(worker)

    def leave(self, worker: int, incarnation: int) -> bool:
        """A process is gone. False: it was replaced already, and this is a late notice."""
        if self.incarnations.get(worker) != incarnation:
            return False
        del self.incarnations[worker]
        return True

    def load(self, worker: int, incarnation: int, number: int) -> bool:
        """A process gave an optimizer state. False: the order has it already, or the process is gone."""
        if self.incarnations.get(worker) != incarnation or self.loads.get(worker, -1) >= number:
            return False
        self.loads[worker] = number
        return True

    def fetches(self, worker: int, fetch: bool) -> None:
        """Whether a worker wants fresh parameters with the answer to its last push."""
        (self.keeping.discard if fetch else self.keeping.add)(worker)
