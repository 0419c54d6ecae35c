"""The run, as the stepper of a group's member sees it: see `GroupRun`."""

from paceline.worker.early_end import EarlyEnd
from paceline.worker.exchange.run_news import RunNews
from paceline.worker.part_saver import PartSaver
from paceline.worker.run_counts import RunCounts
from paceline.worker.traffic import Traffic

__all__ = ["GroupMember"]


class GroupMember:
    """Knows how far the run is, and passes on what the group's root says about it."""

    def __init__(
        self, news: RunNews, counts: RunCounts, saver: PartSaver, end: EarlyEnd, traffic: Traffic
    ) -> None:
        self._news = news
        self._end = end
        self.save_asked = saver.asked
        self.owe_save = saver.owe
        self.samples = counts.samples
        self.done = counts.done
        self.updated_together = counts.updated_together
        self.told_by_root = counts.told_by_root
        self.moved = traffic.moved_in_group
        self.end_early = end.agree

    def cut_next(self) -> int:
        """The version of a checkpoint that this step ends with, 0 if there is none."""
        return self._news.version + 1 if self._news.cut_next else 0

    def version(self) -> int:
        """The version that this member's parameters are of."""
        return self._news.version

    def stop_told(self) -> bool:
        """Whether the run ends early, as this member was told."""
        return self._end.known
