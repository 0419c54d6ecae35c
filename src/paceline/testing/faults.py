"""Faults on purpose, for tests of how a program and its run take them.

```python
with faulty("kill worker:1@5; slow worker:0@1-20:50ms"):
    result = paceline.fit(task, workers=2)

with faulty(random_faults(seed=7, workers=4, steps=100, kinds=("kill", "stop"), count=3)):
    …
```

From a shell: `PACELINE_FAULTS="kill worker:1@5" paceline run …`, and there also `kill controller@100`, which
another one replaces (the controller of `fit` is your own process). All kinds: `paceline.comm.faults`.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence

from paceline.comm.faults import FAULTS, Fault, Faults
from paceline.testing.environment import environment

__all__ = ["Fault", "Faults", "faulty", "random_faults"]


@contextlib.contextmanager
def faulty(faults: Faults | str) -> Iterator[None]:
    """Runs that start in this block have these faults. It sets PACELINE_FAULTS: for one thread at a time."""
    with environment(FAULTS, str(Faults.parse(str(faults)))):
        yield


def random_faults(
    *,
    seed: int,
    workers: int,
    steps: int,
    kinds: Sequence[str] = ("kill",),
    count: int = 1,
    servers: int = 0,
    seconds: float = 0.5,
) -> Faults:
    """So many faults of these kinds, each in a role and at a step of its own; by the seed always the same.

    Args:
        steps: they happen within so many (of `full` and `slowdisk`: checkpoints).
        servers: how many servers may be hit, too, by those kinds that can hit them.
        seconds: how long a `stop`, a step of `slow` or a `delay` takes.
    """
    chance = random.Random(seed)
    by_workers = [("worker", rank) for rank in range(workers)]
    by_servers = [("server", rank) for rank in range(servers)]
    found = []
    for _ in range(count):
        kind = chance.choice(list(kinds))
        if kind in ("full", "slowdisk"):
            places = by_servers or [("server", 0)]
        else:
            places = by_workers + (by_servers if kind not in ("nan", "huge") else [])
        role, rank = chance.choice(places)
        step = chance.randint(1, steps)
        takes = kind in ("stop", "slow", "delay", "slowdisk")
        found.append(Fault(kind, role, rank, step, step, seconds if takes else 0.0))
    return Faults(tuple(found))
