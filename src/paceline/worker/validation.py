"""Validation data: each worker reads a part of all of it, as often as it likes.

No leases and no account: what is read here is not trained on. The parts of one pass are those of the workers
that begin it together (`paceline.gather`), so they are disjoint and make up the whole also after workers came
or left. In one order on all workers and in all passes; the first rank has the first part.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from paceline.exceptions import UsageError
from paceline.worker.loader import rebuilt
from paceline.worker.orders import EpochOrders, seed_of
from paceline.worker.randomness import Apart
from paceline.worker.wrapped import Wrapped

__all__ = ["ValidationLoader", "check_validation"]

Place = tuple[int, int]
"""Of a worker among those that read together: how many come before it, and how many there are."""


def check_validation(loader: Any) -> None:
    """Refuse what cannot be divided."""
    if isinstance(loader, Wrapped):
        raise UsageError(
            "prepare_validation() got a loader that is prepared already: give it the script's own."
        )
    if not isinstance(loader, DataLoader):
        raise UsageError(f"prepare_validation() got a {type(loader).__name__}; it takes DataLoaders.")
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "prepare_validation() got a DataLoader with batch_size=None; give it a batch_size, or iterate "
            "over it as it is."
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise UsageError(
            "prepare_validation() got a DataLoader with a DistributedSampler, which is a part of the data "
            "already. Leave the sampler out: paceline divides the data among the workers that are there."
        )


class ValidationLoader(Wrapped):
    """One worker's part of a loader's data.

    Args:
        planned: its place by the plan, for `len()`.
        find_place: says its place in a pass that begins. Called by all workers that read.
    """

    def __init__(
        self, loader: DataLoader[Any], *, seed: int, planned: Place, find_place: Callable[[], Place]
    ) -> None:
        check_validation(loader)
        super().__init__(loader)
        self.place: Callable[[Any], Any] | None = None
        """Moves a batch to the models' device; None leaves it where it is."""
        self._find_place = find_place
        self._planned = planned
        self._seed = seed
        self._part: _Part | None = None
        if not isinstance(loader.dataset, IterableDataset):
            self._part = _Part(loader, EpochOrders(loader, seed), planned)
            self._inner = rebuilt(loader, self._part, loader.generator)
        self._seal()

    def __len__(self) -> int:
        """Batches of its part, if all workers of the plan read."""
        before, readers = self._planned
        if self._part is not None:
            return self._part.batches_at(self._planned)
        return -(-(len(self.loader) - before) // readers)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        place = self._find_place()
        if self._part is None:
            batches = self._every(*place)
        else:
            self._part.place = place
            batches = iter(self._inner)
        return batches if self.place is None else map(self.place, batches)

    def _every(self, first: int, readers: int) -> Iterator[Any]:
        """Of a stream, every so manieth batch: all workers read all of it, and must see the same."""
        alike: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if readers > 1:
            alike = Apart(seed_of(self._seed, 0))
        with alike:
            numbered = enumerate(self.loader)
        while True:
            with alike:
                batch = next((batch for i, batch in numbered if i % readers == first), self)
            if batch is self:
                return
            yield batch


class _Part(BatchSampler):
    """The batches of a worker's part."""

    def __init__(self, loader: DataLoader[Any], orders: EpochOrders, place: Place) -> None:
        self.place = place
        self._orders = orders
        own = loader.batch_size is None  # the script's batch sampler: its batches are divided
        self._size = 1 if own or loader.batch_size is None else loader.batch_size
        self._count = len(loader.batch_sampler if own else loader.sampler)  # type: ignore[arg-type]
        if loader.drop_last and not own:
            self._count -= self._count % self._size

    def batches_at(self, place: Place) -> int:
        """How many batches the part at this place has."""
        start, stop = self._bounds(place)
        return -(-(stop - start) // self._size)

    def _bounds(self, place: Place) -> tuple[int, int]:
        before, readers = place
        return self._count * before // readers, self._count * (before + 1) // readers

    def __len__(self) -> int:
        return self.batches_at(self.place)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._orders.of(0)
        start, stop = self._bounds(self.place)
        for first in range(start, stop, self._size):
            yield order([(first, min(stop, first + self._size))])
