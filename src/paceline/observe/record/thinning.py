"""Which records of an endless stream are kept in a file of bounded size. Pure: by a record's number alone.

The first half of the file holds every record; the next quarter every 8th, the next eighth every 64th, and so
on. A resumed run, or another lead, goes on with a file: it knows from numbers alone what is in it.
"""

import functools
import itertools
from collections.abc import Sequence

__all__ = ["BYTES_OF_PUSH", "BYTES_OF_VALUE", "Thinning", "ValueThinning", "pushes_thinning", "value_rows"]

_COARSER = 8
BYTES_OF_PUSH = 40
BYTES_OF_VALUE = 48
"""Of one record, about."""


class Thinning:
    """Keeps at most `rows` of however many records.

    Args:
        rows: at least 2.
    """

    def __init__(self, rows: int) -> None:
        self.rows = max(2, rows)
        parts = list(itertools.takewhile(bool, (self.rows >> (k + 1) for k in itertools.count())))
        self._strides: list[int] = [_COARSER**k for k in range(len(parts))]
        self._first_rows = [0, *itertools.accumulate(parts)]
        """Row with which each part begins."""
        self._first_records = [
            0,
            *itertools.accumulate(rows * stride for rows, stride in zip(parts, self._strides, strict=True)),
        ]
        """Number of the record with which each part begins."""

    def rows_of(self, records: int) -> int:
        """How many of the first `records` records are kept."""
        for part, stride in enumerate(self._strides):
            begin, end = self._first_records[part : part + 2]
            if records <= end:
                return self._first_rows[part] + -(-max(0, records - begin) // stride)
        return self._first_rows[-1]

    def kept(self, number: int) -> bool:
        """Whether the record of this number, counted from 0, is kept."""
        return self.rows_of(number + 1) > self.rows_of(number)

    def weights(self, rows: int) -> Sequence[int]:
        """How many records each of the first `rows` rows stands for."""
        found: list[int] = []
        for part, stride in enumerate(self._strides):
            begin, end = self._first_rows[part : part + 2]
            found += [stride] * max(0, min(rows, end) - begin)
        return found


@functools.cache
def pushes_thinning(records_mb: int) -> Thinning:
    """Of pushes.csv, which may have half of a run's budget for records."""
    return Thinning(records_mb * 500_000 // BYTES_OF_PUSH)


class ValueThinning:
    """Which of a worker's logged values are kept: at most `rows`. The `first` half has all values. After
    that a name keeps its next few (a 16th), then every 8th of its values, then every 64th, and so on.

    So a name with few values (a test loss once an epoch) keeps all of them beside one with many.
    """

    def __init__(self, rows: int) -> None:
        rows = max(2, rows)
        self.first = rows // 2
        self._left = rows - self.first
        self._few = rows // 16
        self._counts: dict[int, int] = {}
        self._stride = _COARSER
        self._coarser_at = self._left // 2
        """Rows left at which the stride grows."""

    def keep(self, name: int) -> bool:
        """Whether the next value of this name is kept. Not asked for the first values."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if not self._left or (count >= self._few and count % self._stride):
            return False
        self._left -= 1
        if self._left <= self._coarser_at:
            self._stride *= _COARSER
            self._coarser_at //= 2
        return True


def value_rows(records_mb: int, workers: int) -> int:
    """The most values that one of the workers may keep: all have a quarter of a run's budget for records."""
    return records_mb * 250_000 // (BYTES_OF_VALUE * max(1, workers))
