"""Scikit-learn's digits: 1,797 real handwritten digits of 8×8 pixels, the data set that is always there."""

import torch
from torch.utils.data import TensorDataset

__all__ = ["digits"]


def digits(*, train: bool, test_share: float = 0.2) -> TensorDataset:
    """The training or the test part; the split is always the same.

    Returns:
        Images (1×8×8, float32 from 0 to 1) and labels (int64).
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div_(16).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1797))
    cut = int(len(labels) * (1 - test_share))
    chosen = order[:cut] if train else order[cut:]
    return TensorDataset(images[chosen], labels[chosen])
