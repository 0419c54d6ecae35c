"""LimitedLines: lines of a log that strangers can cause, at a limited rate and with a count of the others."""

__all__ = ["LimitedLines"]


class LimitedLines:
    """Passes on the first lines, then one every so often, which says how many were left out before it.

    Args:
        first: number of lines that are passed on at once.
        every_s: seconds after which one more is.
    """

    def __init__(self, first: int = 100, every_s: float = 1.0) -> None:
        self._left = float(first)
        self._first = first
        self._every_s = every_s
        self._since: float | None = None
        self._left_out = 0

    def said(self, text: str, now: float) -> list[str]:
        """The line that is to be written, if one is."""
        if self._since is not None:
            self._left = min(float(self._first), self._left + (now - self._since) / self._every_s)
        self._since = now
        if self._left < 1:
            self._left_out += 1
            return []
        self._left -= 1
        left_out, self._left_out = self._left_out, 0
        return [f"{text} (and {left_out:,} more before it)" if left_out else text]
