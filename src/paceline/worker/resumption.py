"""How a script that was started again gets back to where the run is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.worker.checkpoint_part import epoch_of, restore_rng, restore_schedulers
from paceline.worker.schedules import Schedules
from paceline.worker.script_state import KEY as SCRIPT
from paceline.worker.script_state import KeptState

__all__ = ["Resumption"]


class Resumption:
    """Of one worker, from when it joins until it is in an epoch of its own.

    Args:
        tensors: what the run gave this worker to start from.
        epoch: the epoch that the run is in.
        resumed: the run goes on from a checkpoint.
        replaced: this process takes the place of another one.
    """

    def __init__(self, tensors: dict[str, Tensor], epoch: int, *, resumed: bool, replaced: bool) -> None:
        self.replaying = resumed or replaced
        """Until the first step: what the script loads is older than what the run has."""
        self._epoch = epoch
        self._part = tensors if resumed else {}
        """This worker's part of the checkpoint, until it is put back."""
        self._skipping = epoch if resumed else None
        """Epochs before this one are finished."""
        self._went_on: tuple[int, dict[str, Tensor]] | None = None
        """From where this worker has gone on, until its first step."""
        self._kept_again = {k: v for k, v in tensors.items() if k.startswith(SCRIPT)}
        """The script's state, to be put back once more when the script is through with finished epochs."""

    @property
    def skipping(self) -> bool:
        """Whether the script has not come to an epoch that is left to do."""
        return self._skipping is not None

    def puts_back(self, scheduler: int | None) -> bool:
        """Whether the scheduler at this position will be put back."""
        return f"user:scheduler:{scheduler}" in self._part

    def put_back_script(self, kept: KeptState) -> None:
        """Give the script its state."""
        kept.put_back(self._kept_again)

    def script_skips(self) -> None:
        """The script leaves out finished epochs by itself, so they do not change its state."""
        self._kept_again = {}

    def enter(self, epoch: int, kept: KeptState) -> None:
        """The script has its first batch of this epoch."""
        if self._kept_again and epoch >= self._epoch:
            kept.put_back(self._kept_again)
            self._kept_again = {}

    def is_between_epochs(self, epoch: int) -> bool:
        """Whether the checkpoint was made before this epoch began."""
        return epoch_of(self._part) != epoch

    def go_on(
        self,
        epoch: int,
        schedules: Schedules,
        optimizers: Sequence[torch.optim.Optimizer],
        paces: list[dict[str, int]],
        generator: torch.Generator | None,
    ) -> None:
        """Put schedulers and random numbers back, once the script is in the epoch that the run is in."""
        if self._skipping is None or epoch < self._skipping:
            return
        self._went_on = (self._skipping, self._part)
        self._skipping = None
        restore_schedulers(self._part, schedules.each(), optimizers)
        schedules.put_back(paces)
        restore_rng(self._part, generator)
        self._part = {}

    def peeked(self) -> None:
        """The script only looked at a batch: random numbers that it drew meanwhile must not count."""
        if self._went_on is not None:
            self._skipping, self._part = self._went_on

    def step(self) -> None:
        """The script makes a step."""
        self.replaying, self._went_on = False, None
