"""HostChoice: which host a role runs on. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from paceline.plan import Plan

__all__ = ["HostChoice", "LocalPlace"]


class LocalPlace(NamedTuple):
    """A worker among those of its host."""

    rank: int
    """LOCAL_RANK."""
    workers: int
    """LOCAL_WORLD_SIZE."""
    host: int
    """GROUP_RANK: number of the host."""


class HostChoice:
    """Roles stay where the plan has them, as long as that host is there; others go where there are the fewest
    of their kind."""

    def __init__(self, plan: Plan) -> None:
        self._hosts: dict[tuple[str, int], str] = {(role.role, role.rank): role.host for role in plan.roles}
        self._several = plan.job.hosts > 1
        self._known = list(dict.fromkeys(self._hosts.values()))

    def choose(self, role: str, rank: int, present: Sequence[str]) -> str:
        """The host of a role that starts now.

        Args:
            present: hosts that are there, the controller's own first.
        """
        host = self._hosts.get((role, rank))
        if host is None or host not in present:
            held = Counter(each for (kind, _), each in self._hosts.items() if kind == role)
            host = min(present, key=lambda each: (held[each], present.index(each)))
            self._hosts[role, rank] = host
        if host not in self._known:
            self._known.append(host)
        return host

    def num_workers(self, host: str) -> int:
        """Number of workers that have their place there."""
        return sum(kind == "worker" and each == host for (kind, _), each in self._hosts.items())

    def local_place(self, rank: int, workers: int) -> LocalPlace:
        """A worker's place on its host, after `choose`.

        Args:
            workers: number of workers of the run.
        """
        if not self._several:
            return LocalPlace(rank, workers, 0)
        host = self._hosts["worker", rank]
        mates = sorted(k for (kind, k), each in self._hosts.items() if kind == "worker" and each == host)
        return LocalPlace(mates.index(rank), len(mates), self._known.index(host))
