"""How far the run is, as a worker knows: from the lead's answers, or from its group's root."""

from paceline.collective import Group
from paceline.worker.exchange.run_news import RunNews

__all__ = ["RunCounts"]


class RunCounts:
    """Updates and samples of the run since this worker joined.

    Args:
        counts_samples: the run counts samples, and not the batches of a sampler of the script's own.
    """

    def __init__(self, news: RunNews, group: Group | None, *, counts_samples: bool) -> None:
        self._news = news
        self._hears_run = group is None or group.is_root
        self._counts_samples = counts_samples
        self._samples = news.welcome.samples or 0
        """Samples of the run, as this worker was told last."""
        self._together = 0
        """Updates that its group has made by itself."""
        self._done = news.welcome.done

    def samples(self) -> int:
        """Samples of the run's updates so far."""
        last = self._news.last_admit
        return self._samples if last is None or last.samples is None else last.samples

    def done(self) -> int | None:
        """Samples of all epochs that are through; None if the run does not count them."""
        last = self._news.last_admit
        if self._hears_run and last is not None and last.done is not None:
            self._done = last.done
        return self._done  # a member is where its root is, also if it has heard more by itself

    def told_by_root(self, version: int, samples: int, done: int | None) -> None:
        """The group's root says how far the run is."""
        self._news.version = version
        self._samples = samples
        if done is not None:
            self._done = done

    def updated_together(self, samples: int) -> None:
        """Every member of the group has made the run's next update by itself, of so many samples."""
        self._together += 1
        self._samples += samples
        if self._done is not None and self._counts_samples:
            self._done += samples

    def reached(self) -> tuple[int, int]:
        """Version and samples of the run that this worker's parameters have, as far as it knows."""
        if self._news.mode.serverless:  # members other than the root hear nothing from the servers
            return (self._news.welcome.version or 0) + self._together, self._samples
        return self._news.version, self.samples()
