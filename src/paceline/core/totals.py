"""Totals: the counts of a run, and the record of an applied push."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.events import Push

__all__ = ["Applied", "Totals"]


class Applied(NamedTuple):
    """The record kept of every applied push."""

    version: int
    push: Push
    staleness: int
    """Versions that its optimizer's parameters gained since its worker read them."""


@dataclass
class Totals:
    """Counts of a run."""

    samples: int = 0
    pushes: int = 0
    dropped: int = 0
    dropped_of: Counter[int] = field(default_factory=Counter)
    """The same by worker."""
    refused: int = 0
    skipped: int = 0
    """Samples that scripts read and made no step with."""
    staleness: Counter[int] = field(default_factory=Counter)

    def drop(self, worker: int) -> None:
        """A push of this worker is not applied."""
        self.dropped += 1
        self.dropped_of[worker] += 1
