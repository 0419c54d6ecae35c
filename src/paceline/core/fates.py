"""What became of workers' pushes: applied or not. Pure.

A worker that compresses with error feedback must know: a push that the servers did not apply (refused for its
norm, dropped because it came late) must leave no trace in what the worker pushes next.
"""

from dataclasses import dataclass, field

__all__ = ["Fates"]

_KEPT = 64
"""Number of pushes that were not applied and are remembered for a worker: more than it has on their way."""


@dataclass
class Fates:
    """The fates of all workers' pushes, by sequence number."""

    newest: dict[int, int] = field(default_factory=dict)
    open: dict[int, set[int]] = field(default_factory=dict)
    """Pushes that arrived and are not decided: they wait for a round, or are held for a quorum."""
    unapplied: dict[int, list[int]] = field(default_factory=dict)
    """Pushes that were not applied, and of which their worker has not been told."""

    def begin(self, worker: int) -> None:
        """A worker joined: its sequence begins anew."""
        self.newest[worker], self.open[worker], self.unapplied[worker] = -1, set(), []

    def arrived(self, worker: int, sequence: int) -> None:
        """A push is here. One that came before changes nothing."""
        if sequence > self.newest.get(worker, -1):
            self.newest[worker] = sequence
            self.open.setdefault(worker, set()).add(sequence)

    def decided(self, worker: int, sequence: int, *, applied: bool) -> None:
        """An update has this push in it, or no update will. Only the first decision counts."""
        waiting = self.open.get(worker, set())
        if sequence in waiting:
            waiting.discard(sequence)
            if not applied:
                kept = self.unapplied.setdefault(worker, [])
                kept.append(sequence)
                del kept[:-_KEPT]

    def settled(self, worker: int) -> int:
        """All pushes up to this one are decided; -1 if none is."""
        waiting = self.open.get(worker)
        return min(waiting) - 1 if waiting else self.newest.get(worker, -1)

    def take_unapplied(self, worker: int) -> list[int]:
        """Pushes that were not applied, since the last call: their worker is told of them."""
        return self.unapplied.pop(worker, [])
