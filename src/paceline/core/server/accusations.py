"""Accusations: workers that cannot reach a server which the leader still sees.

Either the leader is about to notice that the server is gone, or the worker's link alone is broken. If the
leader has noticed nothing after a while, the server is given up: the worker cannot go on with it.
"""

from collections.abc import Set
from typing import NamedTuple

__all__ = ["ACCUSED_S", "Accusations"]

ACCUSED_S = 2.0
"""Seconds that a worker says that it has lost a server, before the leader gives that server up."""


class _Accusation(NamedTuple):
    servers: frozenset[int]
    fetch: bool
    """Whether the worker wants fresh parameters with its answer."""
    since: float


class Accusations:
    """One owner: the leader."""

    def __init__(self) -> None:
        self._by: dict[int, _Accusation] = {}

    def accuse(self, worker: int, servers: Set[int], now: float, *, fetch: bool) -> None:
        """A worker says that these servers are gone, and waits until the placement does without them."""
        self._by[worker] = _Accusation(frozenset(servers), fetch, now)

    def settle(self, servers: Set[int]) -> list[tuple[int, bool]]:
        """Workers that can be answered, because these servers hold all: (worker, whether it fetches)."""
        ready = sorted(worker for worker, each in self._by.items() if not each.servers & servers)
        return [(worker, self._by.pop(worker).fetch) for worker in ready]

    def overdue(self, now: float) -> set[int]:
        """Servers that are to be given up."""
        late = [each.servers for each in self._by.values() if now - each.since > ACCUSED_S]
        return set().union(*late)

    def left(self, worker: int) -> None:
        """A worker is gone."""
        self._by.pop(worker, None)
