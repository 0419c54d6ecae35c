"""RecentUpdates: how many versions the parameters of one optimizer gained since a worker read them.

Every update makes a version of the whole model. Where a script has several optimizers, an update changes the
parameters of one of them, and what a push of another one was computed from is as fresh as before.
"""

from dataclasses import dataclass, field

__all__ = ["RecentUpdates"]

_SEVERAL = -1
_REMEMBERED = 1024


@dataclass
class RecentUpdates:
    """Which optimizer the run's last updates were of.

    A few thousand updates are remembered. Older ones count for every optimizer.
    """

    stretches: list[tuple[int, int]] = field(default_factory=list)
    """Updates in a row of one optimizer: the version before the first of them, and which optimizer."""

    def made(self, before: int, optimizers: set[int]) -> None:
        """An update of these optimizers was made of the version `before` it."""
        optimizer = next(iter(optimizers)) if len(optimizers) == 1 else _SEVERAL
        if self.stretches and self.stretches[-1][1] == optimizer:
            return
        self.stretches.append((before, optimizer))
        if len(self.stretches) > 2 * _REMEMBERED:
            del self.stretches[:-_REMEMBERED]

    def staleness(self, read: int, now: int, optimizer: int) -> int:
        """Updates of an optimizer between the version that was read and the present one."""
        if read >= now:
            return now - read
        found, end = 0, now
        for start, of in reversed(self.stretches):
            if of in (optimizer, _SEVERAL):
                found += end - max(start, read)
            end = start
            if start <= read:
                return found
        return found + end - read
