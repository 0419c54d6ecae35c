"""Validation data in parts: disjoint, whole and in order. And prepared loaders are DataLoaders."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import paceline
from paceline.exceptions import UsageError
from paceline.worker.alone import AloneSession
from paceline.worker.validation import ValidationLoader


class Numbers(Dataset):
    """A map-style data set that is no tensors."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    """Numbers, and as many random ones."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __iter__(self):
        return ((i, torch.rand(()).item()) for i in range(self._count))


def part(loader, worker, readers, *, seed=0):
    place = (worker, readers)
    return ValidationLoader(loader, seed=seed, planned=place, find_place=lambda: place)


def read(loader):
    return [i for batch in loader for i in (batch[0] if isinstance(batch, list) else batch).tolist()]


def pairs(loader):
    for numbers, drawn in loader:
        yield from zip(numbers.tolist(), drawn.tolist(), strict=True)


@given(
    count=st.integers(0, 40),
    batch=st.integers(1, 7),
    readers=st.integers(1, 6),
    drop_last=st.booleans(),
    tensors=st.booleans(),
)
def test_parts_make_up_the_whole_in_order(count, batch, readers, drop_last, tensors):
    data = TensorDataset(torch.arange(count)) if tensors else Numbers(count)
    loader = DataLoader(data, batch_size=batch, drop_last=drop_last)
    parts = [part(loader, worker, readers) for worker in range(readers)]
    whole = read(loader)
    for _ in range(2):
        assert [i for each in parts for i in read(each)] == whole
    sizes = [len(read(each)) for each in parts]
    assert max(sizes) - min(sizes) <= 1
    assert [len(each) for each in parts] == [len(list(each)) for each in parts]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["shuffle", "random", "batches"])
def test_random_orders_are_the_same_for_all_and_in_every_pass(kind, num_workers):
    data = Numbers(23)
    more = {
        "shuffle": {"batch_size": 4, "shuffle": True},
        "random": {"batch_size": 4, "sampler": RandomSampler(data, generator=torch.Generator())},
        "batches": {"batch_sampler": BatchSampler(SequentialSampler(data), 4, drop_last=False)},
    }[kind]
    parts = [part(DataLoader(data, num_workers=num_workers, **more), worker, 3) for worker in range(3)]
    first = [read(each) for each in parts]
    assert sorted(i for each in first for i in each) == list(range(23))
    assert [read(each) for each in parts] == first


def test_workers_that_come_and_go_change_the_parts_of_the_next_pass():
    loader, places = DataLoader(Numbers(10), batch_size=3), [(1, 2), (0, 1)]
    mine = ValidationLoader(loader, seed=0, planned=(1, 2), find_place=lambda: places.pop(0))
    assert read(mine) == [5, 6, 7, 8, 9]
    assert read(mine) == list(range(10))


def test_a_stream_is_divided_by_batches_and_drawn_alike():
    state = torch.get_rng_state()
    loaders = [part(DataLoader(Stream(11), batch_size=2), worker, 2) for worker in range(2)]
    found = [
        [pair for batch in each for pair in zip(*map(torch.Tensor.tolist, batch), strict=True)]
        for each in loaders
    ]
    assert sorted(i for each in found for i, _ in each) == list(range(11))
    assert [len(each) for each in loaders] == [3, 3]
    with torch.random.fork_rng():
        torch.manual_seed(99)  # workers draw random numbers of their own
        again = list(pairs(loaders[0]))
    assert again == found[0]
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_divided_is_refused():
    data = Numbers(8)
    with pytest.raises(UsageError, match="got a list; it takes DataLoaders"):
        part([1], 0, 2)
    with pytest.raises(UsageError, match="batch_size=None"):
        part(DataLoader(data, batch_size=None), 0, 2)
    with pytest.raises(UsageError, match="DistributedSampler"):
        part(DataLoader(data, sampler=DistributedSampler(data, 2, 0)), 0, 2)
    with pytest.raises(UsageError, match="prepared already"):
        part(part(DataLoader(data, batch_size=2), 0, 2), 0, 2)


def test_alone_a_validation_loader_is_the_loader_itself():
    one, two = DataLoader(Numbers(8)), DataLoader(Numbers(4), shuffle=True)
    assert paceline.prepare_validation(one) is one
    first, second = paceline.prepare_validation(one, two)
    assert first is one and second is two
    with pytest.raises(UsageError, match="it takes DataLoaders"):
        paceline.prepare_validation([1])


@pytest.mark.parametrize("data", [TensorDataset(torch.arange(9)), Stream(9)])
@pytest.mark.parametrize("kind", ["training", "validation"])
def test_a_prepared_loader_is_a_dataloader_with_the_scripts_attributes(data, kind):
    loader = DataLoader(data, batch_size=2)
    if kind == "training":
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, prepared = AloneSession().prepare([model, optimizer, loader])
    else:
        prepared = part(loader, 0, 1)
    assert isinstance(prepared, DataLoader) and prepared is not loader
    assert len(prepared) == len(loader) == 5
    for name in (*vars(loader), "multiprocessing_context"):
        if "__" not in name:
            assert getattr(prepared, name) is getattr(loader, name), name
    with pytest.raises(ValueError, match="batch_size"):
        prepared.batch_size = 3
    if kind == "training":
        with pytest.raises(UsageError, match="prepared already"):
            AloneSession().prepare([model, optimizer, prepared])
