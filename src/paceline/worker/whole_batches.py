"""Batches of a data set that is tensors in memory, each read by one indexing.

torch reads a TensorDataset sample by sample and stacks what it got: for 64 digits that is a tenth of
the step. Here a batch is `tensor[indices]`: the same values, in as many tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

__all__ = ["WholeBatches", "as_read"]


class WholeBatches(Dataset[Any]):
    """A TensorDataset, or a part of one, that gives whole batches; its loader collates by `as_read`.

    Args:
        parts: what `dataset` is of `whole`, the outermost first.
    """

    def __init__(self, dataset: Any, parts: Sequence[Subset[Any]], whole: TensorDataset) -> None:
        self._dataset = dataset
        self._parts = parts
        self._whole = whole

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> "WholeBatches | None":
        """Of a loader whose batches are rows of tensors; None where code of the user's may be in between."""
        whole: Any = loader.dataset
        parts = []
        while type(whole) is Subset:
            parts.append(whole)
            whole = whole.dataset
        if loader.num_workers or loader.collate_fn is not default_collate or type(whole) is not TensorDataset:
            return None
        return cls(loader.dataset, parts, whole)

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
