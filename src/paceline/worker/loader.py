"""The user's DataLoader, fed by leases.

An epoch is one seeded order of the samples, the same on every worker; a lease is a range of positions in
it. The DataLoader itself (workers, collate, pinning) stays the user's. When a worker has used up what it
was granted it waits until the others have too, because a dead worker's leases come back to the pool: so
every sample is used exactly once an epoch, whoever dies.
"""

import collections
import contextlib
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
)

from paceline.exceptions import UsageError
from paceline.worker.exchange.entry import DataFacts
from paceline.worker.exchange.grants import Grant
from paceline.worker.orders import EpochOrders, Order, Ranges, seed_of
from paceline.worker.randomness import Apart, part_generator
from paceline.worker.whole_batches import WholeBatches, as_read
from paceline.worker.wrapped import Wrapped

__all__ = ["LeaseSource", "LeasedLoader", "StreamLoader", "data_facts", "lease_loader", "rebuilt"]

_TAKE = 8


class LeaseSource(Protocol):
    """Where leases come from and where used ones are noted."""

    def take(
        self,
        epoch: int,
        limit: int,
        *,
        wait: bool,
        give_back: Sequence[int],
        order: tuple[str, str] | None = None,
    ) -> Grant:
        """Leases, or the news that the epoch is over.

        Args:
            order: the fingerprint of the epoch's order and the name of the sampler that it was drawn from.
        """

    def used(self, lease: int | None, samples: int, *, counts: bool = True) -> None:
        """The script got a batch; the next step covers it. It may be another worker's, and not count."""

    def entering(self, epoch: int) -> None:
        """The script begins this epoch; nothing of it is read yet."""

    @property
    def steps(self) -> int:
        """Number of optimizer steps that the script has made."""

    def entered(self, epoch: int) -> None:
        """The script is in this epoch now; its first batch comes next, unless the epoch is over."""

    def back(self) -> None:
        """The script is through with a batch and asks for the next one."""

    def ended(self, epoch: int) -> None:
        """The script has read its last batch of this epoch, or there was none left for it."""

    def left(self, epoch: int, *, peek: bool) -> list[int]:
        """The script stopped reading before the epoch's end.

        Args:
            peek: it made no step since it began to read: it reads the same batches again.

        Returns:
            Leases to give back: of batches that the script got and did not train on.
        """

    def ends_early(self) -> bool:
        """Whether the loop ends here because the run ends early."""


def data_facts(loader: DataLoader[Any]) -> DataFacts:
    """What all workers must agree on about the data, as JSON.

    Raises:
        UsageError: the loader cannot be divided among workers.
    """
    if isinstance(loader.dataset, IterableDataset):
        return {"stream": True}
    if loader.batch_sampler is None:
        raise UsageError(
            "the DataLoader has batch_size=None; give it a batch_size so that batches can be leased."
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise UsageError(
            "the DataLoader has a DistributedSampler, which gives this worker a part of the data; paceline "
            "divides the data by itself, so that nothing is lost when a worker dies. Give the DataLoader "
            "shuffle=True or an ordinary sampler."
        )
    if loader.batch_size is None:  # the user's own batch sampler: its batches are what is leased
        return {"samples": _count(loader.batch_sampler), "batch_size": 1, "drop_last": False}
    samples = _count(loader.sampler)
    if samples == 0:
        raise UsageError("the DataLoader's data set is empty: nothing to train on.")
    return {"samples": samples, "batch_size": loader.batch_size, "drop_last": loader.drop_last}


def _count(sampler: Any) -> int:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        raise UsageError(
            f"{type(sampler).__name__}, the DataLoader's sampler, has no __len__: leases need to know how "
            "many draws an epoch has. Give it one, or make the data an IterableDataset."
        ) from None


def lease_loader(
    loader: DataLoader[Any],
    source: LeaseSource,
    *,
    seed: int,
    rank: int,
    world_size: int,
    group_start: int | None = None,
    version: int = 0,
) -> "LeasedLoader | StreamLoader":
    """The loader for one worker.

    Args:
        group_start: the lowest rank of the worker's group, in modes that have groups.
        version: the number of updates that the run had made when the worker joined.
    """
    if isinstance(loader.dataset, IterableDataset):
        start = rank if group_start is None else group_start
        return StreamLoader(loader, source, seed=seed, rank=rank, world_size=world_size, group_start=start)
    generator = part_generator(loader.generator, seed, rank, version)
    return LeasedLoader(loader, source, seed=seed, world_size=world_size, generator=generator)


class _Prepared(Wrapped):
    """Counts passes: each is the run's next epoch."""

    def __init__(self, loader: DataLoader[Any], source: LeaseSource) -> None:
        super().__init__(loader)
        self._source = source
        self.place: Callable[[Any], Any] | None = None
        """Moves a batch to the models' device; None leaves it where it is."""
        self._epoch = 0
        self._reading: weakref.ref[_Iteration] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return _Iteration(self)

    @property
    def next_epoch(self) -> int:
        """The epoch that the next pass over it reads."""
        return self._epoch

    def begin_with(self, epoch: int) -> None:
        """Have the next pass read this epoch, if it is a later one: those before it are finished."""
        self._epoch = max(self._epoch, epoch)

    def begin(self, iteration: "_Iteration") -> Iterator[Any]:
        """The batches of the next epoch. An iteration that has not ended, ends here."""
        before = self._reading() if self._reading is not None else None
        if before is not None:
            before.supersede()
        self._reading = weakref.ref(iteration)
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._batches_of(epoch, self._source.steps)

    def _batches_of(self, epoch: int, steps: int) -> Iterator[Any]:
        raise NotImplementedError

    def _leave(self, epoch: int, steps: int) -> tuple[bool, list[int]]:
        """The script stopped reading early. Without a step since, it was a peek: the epoch begins again.

        Returns:
            Whether it was a peek, and leases to give back.
        """
        peek = self._source.steps == steps
        if peek:
            self._epoch = epoch
        return peek, self._source.left(epoch, peek=peek)


class _Iteration:
    """One pass of a script over a prepared loader.

    It begins with the first `next()`, and ends the pass before it.
    """

    def __init__(self, loader: _Prepared) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._any = self._superseded = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._superseded:
            raise UsageError(
                "an iterator over the prepared loader was used after another one had begun. A prepared "
                "loader has one iterator at a time: use the newest, or iterate over the loader that was "
                "given to prepare()."
            )
        if self._batches is None:
            self._batches = self._loader.begin(self)
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._any:
                raise
            raise StopIteration(
                "the prepared loader has no batch in this epoch: the run has finished it already (it was "
                "resumed, or this worker was replaced), or other workers have taken all of them. To look "
                "at a batch, iterate over the loader that was given to prepare()."
            ) from None
        self._any = True
        return batch if self._loader.place is None else self._loader.place(batch)

    def supersede(self) -> None:
        """Another iteration begins."""
        self._superseded = True
        if isinstance(self._batches, Generator):
            self._batches.close()


class LeasedLoader(_Prepared):
    """Iterates over this worker's leases of one epoch after the other."""

    def __init__(
        self,
        loader: DataLoader[Any],
        source: LeaseSource,
        *,
        seed: int,
        world_size: int,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(loader, source)
        self.own_generator = generator
        """Seeds the DataLoader's processes; None: torch's global one does."""
        self._orders = EpochOrders(loader, seed)
        self._world_size = world_size
        self._granted: collections.deque[tuple[int, Ranges]] = collections.deque()
        self._issued: collections.deque[tuple[int, Ranges, int]] = collections.deque()
        self._handed: list[tuple[int, Ranges]] = []
        """Leases whose batches the script got since it began to read, until it makes a step."""
        self._unused: list[int] = []
        self._order: Order = lambda _: []
        self._inner = rebuilt(loader, _Batches(self._batches, self.__len__), generator)
        self._seal()

    def __len__(self) -> int:
        """Batches an epoch if all workers are equally fast."""
        return -(-len(self.loader) // self._world_size)

    @property
    def _batch(self) -> int:
        """Positions in the epoch's order that a batch takes."""
        return self.loader.batch_size or 1

    @property
    def positions(self) -> int:
        """Positions of an epoch's order that are read."""
        if self.loader.drop_last or self.loader.batch_size is None:
            return len(self.loader) * self._batch
        return len(self.loader.sampler)  # type: ignore[arg-type]

    @property
    def in_parts(self) -> int:
        """Positions that all workers' parts of an epoch have together, if all batches are whole ones."""
        return len(self) * self._world_size * self._batch

    def _batches_of(self, epoch: int, steps: int) -> Iterator[Any]:
        more = self._begin_epoch(epoch)
        self._source.entering(epoch)
        if self._source.ends_early():
            self._unused += [lease for lease, _ in self._granted]
            self._granted.clear()
            more = False
        if not more:
            # A resumed run may have turned the page already: the script was in this epoch all the same.
            self._source.entered(epoch)
            self._source.ended(epoch)
            return
        self._order = self._orders.of(epoch)
        entered = ended = False
        try:
            while True:
                inner: Iterator[Any] = iter(self._inner) if self._granted else iter(())
                if not entered:
                    self._source.entered(epoch)
                    entered = True
                for batch in inner:
                    lease, ranges, samples = self._issued.popleft()
                    if self._source.steps == steps:
                        self._handed.append((lease, ranges))
                    self._source.used(lease, samples)
                    yield batch
                    self._source.back()
                    if self._source.ends_early():
                        return
                if not self._take(epoch, wait=True):
                    ended = True
                    self._source.ended(epoch)
                    return
        finally:
            if not ended:
                self._stop(epoch, steps)
            self._handed.clear()

    def _stop(self, epoch: int, steps: int) -> None:
        """The script left its loop early: it gives back its leases, or reads them again after a peek."""
        peek, unused = self._leave(epoch, steps)
        ahead = [(lease, ranges) for lease, ranges, _ in self._issued]
        self._issued.clear()
        if peek:
            self._granted.extendleft(reversed([*self._handed, *ahead]))
            return
        self._unused += [*unused, *(lease for lease, _ in [*ahead, *self._granted])]
        self._granted.clear()

    def _begin_epoch(self, epoch: int) -> bool:
        """Get the first leases; False when the epoch is over."""
        if self._granted:  # after a peek
            return True
        if not self._orders.drawn:
            return self._take(epoch, wait=False)
        # A finished epoch is not worth drawing; and no lease is taken before all agree on the order.
        if not self._take(epoch, wait=False, limit=0):
            return False
        order = (self._orders.fingerprint(epoch), self._orders.name)
        return self._take(epoch, wait=False, order=order)

    def _take(
        self, epoch: int, *, wait: bool, limit: int = _TAKE, order: tuple[str, str] | None = None
    ) -> bool:
        """Get leases; False when the epoch is over."""
        unused, self._unused = self._unused, []
        grant = self._source.take(epoch, limit, wait=wait, give_back=unused, order=order)
        self._granted.extend(grant.leases)
        return not grant.over or bool(grant.leases)

    def _batches(self) -> Iterator[list[int]]:
        """What the inner DataLoader fetches: its indices, lease by lease."""
        while True:
            if not self._granted and not self._more():
                return
            lease, ranges = self._granted.popleft()
            indices = self._order(ranges)
            self._issued.append((lease, ranges, len(indices)))
            yield indices

    def _more(self) -> bool:
        return self._take(self._epoch - 1, wait=False) and bool(self._granted)


class _Batches(BatchSampler):
    """Hands a LeasedLoader's batches to the DataLoader inside it."""

    def __init__(self, batches: Callable[[], Iterator[list[int]]], length: Callable[[], int]) -> None:
        self._batches = batches
        self._length = length

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches()

    def __len__(self) -> int:
        return self._length()


class StreamLoader(_Prepared):
    """An IterableDataset's loader: worker r of w takes batches r, r+w, r+2w, …

    Streams have no positions to lease: after a death nobody takes over a part of a stream. Where the last
    batches of a stream reach only some workers of a group, the others get the last one, too, and it does not
    count for them: a group makes every step together.

    Several workers must see the same stream, so what it draws at random follows from the seed and the epoch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        source: LeaseSource,
        *,
        seed: int,
        rank: int,
        world_size: int,
        group_start: int,
    ) -> None:
        super().__init__(loader, source)
        self.own_generator = None  # of all workers alike
        self._seed = seed
        self._rank = rank
        self._group_start = group_start
        self._world_size = world_size
        self._seal()

    def __len__(self) -> int:
        """Batches of this worker's part."""
        return -(-(len(self.loader) - self._rank) // self._world_size)

    def _batches_of(self, epoch: int, steps: int) -> Iterator[Any]:
        over = self._source.take(epoch, 0, wait=False, give_back=()).over
        self._source.entering(epoch)
        self._source.entered(epoch)
        if over:
            self._source.ended(epoch)
            return
        last = 0
        ended = False
        try:
            alike = self._drawn_alike(epoch)
            with alike:
                numbered = enumerate(self.loader)
            batch = None
            while True:
                mine = False
                with alike:
                    for i, batch in numbered:  # noqa: B007 - a group's last one is wanted below
                        last = i % self._world_size
                        if mine := last == self._rank:
                            break
                if not mine:
                    break
                self._source.used(None, _length(batch))
                yield batch
                self._source.back()
                if self._source.ends_early():
                    return
            if self._group_start <= last < self._rank:
                self._source.used(None, 0, counts=False)
                yield batch
                self._source.back()
            ended = True
        finally:
            if not ended:
                self._leave(epoch, steps)
        self._source.take(epoch, 0, wait=True, give_back=())
        self._source.ended(epoch)

    def _drawn_alike(self, epoch: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._world_size == 1 else Apart(seed_of(self._seed, epoch))


def _length(batch: Any) -> int:
    """How many samples a batch has, as far as one can tell: the first dimension of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return _length(batch[0])
    return 0


def rebuilt(
    loader: DataLoader[Any], batches: BatchSampler, generator: torch.Generator | None
) -> DataLoader[Any]:
    """The same DataLoader with other batches, and this worker's generator."""
    whole = WholeBatches.of(loader)
    more: dict[str, Any] = {}
    if loader.num_workers > 0:
        more["prefetch_factor"] = loader.prefetch_factor
        more["persistent_workers"] = loader.persistent_workers
        more["multiprocessing_context"] = loader.multiprocessing_context
    return DataLoader(
        loader.dataset if whole is None else whole,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn if whole is None else as_read,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=generator,
        **more,
    )
