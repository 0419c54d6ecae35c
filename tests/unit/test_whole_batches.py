"""Whole batches are what torch's own loader would have made of the samples."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from paceline.worker.whole_batches import WholeBatches, as_read

N = 23


def tensors() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(N, 3, 4, 4, generator=g).to(memory_format=torch.channels_last),
        torch.randint(10, (N,), generator=g),
        torch.randn(2, N, generator=g, dtype=torch.float64).T,
        torch.rand(N, generator=g) > 0.5,
        torch.randn(N, 2, generator=g).to(torch.bfloat16),
    )


def halves() -> Any:
    return random_split(tensors(), [0.5, 0.5], generator=torch.Generator().manual_seed(1))[0]


class Weird(torch.Tensor):
    """Somebody's own kind of tensor."""


@pytest.mark.parametrize(
    "dataset",
    [
        tensors(),
        halves(),
        Subset(halves(), [5, -1, 3, 3, 0]),
        Subset(tensors(), np.array([4, 2, 9])),  # type: ignore[arg-type]
        Subset(tensors(), torch.tensor([4, 2, 9])),  # type: ignore[arg-type]
        TensorDataset(torch.randn(5, 2, requires_grad=True)),
        TensorDataset(torch.randn(5, 2).as_subclass(Weird)),  # type: ignore[arg-type]
    ],
    ids=["whole", "part", "part-of-a-part", "numpy", "tensor", "grad", "subclass"],
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_batches_are_those_of_torch(dataset, batch_size):
    theirs = DataLoader(dataset, batch_size=batch_size)
    whole = WholeBatches.of(theirs)
    assert whole is not None
    ours = DataLoader(whole, batch_size=batch_size, collate_fn=as_read)
    batches = list(theirs)
    assert len(batches) == len(ours)
    for one, other in zip(batches, ours, strict=True):
        assert type(one) is type(other) is list
        for a, b in zip(one, other, strict=True):
            assert type(a) is type(b) and a.dtype == b.dtype and a.stride() == b.stride()
            assert torch.equal(a, b) and a.requires_grad == b.requires_grad


def test_tensors_that_are_exchanged_are_read_from_then_on():
    dataset = tensors()
    whole = WholeBatches.of(DataLoader(dataset))
    dataset.tensors = (torch.arange(N),)
    assert [t.tolist() for t in whole.__getitems__([4, 2])] == [[4, 2]]


@pytest.mark.parametrize("indices", [[], [N], [0.5], [0, True]], ids=str)
def test_what_is_no_index_does_what_it_did(indices):
    dataset = tensors()
    with pytest.raises((IndexError, TypeError, RuntimeError)):
        next(iter(DataLoader(dataset, batch_sampler=[indices])))
    with pytest.raises((IndexError, TypeError, RuntimeError)):
        WholeBatches.of(DataLoader(dataset)).__getitems__(indices)


class Own(TensorDataset):
    """May do anything."""


class Other(Dataset[int]):
    """Not tensors."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return N


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(tensors(), batch_size=4, num_workers=1),
        DataLoader(tensors(), batch_size=4, collate_fn=list),
        DataLoader(Own(torch.arange(4))),
        DataLoader(Subset(Own(torch.arange(4)), [1])),
        DataLoader(Other()),
    ],
    ids=["processes", "collate", "own", "part-of-own", "other"],
)
def test_a_users_own_code_is_left_in_place(loader):
    assert WholeBatches.of(loader) is None
