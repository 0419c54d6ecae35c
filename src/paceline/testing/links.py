"""Links as they are between machines far apart, on one machine: latency and a limited rate.

```python
with slow_links(LinkConditions(latency_s=0.2, bits_per_s=100e6)):
    paceline.fit(task, workers=4, mode="asp")
```

From a shell: `PACELINE_LINK_CONDITIONS=latency=200ms,rate=100mbit paceline run …`.
"""

import contextlib
from collections.abc import Iterator

from paceline.comm.impairment import LINK_CONDITIONS, LinkConditions, impaired
from paceline.testing.environment import environment

__all__ = ["LinkConditions", "impaired", "slow_links"]


@contextlib.contextmanager
def slow_links(conditions: LinkConditions | str) -> Iterator[None]:
    """Runs that start in this block have these conditions on all links from workers to servers.

    Their workers reach the servers over TCP, on one host too. It sets PACELINE_LINK_CONDITIONS, so it is
    not for two threads at once, and an engine whose fork server runs already (KeptEngine) does not see it.
    """
    with environment(LINK_CONDITIONS, str(LinkConditions.parse(str(conditions)))):
        yield
