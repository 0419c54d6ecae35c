"""What became of workers' pushes: applied or not. Pure.

A worker that compresses with error feedback must know: a push that the servers did not apply (refused for its
norm, dropped because it came late) must leave no trace in what the worker pushes next.
"""

__all__ = ["Fates"]

_KEPT = 64
"""Number of pushes that were not applied and are remembered for a worker: more than it has on their way."""


class Fates:
    """The fates of all workers' pushes, by sequence number."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._open: dict[int, set[int]] = {}
        """Pushes that arrived and are not decided: they wait for a round, or are held for a quorum."""
        self._unapplied: dict[int, list[int]] = {}

    def begin(self, worker: int) -> None:
        """A worker joined: its sequence begins anew."""
        self._newest[worker], self._open[worker], self._unapplied[worker] = -1, set(), []

    def arrived(self, worker: int, sequence: int) -> None:
        """A push is here. One that came before changes nothing."""
        if sequence > self._newest.get(worker, -1):
            self._newest[worker] = sequence
            self._open.setdefault(worker, set()).add(sequence)

    def decided(self, worker: int, sequence: int, *, applied: bool) -> None:
        """An update has this push in it, or no update will. Only the first decision counts."""
        waiting = self._open.get(worker, set())
        if sequence in waiting:
            waiting.discard(sequence)
            if not applied:
                kept = self._unapplied.setdefault(worker, [])
                kept.append(sequence)
                del kept[:-_KEPT]

    def settled(self, worker: int) -> int:
        """All pushes up to this one are decided; -1 if none is."""
        waiting = self._open.get(worker)
        return min(waiting) - 1 if waiting else self._newest.get(worker, -1)

    def take_unapplied(self, worker: int) -> list[int]:
        """Pushes that were not applied, since the last call."""
        return self._unapplied.pop(worker, [])
