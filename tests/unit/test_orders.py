"""The order of an epoch follows from the seed and the epoch, however often a worker has drawn before."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.exceptions import UsageError
from paceline.worker.orders import EpochOrders

N = 24
DATA = TensorDataset(torch.arange(N))


class Own(Sampler[int]):
    """A sampler with a generator of its own, somewhere."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())

    def draw(self) -> list[int]:
        raise NotImplementedError


class WithNumpy(Own):
    def draw(self) -> list[int]:
        return self.nested["rng"][0].permutation(N).tolist()  # type: ignore[attr-defined, no-any-return]


class WithRandomState(Own):
    def draw(self) -> list[int]:
        return self.rng.permutation(N).tolist()  # type: ignore[attr-defined, no-any-return]


class WithPython(Own):
    def draw(self) -> list[int]:
        return self.rng.sample(range(N), N)  # type: ignore[attr-defined, no-any-return]


class Counting(Own):
    """Counts epochs by itself, and has no way to be told."""

    count = 0

    def draw(self) -> list[int]:
        self.count += 1
        return torch.randperm(N, generator=torch.Generator().manual_seed(self.count)).tolist()


class Told(Own):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def draw(self) -> list[int]:
        return torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Global(Own):
    def draw(self) -> list[int]:
        return [*np.random.permutation(N // 2).tolist(), *random.sample(range(N // 2, N), N // 2)]


def torch_generator() -> torch.Generator:
    return torch.Generator().manual_seed(random.SystemRandom().getrandbits(30))


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "random": lambda: {"sampler": RandomSampler(DATA, generator=torch_generator())},
    "replacement": lambda: {
        "sampler": RandomSampler(DATA, replacement=True, num_samples=40, generator=torch_generator())
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler(torch.ones(N), N, generator=torch_generator())},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(7), generator=torch_generator())},
    "numpy": lambda: {"sampler": WithNumpy(nested={"rng": [np.random.default_rng()]})},
    "random state": lambda: {"sampler": WithRandomState(rng=np.random.RandomState())},
    "python": lambda: {"sampler": WithPython(rng=random.Random())},
    "counting": lambda: {"sampler": Counting()},
    "told": lambda: {"sampler": Told()},
    "global": lambda: {"sampler": Global()},
    "loader": lambda: {"shuffle": True, "generator": torch_generator()},
    "batches": lambda: {
        "batch_sampler": BatchSampler(WithPython(rng=random.Random()), batch_size=5, drop_last=False)
    },
    "told batches": lambda: {"batch_sampler": BatchSampler(Told(), batch_size=5, drop_last=False)},
}


def orders(kind: str, seed: int = 0) -> EpochOrders:
    settings = SAMPLERS[kind]()
    return EpochOrders(
        DataLoader(DATA, **({"batch_size": 4} | settings if "batch_sampler" not in settings else settings)),
        seed,
    )


def whole(found: EpochOrders, epoch: int) -> list[int]:
    return found.of(epoch)([(0, 1000)])


@pytest.mark.parametrize("kind", SAMPLERS)
def test_workers_that_drew_differently_often_have_the_same_order(kind: str) -> None:
    """Each has generators in other states, as after a replacement, a resume or an empty epoch."""
    steady, late, peeking = orders(kind), orders(kind), orders(kind)
    for epoch in range(4):
        whole(peeking, epoch)
        whole(peeking, epoch)
    expected = [whole(steady, epoch) for epoch in range(4)]
    assert whole(late, 3) == whole(peeking, 3) == expected[3]
    assert len({tuple(order) for order in expected}) == 4, "epochs differ"
    if steady.drawn:
        assert late.fingerprint(3) == steady.fingerprint(3) == peeking.fingerprint(3)
    if kind not in ("counting", "told", "told batches"):
        assert whole(orders(kind, seed=1), 0) != expected[0], "the run's seed counts"


def test_the_scripts_generators_stay_where_they_are() -> None:
    ours, numpys, pythons = torch.Generator(), np.random.default_rng(3), random.Random(4)
    sampler = WithNumpy(nested={"rng": [numpys]}, more=(ours, pythons))
    loader = DataLoader(DATA, batch_size=4, sampler=sampler, generator=ours)

    def states() -> list[Any]:
        everywhere = [ours.get_state().tolist(), numpys.bit_generator.state, pythons.getstate()]
        return [
            *everywhere,
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]

    before = states()
    EpochOrders(loader, 0).of(5)
    assert states() == before


def test_generators_of_the_data_set_are_not_looked_for() -> None:
    class Data(TensorDataset):
        def __init__(self) -> None:
            super().__init__(torch.arange(N))
            self.augmentation = random.Random(1)

    data = Data()
    seen: list[Any] = []

    class Sampling(Own):
        def draw(self) -> list[int]:
            seen.append(data.augmentation.getstate())
            return list(range(N))

    before = data.augmentation.getstate()
    EpochOrders(DataLoader(data, batch_size=4, sampler=Sampling(data=data)), 0).of(0)
    assert seen == [before]


def test_a_sampler_that_nobody_can_put_back_has_other_fingerprints() -> None:
    tick = itertools.count()

    class Entropy(Own):
        def draw(self) -> list[int]:
            start = next(tick)
            return [(i + start) % N for i in range(N)]

    loader = DataLoader(DATA, batch_size=4, sampler=Entropy())
    found = {EpochOrders(loader, 0).fingerprint(0) for _ in range(3)}
    assert len(found) == 3


def test_a_sampler_of_torch_in_order_is_not_drawn() -> None:
    found = EpochOrders(DataLoader(DATA, batch_size=4), 0)
    assert not found.drawn and whole(EpochOrders(DataLoader(DATA, batch_size=4), 0), 2)[:3] == [0, 1, 2]
    assert isinstance(DataLoader(DATA, batch_size=4).sampler, SequentialSampler)


@pytest.mark.parametrize("draws", [N - 1, N + 1])
def test_a_sampler_that_draws_another_number_than_it_says_is_refused(draws: int) -> None:
    class Lying(Own):
        def draw(self) -> list[int]:
            return [0] * draws

    with pytest.raises(UsageError, match=f"Lying, .* draws {draws} times in epoch 1 and says {N}"):
        EpochOrders(DataLoader(DATA, batch_size=4, sampler=Lying()), 0).of(0)
