"""The order of an epoch's samples: a function of the run's seed and the epoch, the same on every worker.

torch's sequential order and its shuffling are computed here. Other samplers are drawn: iterated once, to the
end, with every random generator that they can reach in a state that follows from the seed and the epoch. So
workers that have drawn a different number of times (one was replaced, say) agree all the same.

A sampler that counts epochs by itself is told them (`set_epoch`), or drawn once for every epoch that this
worker has not drawn, so that its count is right. What a sampler keeps elsewhere nobody can put back: workers
send a fingerprint of what they have drawn, and the lead compares (`Decider`).
"""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.exceptions import UsageError

__all__ = ["EpochOrders", "Order", "Ranges", "seed_of"]

Ranges = list[tuple[int, int]]
Order = Callable[[Ranges], list[int]]
"""Ranges of positions in the epoch to indices of the data set."""

_STATELESS = (SequentialSampler, RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
"""What these draw depends on their generators only."""

_MOST_OBJECTS = 10_000
_LONGEST = 1_000
"""Limits of the search for generators: objects in all, and items of a list, tuple, set or dict."""


def seed_of(seed: int, *what: int) -> int:
    """A seed for one epoch, and for one generator in it."""
    text = "/".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


class EpochOrders:
    """Orders of one epoch after the other, for one DataLoader. Keeps the last one."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._own_batches = loader.batch_size is None
        """The script has a batch sampler of its own: its batches are the positions."""
        self._sampler: Any = loader.batch_sampler if self._own_batches else loader.sampler
        self._next = 0
        self._fingerprint = ""
        self._latest: tuple[int, Order] | None = None

    @property
    def drawn(self) -> bool:
        """Whether orders come from a sampler that is drawn; they have fingerprints then."""
        sampler = self._sampler
        if type(sampler) is SequentialSampler:
            return False
        plain = type(sampler) is RandomSampler and not sampler.replacement
        return not (plain and len(sampler) <= len(self._loader.dataset))  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """The class of the sampler."""
        inner = getattr(self._sampler, "sampler", None) if self._own_batches else None
        outer = type(self._sampler).__name__
        return outer if inner is None else f"{outer} of {type(inner).__name__}"

    def of(self, epoch: int) -> Order:
        """The order of an epoch. Epochs are asked for in rising order; the latest may be asked for again.

        Raises:
            UsageError: the sampler draws another number of times than it says.
        """
        if self._latest is None or self._latest[0] != epoch:
            self._latest = (epoch, self._order_of(epoch))
        return self._latest[1]

    def fingerprint(self, epoch: int) -> str:
        """A short text that two workers have in common if they have drawn the same order."""
        self.of(epoch)
        return self._fingerprint

    def _order_of(self, epoch: int) -> Order:
        sampler = self._sampler
        if type(sampler) is SequentialSampler:
            return lambda ranges: [i for a, b in ranges for i in range(a, b)]
        if not self.drawn:
            generator = torch.Generator().manual_seed(seed_of(self._seed, epoch))
            order = torch.randperm(len(self._loader.dataset), generator=generator)  # type: ignore[arg-type]
            order = order[: len(sampler)]
            return lambda ranges: [i for a, b in ranges for i in order[a:b].tolist()]
        drawn = self._draw(epoch)
        self._fingerprint = _fingerprint(drawn)
        if self._own_batches:
            return lambda ranges: [i for a, b in ranges for batch in drawn[a:b] for i in batch]
        return lambda ranges: [i for a, b in ranges for i in drawn[a:b]]

    def _draw(self, epoch: int) -> list[Any]:
        first = epoch if self._follows_epoch() else min(self._next, epoch)
        drawn: list[Any] = []
        for each in range(first, epoch + 1):
            drawn = self._draw_once(each)
        self._next = epoch + 1
        if len(drawn) != len(self._sampler):
            raise UsageError(
                f"{type(self._sampler).__name__}, the DataLoader's sampler, draws {len(drawn)} times in "
                f"epoch {epoch + 1} and says {len(self._sampler)} (its __len__). Samples are dealt by what "
                "it says, so some would be lost: make the two agree."
            )
        return drawn

    def _draw_once(self, epoch: int) -> list[Any]:
        for sampler in self._samplers():
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)
        generators = _generators([*self._samplers(), self._loader.generator], without=self._loader.dataset)
        with _seeded(seed_of(self._seed, epoch)), contextlib.ExitStack() as stack:
            for i, generator in enumerate(generators):
                stack.enter_context(_in_state_of(generator, seed_of(self._seed, epoch, i)))
            return [list(each) if self._own_batches else each for each in self._sampler]

    def _samplers(self) -> list[Any]:
        """The sampler, and the one inside a batch sampler."""
        inner = getattr(self._sampler, "sampler", None)
        return [self._sampler] if inner is None else [self._sampler, inner]

    def _follows_epoch(self) -> bool:
        """Whether what is drawn follows from the epoch and the generators, and not from earlier draws."""
        if any(callable(getattr(sampler, "set_epoch", None)) for sampler in self._samplers()):
            return True
        return all(type(each) in (*_STATELESS, BatchSampler) for each in self._samplers())


def _fingerprint(drawn: list[Any]) -> str:
    try:
        data = np.asarray(drawn, dtype=np.int64).tobytes()
    except (TypeError, ValueError, OverflowError):  # batches of different sizes, indices that are no numbers
        data = repr(drawn).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _generators(roots: list[Any], *, without: Any) -> list[Any]:
    """Random generators that these objects reach by their attributes, lists, tuples, sets and dicts."""
    found: list[Any] = []
    seen = {id(without)}
    left = [*reversed(roots)]
    while left and len(seen) < _MOST_OBJECTS:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Generator | np.random.Generator | np.random.RandomState):
            found.append(one)
        elif isinstance(one, random.Random):
            if not isinstance(one, random.SystemRandom):
                found.append(one)
        elif isinstance(one, dict):
            left += reversed([*one.values()]) if len(one) <= _LONGEST else []
        elif isinstance(one, list | tuple | set | frozenset):
            left += reversed([*one]) if len(one) <= _LONGEST else []
        elif not isinstance(
            one, Tensor | np.ndarray | nn.Module | type | ModuleType | FunctionType | MethodType
        ):
            left += reversed([*getattr(one, "__dict__", {}).values()])
    return found


@contextlib.contextmanager
def _in_state_of(generator: Any, seed: int) -> Iterator[None]:
    """Within, the generator draws as if it had this seed; afterwards it is where it was."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        kept = bits.state
        bits.state = type(bits)(seed).state
        try:
            yield
        finally:
            bits.state = kept
    elif isinstance(generator, np.random.RandomState):
        before = generator.get_state()
        generator.seed(seed % 2**32)
        try:
            yield
        finally:
            generator.set_state(before)
    else:
        was = generator.getstate()
        generator.seed(seed)
        try:
            yield
        finally:
            generator.setstate(was)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Samplers without a generator draw from one of three global ones, which have this seed within."""
    python, numpy_ = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)
