"""ReaderSession: what the script's prepare() talks to in a process that evaluates."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.exceptions import UsageError
from paceline.reading.model_state import put_into
from paceline.reading.snapshots import Snapshot, SnapshotSource
from paceline.worker.alone import Session
from paceline.worker.prepared import Prepared

__all__ = ["Measured", "ReaderSession"]

Measured = Callable[[Snapshot, Mapping[str, float], float], None]
"""Called with a snapshot, the values that were measured, and the seconds that it took."""


class ReaderSession(Session):
    """Its prepare() evaluates one snapshot after the other, and ends the script.

    Args:
        workers: how many workers the run was planned with.
        every: number of updates between two evaluations; None: as the script says.
        measured: told of every evaluation.
        once: end after the first one.
    """

    def __init__(
        self,
        source: SnapshotSource,
        *,
        workers: int,
        every: int | None,
        measured: Measured,
        once: bool = False,
    ) -> None:
        super().__init__()
        self.rank = self.world_size = workers  # behind those of the workers: it is none of them
        self._source = source
        self._every = every
        self._measured = measured
        self._once = once
        self._objects: list[Any] = []
        self._calls = 0

    @property
    def is_main(self) -> bool:
        """See `paceline.is_main`."""
        return False

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Evaluate until there are no more snapshots, and end the script.

        A script may prepare in several calls: then only the last one evaluates.
        """
        if self.evaluation is None:
            raise UsageError(
                "the script has no evaluation: put @paceline.evaluation(every=200) over a function that "
                "takes the model and returns values by name, before paceline.prepare(…)."
            )
        self._objects += objects
        self._calls += 1
        every = 1 if self._once else self._every or self.evaluation.every
        snapshot = self._source.next(every, every)
        if snapshot is not None and snapshot.calls > self._calls:
            return list(objects)
        models = Prepared(self._objects).models
        last = None
        while snapshot is not None and snapshot.version != last:
            began = time.perf_counter()
            put_into(models, snapshot)
            values = self.evaluation.measure(models)
            last = snapshot.version
            self._measured(snapshot, values, time.perf_counter() - began)
            reached = self._source.tell(last, values)
            if self._once or snapshot.is_last:
                break
            # An evaluation that takes longer than the interval leaves versions out.
            snapshot = self._source.next(max(reached, last) + 1, every)
        raise SystemExit(0)
