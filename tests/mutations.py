"""Mutations of valid JSON values: other types, sizes, nesting and identities, by a seed."""

import copy
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["BAD_VALUES", "mutated", "places"]

BAD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -5, 99, 1 << 31, 1 << 62, 1 << 70, -(1 << 70), 10**400),
    *(0.0, -0.5, 1.5, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "0", "-1", "nan", "x", "x" * 5000, "a\0b", "½", "\x1b[2J", "../../etc/passwd", "bsp", "worker:5"),
    *([], [[]], [1], [-1], [1 << 70], ["x", "y"], [None], [[1], [2]], [{}], [0] * 1000, [True]),
    *({}, {"a": 1}, {"0": 0}, {"-1": {}}, {"x": [1]}, [{"lr": "x"}], [{"betas": ["x", "y"]}]),
)


def deep(levels: int) -> Any:
    """So many lists inside each other."""
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is something inside a value; the first few of a long list stand for all."""
    if at:
        yield at
    if len(at) > 12:
        return
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 4)):
            yield from places(value[index], (*at, index))


def mutated(value: Any, randoms: random.Random) -> Any:
    """A valid value with one to three things wrong."""
    found = copy.deepcopy(value)
    for _ in range(randoms.choice((1, 1, 1, 2, 3))):
        there = list(places(found))
        if not there:
            return copy.deepcopy(randoms.choice(BAD_VALUES))
        *path, last = randoms.choice(there)
        holder = found
        for key in path:
            holder = holder[key]
        what = randoms.randrange(8)
        if what == 0:
            del holder[last]
        elif what == 1 and isinstance(holder, dict):
            holder[randoms.choice(["x", "", "n", "rank", "sequence", str(last) * 2])] = copy.deepcopy(
                holder[last]
            )
        elif what == 2:
            holder[last] = [holder[last]]
        elif what == 3:
            holder[last] = deep(randoms.choice((3, 50, 400)))
        elif what == 4 and isinstance(holder[last], int) and not isinstance(holder[last], bool):
            holder[last] += randoms.choice((-1, 1, 10**6, -(10**6), 1 << 40))
        else:
            holder[last] = copy.deepcopy(randoms.choice(BAD_VALUES))
    return found
