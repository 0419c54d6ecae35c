"""The checkpoint that a run waits for when it finishes or stops."""

__all__ = ["AwaitedSave"]


class AwaitedSave:
    """Deadline and progress of that checkpoint. Every sign of progress extends the deadline.

    Args:
        patience_s: how long the servers may make no progress.
    """

    def __init__(self, patience_s: float) -> None:
        self._usual_s = patience_s
        self.patience_s = patience_s
        """The limit that counts now."""
        self._due: float | None = None
        self._parts: dict[int, tuple[int, int]] = {}
        """Bytes written and bytes to write, by server."""

    @property
    def awaited(self) -> bool:
        """Whether the run waits for a checkpoint."""
        return self._due is not None

    def ask(self, now: float, patience_s: float) -> None:
        """The lead was asked for it, and has this long to begin."""
        self.patience_s = patience_s
        self._due = now + patience_s
        self._parts.clear()

    def extend(self, now: float) -> None:
        """The servers make progress, or will be asked later."""
        self.patience_s = self._usual_s
        self._due = now + self.patience_s

    def progress(self, server: int, part: tuple[int, int], now: float) -> tuple[int, int] | None:
        """A server has written more of its part. Returns bytes written and bytes to write of all servers;
        None if there is no news, or the run does not wait."""
        if self._due is None or self._parts.get(server) == part:
            return None
        self._parts[server] = part
        self.extend(now)
        written, whole = zip(*self._parts.values(), strict=True)
        return sum(written), sum(whole)

    def overdue(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return self._due is not None and now > self._due

    def end(self) -> None:
        """It is written, or the run waits no longer."""
        self._due = None
