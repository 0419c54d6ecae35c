"""How a group divides a row: the samples that its members train on together in one step."""

from dataclasses import dataclass

__all__ = ["Part", "Ranges", "part_of"]

Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class Part:
    """A member's part of a row."""

    ranges: Ranges
    counts: bool
    """False: the row has fewer samples than the group has members, and this one reads another's along, so
    that it makes the step with the others. What it computes has no weight."""


def part_of(ranges: Ranges, members: int, place: int) -> Part:
    """The part of a row that the member at `place` of its group reads: even, lower ranks first."""
    samples = sum(stop - start for start, stop in ranges)
    each, extra = divmod(samples, members)
    first = place * each + min(place, extra)
    size = each + (place < extra)
    if not size:
        return Part(_cut(ranges, place % samples, 1), False)
    return Part(_cut(ranges, first, size), True)


def _cut(ranges: Ranges, first: int, size: int) -> Ranges:
    found: Ranges = []
    for start, stop in ranges:
        begin = start + first
        end = min(stop, begin + size)
        if begin < end:
            found.append((begin, end))
            size -= end - begin
        first = max(0, first - (stop - start))
    return found
