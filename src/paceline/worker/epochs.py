"""`paceline.epochs(10)`: the epochs that a script has left to do.

An epoch is one pass over the prepared loader. The lead knows which one the run is in; a script that was
started again, by a resume or in a dead worker's place, begins there.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from paceline.core.modes import ModeSpec
from paceline.exceptions import UsageError
from paceline.worker.exchange.entry import DataFacts
from paceline.worker.script_state import KeptState

__all__ = ["EpochCounter", "RemainingEpochs", "check_has_epochs"]

log = logging.getLogger("paceline.worker")


class Passes(Protocol):
    """A prepared loader, which counts its passes."""

    @property
    def next_epoch(self) -> int:
        """The epoch that the next pass reads."""

    def begin_with(self, epoch: int) -> None:
        """Have the next pass read this epoch, if it is a later one."""


class RemainingEpochs:
    """Numbers of epochs, as from `range`; fewer if the run ends early.

    Args:
        begin: called before each; False ends the loop.
    """

    def __init__(self, left: range, begin: Callable[[int], bool] = lambda _: True) -> None:
        self._left = left
        self._begin = begin

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[int]:
        for number in self._left:
            if not self._begin(number):
                return
            yield number


class EpochCounter:
    """Knows which epochs are left, of all loops of a script over `paceline.epochs`, one after the other.

    Args:
        start: the epoch that the run is in; only where there is a loader.
        loader: the prepared one. Without one, epochs are counted here and kept with the script's state.
        ended: whether the run ends early.
    """

    def __init__(
        self, start: int, loader: Passes | None, kept: KeptState, *, ended: Callable[[], bool]
    ) -> None:
        self._start = start
        self._loader = loader
        self._kept = kept
        self._ended = ended
        self._position = kept.epoch
        self._base = 0
        """The epoch of the run that the present loop's epoch 0 is."""
        self._count = 0
        self._warned = False

    @property
    def planned(self) -> int:
        """How many epochs there are, as far as the script has said, with those before its present loop."""
        return self._base + self._count

    def loop(self, count: int) -> RemainingEpochs:
        """Another loop of so many epochs; what is left of it."""
        done = self._done()
        self._base = min(self._base + self._count, max(done, self._base))
        self._count = count
        base, first = self._base, min(max(done - self._base, 0), count)

        def begin(number: int) -> bool:
            if self._ended():
                return False
            self._begin(base + number, first=number == first)
            return True

        return RemainingEpochs(range(first, count), begin)

    def _done(self) -> int:
        """Epochs that are finished."""
        return self._position if self._loader is None else max(self._start, self._loader.next_epoch)

    def _begin(self, epoch: int, *, first: bool) -> None:
        if self._loader is None:
            self._kept.begin_epoch(epoch)
            self._position = epoch + 1
        elif first:
            self._loader.begin_with(epoch)
        elif self._loader.next_epoch != epoch and not self._warned:
            self._warned = True
            log.warning(
                "paceline.epochs() counts passes over the prepared loader, and the script has made %s of "
                "them in %s epochs: a resume would begin with another epoch. Make one pass in each.",
                self._loader.next_epoch,
                epoch,
            )


def check_has_epochs(mode: ModeSpec, data: DataFacts | None) -> None:
    """Modes that deal out the samples of an epoch need to know them."""
    if data is None or "samples" not in data:
        problem = (
            "prepare() got no DataLoader: pass it the training loader"
            if data is None
            else "an IterableDataset has no length: use a map-style data set"
        )
        does = (
            "makes one step of the gradient of a whole epoch" if mode.by_epoch else "deals batches by speed"
        )
        raise UsageError(f"mode {mode} {does}, and {problem}, or use a mode such as bsp or asp.")
