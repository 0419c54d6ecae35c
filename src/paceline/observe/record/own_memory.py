"""How much memory a process has of its own: its pages, and its part of those that it shares (PSS).

Roles are forks of a process that has torch loaded. Their resident size counts all of its pages in each of
them: 606 MB where 20 are a role's own. Linux tells the proportional size, but walks through all pages for it
(5 to 100 ms for a large process), so it is asked rarely; in between the resident size tells by how much a
process has grown.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

__all__ = ["OwnMemory", "read_pss"]

SHARE = 0.005
"""The part of the time that asking may take."""
ALLOWANCE_S = 0.1
"""What may be spent at once, also at the start."""

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def read_pss(pid: int) -> int:
    """Bytes. Raises OSError where the system does not tell."""
    found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    if found is None:
        raise OSError("no Pss in smaps_rollup")
    return 1024 * int(found[1])


@dataclass(frozen=True)
class _Asked:
    at: float
    pss: int
    rss: int
    """At that moment."""


class OwnMemory:
    """Estimates the proportional size of processes, one sample after the other.

    Args:
        read: asks the system; for tests.
        clock: in seconds; for tests.
    """

    def __init__(
        self, read: Callable[[int], int] = read_pss, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._read = read
        self._clock = clock
        self._asked: dict[int, _Asked] = {}
        self._left_s = ALLOWANCE_S
        self._seen: float | None = None
        self.unknown = False
        """Whether the system does not report the proportional size: then the resident size is used."""

    def of(self, resident: Mapping[int, int]) -> dict[int, int]:
        """Bytes of each process.

        Args:
            resident: their resident sizes, of all that are looked at.
        """
        now = self._clock()
        if self._seen is not None:
            self._left_s = min(ALLOWANCE_S, self._left_s + SHARE * (now - self._seen))
        self._seen = now
        self._asked = {pid: asked for pid, asked in self._asked.items() if pid in resident}
        # Those that were never asked first, then those whose answer is oldest.
        for pid in sorted(resident, key=lambda pid: self._asked[pid].at if pid in self._asked else -1.0):
            if self._left_s <= 0 or self.unknown:
                break
            self._ask(pid, resident[pid])
        if self.unknown:
            return dict(resident)
        return {pid: self._estimate(pid, rss) for pid, rss in resident.items()}

    def _ask(self, pid: int, rss: int) -> None:
        before = self._clock()
        try:
            self._asked[pid] = _Asked(before, self._read(pid), rss)
        except ProcessLookupError:
            pass  # it has just ended
        except OSError:  # also for a process that has just ended: then others have told
            self.unknown = not self._asked
        self._left_s -= self._clock() - before

    def _estimate(self, pid: int, rss: int) -> int:
        asked = self._asked.get(pid)
        if asked is not None:
            return min(rss, max(0, asked.pss + rss - asked.rss))
        # There was no time to ask: as the others.
        whole = sum(each.rss for each in self._asked.values())
        return round(rss * sum(each.pss for each in self._asked.values()) / whole) if whole else rss
