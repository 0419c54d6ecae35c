"""EpochLoader: what a library iterates over in the place of the script's DataLoader."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.exceptions import UsageError

__all__ = ["EpochLoader", "StopVote"]

_NO_LIMIT = 1 << 40
"""Epochs of a script that counts steps."""


class EpochLoader:
    """A DataLoader that is prepared later, when the library has made the optimizer.

    Every pass is an epoch of the run. A script that was started again, by `paceline resume` or in a dead
    worker's place, gets the passes that are left. When the run ends early, passes are empty.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.is_over = False
        """Whether no epoch is left."""
        self._prepared: DataLoader[Any] | None = None
        self._epochs: Iterator[int] = iter(())
        self._has_begun = False
        """Whether this worker has had a batch."""
        self._ahead: list[Any] = []
        self._batches: Iterator[Any] = iter(())

    @property
    def is_prepared(self) -> bool:
        """Whether this worker has joined the run."""
        return self._prepared is not None

    def prepare(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        epochs: int,
    ) -> None:
        """Join the run. The model and the optimizers are the library's own objects.

        Args:
            epochs: number of passes that the library makes; 0: it counts steps.
        """
        prepared = paceline.prepare(model, *optimizers, self.loader, *schedulers)
        self._prepared = cast("DataLoader[Any]", prepared[1 + len(optimizers)])
        self._epochs = iter(paceline.epochs(epochs or _NO_LIMIT))

    def __len__(self) -> int:
        """Batches an epoch, if all workers are equally fast."""
        if self._prepared is not None:
            return len(self._prepared)
        return -(-len(self.loader) // paceline.world_size())

    def __iter__(self) -> Iterator[Any]:
        if self._prepared is None:
            raise UsageError(
                "the loader is read before the library has prepared the model and the optimizer."
            )
        while not self._begin_pass(self._prepared):
            if self._has_begun or self.is_over:
                return
        self._has_begun = True
        while self.has_next():
            yield self._ahead.pop()

    def _begin_pass(self, loader: DataLoader[Any]) -> bool:
        """Begin the next epoch. False: this worker gets nothing of it. A script that was started again may
        find that the epoch which the run was in is complete."""
        self._ahead, self._batches = [], iter(())
        if next(self._epochs, None) is None:
            self.is_over = True
            return False
        self._batches = iter(loader)
        return self.has_next()

    def has_next(self) -> bool:
        """Read the next batch. False: the epoch is over. Only after the step with the batch before: whether
        there is a next one may depend on it."""
        if not self._ahead:
            self._ahead = list(itertools.islice(self._batches, 1))
        return bool(self._ahead)


class StopVote:
    """A library's early stop, as the run's: when one worker stops, all do.

    Workers vote once an epoch, when the next one begins; one that stops votes at its end.
    """

    def __init__(self) -> None:
        self._is_first = True
        self._is_cast = False

    def epoch_begins(self) -> bool:
        """Whether the run ends here."""
        if self._is_first:  # nobody has trained yet
            self._is_first = False
            return False
        self._is_cast = paceline.should_stop()
        return self._is_cast

    def training_ends(self, stopped: bool) -> None:
        """The library ends the training here; `stopped`: before its last epoch or step."""
        if stopped and not self._is_cast:
            self._is_cast = True
            paceline.should_stop(True)
