"""How far the run is, as the script and its schedulers see it."""

from collections.abc import Callable
from typing import Any

import torch

from paceline.core.modes import ModeSpec, parse_mode
from paceline.worker.epochs import EpochCounter
from paceline.worker.exchange.run_news import RunNews
from paceline.worker.loader import LeasedLoader, StreamLoader
from paceline.worker.resumption import Resumption
from paceline.worker.run_counts import RunCounts
from paceline.worker.run_progress import RunPlace, RunProgress, fraction_done
from paceline.worker.run_settings import RunSettings
from paceline.worker.script_state import KeptState

__all__ = ["TrainingView"]


class TrainingView:
    """Where the script is, and where the run is as far as this worker knows. Lives as long as the process.

    Schedulers follow it: see `ScheduleView`.
    """

    def __init__(self, settings: RunSettings, kept: KeptState) -> None:
        self._settings = settings
        self._kept = kept
        self.clock = 0
        """Number of steps that the script has made."""
        self.epoch = -1
        """The epoch that the script is in."""
        self.start = 0
        """The epoch that the run was in when this worker joined it."""
        self.loader: LeasedLoader | StreamLoader | None = None
        """The prepared one."""
        self.epochs: EpochCounter | None = None
        """Counts the script's epochs, if it uses `paceline.epochs`."""
        self.left_early = False
        """Whether the script has left a loop over its loader before the end."""
        self.schedulers: Callable[[], list[Any]] = list
        """The script's schedulers."""
        self.begun = False
        """Whether the script has asked for a batch, made a step or loaded a state."""
        self._mode = parse_mode(settings.mode)
        """The run's mode, as it was known before this worker joined."""
        self._news: RunNews | None = None
        self._counts: RunCounts | None = None
        self._resumption: Resumption | None = None

    def join(self, news: RunNews, counts: RunCounts, resumption: Resumption) -> None:
        """This worker is part of the run from now on."""
        self._news, self._counts, self._resumption = news, counts, resumption

    def leave(self) -> None:
        """This worker is no part of the run any more."""
        self._mode = self.mode
        self._news = self._counts = self._resumption = None

    def peeked(self, epoch: int) -> None:
        """The script only looked at a batch of this epoch, and will read it again."""
        self.epoch = epoch - 1
        if self._resumption is not None:
            self._resumption.peeked()

    @property
    def mode(self) -> ModeSpec:
        """The run's present mode."""
        return self._mode if self._news is None else self._news.mode

    @property
    def generator(self) -> torch.Generator | None:
        """Seeds the DataLoader's processes, if it is not torch's global one."""
        return None if self.loader is None else self.loader.own_generator

    def reached(self) -> tuple[int, int]:
        """Version and samples of the run that this worker's parameters have, as far as it knows."""
        return (0, 0) if self._counts is None else self._counts.reached()

    def progress(self) -> dict[str, int]:
        """How far the run is (updates and samples applied), and this worker's own steps."""
        if self._news is None:
            return {"version": 0, "clock": self.clock}
        last = self._news.last_admit
        known = {"version": self._news.version if last is None else last.version}
        if last is not None and last.samples is not None:
            known["samples"] = last.samples
        return {**known, "clock": self.clock}

    def run_progress(self) -> RunProgress | None:
        """See `paceline.progress`; None before this worker has joined."""
        if self._news is None:
            return None
        last = self._news.last_admit
        updates, samples = self.reached()
        planned = None if self.epochs is None else self.epochs.planned
        return RunProgress(
            updates=max(updates, 0 if last is None else last.version),
            samples=samples,
            epoch=max(self.epoch, self.start),
            fraction=fraction_done(self.place(), planned),
        )

    # --- for schedulers ---------------------------------------------------------------------------

    def place(self) -> RunPlace | None:
        """How far the run is in its data; None if it is not counted (a stream, no loader)."""
        loader = self.loader
        if self._counts is None or not isinstance(loader, LeasedLoader):
            return None
        if (done := self._counts.done()) is None:
            return None
        whole_batches = self.left_early or (self.mode.by_round and loader.drop_last)
        whole = loader.in_parts if whole_batches else loader.positions
        return RunPlace(done=done, whole=whole, batches=len(loader))

    def has_others(self) -> bool:
        """Whether there are other workers."""
        last = None if self._news is None else self._news.last_admit
        return self._settings.world_size > 1 or (last is not None and last.others)

    def follows(self) -> bool:
        """Whether the workers' steps are not the run's."""
        return not self.mode.by_round and self.has_others()

    def ahead(self) -> int | None:
        """Where workers count: how many steps a count may be ahead of what the run has told, None: any.

        A hybrid's group goes back to a checkpoint when a member dies, and hears of the run now and then only.
        """
        mode = self.mode
        if not self.has_others() or (mode.grouped and not mode.serverless):
            return None
        return mode.push_every + self._settings.transfer.prefetch + 1

    def skips(self, scheduler: Any) -> bool:
        """Whether the script is in an epoch that the run has finished, and the scheduler will be put back."""
        if self._resumption is None or not self._resumption.skipping:
            return False
        at = next((k for k, each in enumerate(self.schedulers()) if each is scheduler), None)
        return self._resumption.puts_back(at)

    def habits_known(self) -> None:
        """Workers that join later should hear how this script steps its schedulers."""
        self._kept.mark()
