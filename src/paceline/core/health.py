"""Health of workers: which of them push NaN, Inf or absurd norms again and again while others do not.

One worker's alone are the fault of its process, its data or its device: it is replaced. All workers' are the
model's fault.
"""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

__all__ = ["QUARANTINE", "Health"]

QUARANTINE = 5
"""Number of pushes in a row that are not finite, while others' are, after which a worker is replaced."""
_WITH_OTHERS, _OF_LAST = 2, 10
"""If so many of the last pushes of another worker were not finite either, it is the model's fault."""


@dataclass
class Health:
    """What is known of the pushes of all workers. One owner."""

    refusals: Counter[int] = field(default_factory=Counter)
    """Pushes in a row that were not finite, by worker."""
    finite_lately: dict[int, list[bool]] = field(default_factory=dict)
    """Of workers with pushes that were not finite: whether their last ones were."""
    applied: Counter[int] = field(default_factory=Counter)
    """Pushes applied, by worker."""
    spoiled: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Pushes in a row in which servers found what their worker did not: how many, up to which push."""
    others_well: set[int] = field(default_factory=set)
    """Workers with refused pushes, since when another one had a finite push applied."""

    @property
    def begun(self) -> bool:
        """Whether a push was applied or refused."""
        return bool(self.applied or self.refusals)

    def push_applied(self, worker: int) -> None:
        """A finite push of this worker is in an update."""
        self.applied[worker] += 1
        if self.finite_lately:
            self._note_finite(worker)
        if self.refusals:
            self._recovered(worker)
            self.others_well.update(self.refusals)

    def push_refused(self, worker: int) -> bool:
        """A push was not finite, or absurd. Returns whether its worker is to be replaced."""
        self.refusals[worker] += 1
        self.finite_lately[worker] = [*self.finite_lately.get(worker, ()), False][-_OF_LAST:]
        if self.refusals[worker] < QUARANTINE or worker not in self.others_well:
            return False
        if any(self._is_ill(other) for other in self.finite_lately if other != worker):
            return False
        self._recovered(worker)
        del self.finite_lately[worker]
        return True

    def push_spoiled(self, worker: int, members: Set[int]) -> bool:
        """Servers found NaN or Inf in an applied push. Returns whether its worker is to be replaced."""
        count, last = self.spoiled.get(worker, (0, -1))
        at = self.applied[worker]
        count = count + 1 if at <= last + 1 else 1
        self.spoiled[worker] = (count, at)
        others = [n for other, (n, _) in self.spoiled.items() if other != worker]
        alone = max(others, default=0) < _WITH_OTHERS and bool(members - self.spoiled.keys())
        if count < QUARANTINE or not alone:
            return False
        del self.spoiled[worker]
        return True

    def _is_ill(self, worker: int) -> bool:
        """Whether several of a worker's last pushes were not finite."""
        return self.finite_lately[worker].count(False) >= _WITH_OTHERS

    def _note_finite(self, worker: int) -> None:
        if (lately := self.finite_lately.get(worker)) is not None:
            self.finite_lately[worker] = lately = [*lately, True][-_OF_LAST:]
            if all(lately):
                del self.finite_lately[worker]

    def _recovered(self, worker: int) -> None:
        del self.refusals[worker]
        self.others_well.discard(worker)
