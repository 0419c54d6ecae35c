"""Batches of a data set that is tensors in memory, each read by one indexing.

torch reads a TensorDataset sample by sample and stacks what it got: for 64 digits that is a tenth of
the step. Here a batch is `tensor[indices]`: the same values, in as many tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

__all__ = ["Rows", "as_read", "in_rows"]


def in_rows(loader: DataLoader[Any]) -> bool:
    """Whether a loader's batches are rows of tensors and nothing else: no code of the user's in between."""
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    plain = loader.num_workers == 0 and loader.collate_fn is default_collate
    return plain and type(dataset) is TensorDataset


class Rows(Dataset[Any]):
    """A TensorDataset, or a part of one, that gives whole batches; its loader collates by `as_read`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._parts: list[Subset[Any]] = []
        while type(dataset) is Subset:
            self._parts.append(dataset)
            dataset = dataset.dataset
        self._whole: TensorDataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """A batch, collated."""
        rows = indices
        for part in self._parts:
            rows = [part.indices[i] for i in rows]
        tensors = self._whole.tensors
        if rows and all(type(i) is int for i in rows) and all(map(_is_plain, tensors)):
            where = torch.tensor(rows)
            return [tensor[where].contiguous() for tensor in tensors]
        return default_collate([self._dataset[i] for i in indices])


def as_read(batch: Any) -> Any:
    """The batch as it is: it is collated already."""
    return batch


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.requires_grad
