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
        steps: they happen within so many.
        servers: how many servers may be hit, too, by those kinds that can hit them.
        seconds: how long a `stop` or a step of `slow` takes.
    """
    chance = random.Random(seed)
    places = [("worker", rank) for rank in range(workers)]
    found = []
    for _ in range(count):
        kind = chance.choice(list(kinds))
        more = [("server", rank) for rank in range(servers)] if kind in ("kill", "stop", "slow") else []
        role, rank = chance.choice(places + more)
        step = chance.randint(1, steps)
        found.append(Fault(kind, role, rank, step, step, seconds if kind in ("stop", "slow") else 0.0))
    return Faults(tuple(found))
