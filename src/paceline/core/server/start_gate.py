"""StartGate: what the run's first step waits for: all servers, the model on each of them, all workers.

    servers connect ──all here──► the model is handed out ──adopted by all──► workers are answered, and attach
                                                            all workers attached ──► open

The first step waits for all planned workers, so that a run is repeatable. The gate never closes again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["EarlyRequests", "StartGate"]


@dataclass
class EarlyRequests:
    """What the controller asked for before the gate was open. It waits until then."""

    switch: tuple[str, str] | None = None
    """Another mode, and the request for it."""
    end: str | None = None
    """Why the run is to end early."""
    departing: set[int] = field(default_factory=set)
    """Servers that are to leave."""


class StartGate:
    """One owner: the leader.

    Args:
        workers: number of workers that the run begins with.
        open: the run has begun already, under another leader.
        early: kept from the gate of a model that was given up.
    """

    def __init__(self, workers: int, *, open: bool = False, early: EarlyRequests | None = None) -> None:
        self.open = open
        self.early = early or EarlyRequests()
        self._workers = workers
        self._waiting: set[int] = set()
        """Attached workers, while the gate is closed."""
        self._adopting: set[int] | None = set() if open else None
        """Followers that do not hold the model yet; None: it has not been handed out."""
        self._since: float | None = None
        """When the first worker came."""

    @property
    def model_everywhere(self) -> bool:
        """Whether all servers hold the model: only then may workers attach."""
        return self._adopting is not None and not self._adopting

    def hand_out(self, followers: Iterable[int]) -> None:
        """These followers are sent the model."""
        self._adopting = set(followers)

    def adopted(self, follower: int) -> None:
        """A follower holds the model."""
        if self._adopting is not None:
            self._adopting.discard(follower)

    def came(self, now: float) -> None:
        """A worker offers its model, or attaches: from now on others are waited for."""
        if self._since is None:
            self._since = now

    def attached(self, worker: int) -> bool:
        """A worker attached. Returns whether it was the last one: the gate is open now."""
        self._waiting.add(worker)
        self.open = len(self._waiting) == self._workers
        return self.open

    def left(self, worker: int) -> None:
        """A worker is gone."""
        self._waiting.discard(worker)

    def late(self, now: float, limit_s: float, offering: set[int]) -> list[int]:
        """Workers that the others have waited for longer than the limit; none once the gate is open.

        Args:
            offering: workers that have offered their model and wait for an answer.
        """
        if self.open or self._since is None or now - self._since <= limit_s:
            return []
        return sorted(set(range(self._workers)) - self._waiting - offering)
