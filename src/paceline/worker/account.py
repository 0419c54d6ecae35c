"""What became of the batches that a worker's script read: trained on, skipped, or still open.

A step covers the batches whose gradient is in it. The account learns that from three events: the script reads
a batch, a backward pass ends, gradients are zeroed.

    read ──backward──► trained ──step──► covered by a push
     │                  │   ▲
     │              zero_grad  backward (a second pass over the same batch)
     │                  ▼   │
     │                discarded ──the next batch is read, or a step──► skipped
     └── no backward until the next epoch begins, or the script ends ──► skipped

A backward pass belongs to the batch that was read last. If that one had its backward pass already, it belongs
to the one read before it, and so on: scripts read several batches and then train on each of them, and
wrappers read one batch ahead. After a step, and until the next batch is read, further backward passes (of a
second optimizer, say) belong to the batch that was covered.
"""

import threading
from dataclasses import dataclass
from enum import Enum, auto

from paceline.worker.exchange.sample_report import SampleReport

__all__ = ["Account"]


class _State(Enum):
    READ = auto()
    TRAINED = auto()
    DISCARDED = auto()
    SKIPPED = auto()


@dataclass(slots=True, eq=False)
class _Batch:
    lease: int | None
    samples: int
    borrowed: bool
    """In a group: another member computes the same samples and accounts for them."""
    iteration: int
    state: _State = _State.READ


class Account:
    """Leases and samples of the step in the making, and of the steps before it that no push has covered."""

    def __init__(self) -> None:
        self._open: list[_Batch] = []
        """Batches that no step has covered, in the order in which the script read them."""
        self._newest: _Batch | None = None
        """The batch that was read last, unless a step has covered it."""
        self._covered_newest = False
        """Whether a step was made since the last batch was read."""
        self._iteration = 0
        self._agreed: int | None = None
        self._unsent_leases: list[int] = []
        self._unsent_samples = 0
        # In a group: of rows with fewer samples than members, some members compute what others account for.
        self._borrowed: set[int] = set()
        self._refused: list[int] = []
        self._logged = 0
        self._logging = threading.Lock()  # a thread may push

    # --- what the script does -----------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """The script begins to iterate over the loader."""
        self._iteration += 1

    def used(self, lease: int | None, samples: int, *, counts: bool = True) -> None:
        """The script got a batch."""
        for batch in self._open:
            if batch.state is _State.DISCARDED or (
                batch.state is _State.READ and batch.iteration < self._iteration
            ):
                batch.state = _State.SKIPPED
        borrowed = not counts or lease in self._borrowed
        if borrowed:
            self._borrowed.discard(lease if lease is not None else -1)
        self._newest = _Batch(lease, 0 if borrowed else samples, borrowed, self._iteration)
        self._open.append(self._newest)
        self._covered_newest = False

    def read_all(self) -> None:
        """The loader has no more batches in this epoch. A wrapper that reads ahead still trains on one."""
        self._newest = None
        self._covered_newest = False

    def backward(self) -> None:
        """A backward pass has added to the gradients."""
        if self._covered_newest:
            return
        for batch in reversed(self._open):
            if batch.state in (_State.READ, _State.DISCARDED):
                batch.state = _State.TRAINED
                return

    def zeroed(self) -> None:
        """The gradients are gone, and no step was made with them."""
        for batch in self._open:
            if batch.state is _State.TRAINED:
                batch.state = _State.DISCARDED

    @property
    def accumulating(self) -> bool:
        """Whether a backward pass has added to gradients that no step has used yet."""
        return any(batch.state is _State.TRAINED for batch in self._open)

    def passed_over(self) -> int:
        """Batches before the last one that no step has covered and of which the run has not heard: the script
        skips them, or trains on them later."""
        return sum(b.state is not _State.TRAINED and b is not self._newest for b in self._open)

    # --- steps and pushes ---------------------------------------------------------------------------

    def end_step(self, *, keep: bool) -> None:
        """The step is made.

        Args:
            keep: for a later push; False where another member's pushes cover it.
        """
        leases, samples = self._take_step()
        if keep:
            self._unsent_leases += leases
            self._unsent_samples += samples

    def cover(self, *, this_step: bool) -> tuple[list[int], int]:
        """Leases and samples for a push, which are done with then.

        Args:
            this_step: with those of the step in the making.
        """
        leases, samples = self._unsent_leases, self._unsent_samples
        self._unsent_leases, self._unsent_samples = [], 0
        if this_step:
            more, count = self._take_step()
            leases, samples = leases + more, samples + count
        return leases, samples

    def all_leases(self) -> list[int]:
        """Those that no push has covered."""
        return [*self._unsent_leases, *_leases(self._open)]

    def open_leases(self) -> list[int]:
        """Those that no step has covered."""
        return _leases(self._open)

    def _in_step(self) -> list[_Batch]:
        """Batches behind the gradient: those with a backward pass, and the last one in any case, since a
        script may compute its gradient without one."""
        return [b for b in self._open if b.state is _State.TRAINED or b is self._newest]

    def _take_step(self) -> tuple[list[int], int]:
        batches = self._in_step()
        samples = sum(b.samples for b in batches) if self._agreed is None else self._agreed
        self._agreed = None
        for batch in batches:
            self._open.remove(batch)
        for batch in self._open:
            if batch.state is _State.DISCARDED:
                batch.state = _State.SKIPPED
        self._newest, self._covered_newest = None, True
        return _leases(batches), samples

    # --- what no step covers ------------------------------------------------------------------------

    def drop_open(self) -> list[int]:
        """Forget the batches that no step has covered; returns their leases."""
        dropped, self._open, self._newest = self._open, [], None
        return _leases(dropped)

    def drop_iteration(self) -> None:
        """Forget the batches of this iteration: the script only looked at them and will read them again."""
        for batch in self._open:
            if batch.iteration == self._iteration and batch.borrowed and batch.lease is not None:
                self._borrowed.add(batch.lease)
        self._open = [b for b in self._open if b.iteration < self._iteration]
        self._newest = None

    def drop_untrained(self) -> list[int]:
        """The script left its loop: forget the batches of this iteration that had no backward pass. Returns
        their leases."""
        dropped = [b for b in self._open if b.state is _State.READ and b.iteration == self._iteration]
        for batch in dropped:
            self._open.remove(batch)
        self._newest = None
        return _leases(dropped)

    def take_skipped(self, *, ending: bool = False) -> SampleReport:
        """Batches that no step will cover, to be told once.

        Args:
            ending: the script has ended, so no step comes any more.
        """
        found = [b for b in self._open if ending or b.state is _State.SKIPPED]
        for batch in found:
            self._open.remove(batch)
        return SampleReport(tuple(_leases(found)), sum(b.samples for b in found if b.lease is None))

    def take_refused(self) -> list[int]:
        """Leases of steps that a group did not make, to be told with a push."""
        refused, self._refused = self._refused, []
        return refused

    # --- without a prepared loader ----------------------------------------------------------------

    def log_samples(self, samples: int) -> None:
        """The script says that it has trained on so many."""
        with self._logging:
            self._logged += samples

    def take_logged(self) -> int:
        """Samples that the script has logged, to be told once."""
        with self._logging:
            logged, self._logged = self._logged, 0
        return logged

    # --- in a group -------------------------------------------------------------------------------

    def borrow(self, lease: int) -> None:
        """Its samples here are also another member's, who accounts for them."""
        self._borrowed.add(lease)

    def tally(self) -> tuple[int, bool]:
        """Samples of this member's step, and whether it counts at all."""
        batches = self._in_step()
        own = [b for b in batches if not b.borrowed]
        return sum(b.samples for b in own), bool(own) or not batches

    def agreed(self, samples: int) -> None:
        """So many samples went into the group's step."""
        self._agreed = samples

    def refuse(self) -> None:
        """The group's step was not finite, and is not made: its samples are told with the next push."""
        self._refused += self._take_step()[0]


def _leases(batches: list[_Batch]) -> list[int]:
    return [batch.lease for batch in batches if batch.lease is not None]
