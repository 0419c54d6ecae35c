"""Scikit-learn's digits: 1,797 real handwritten digits of 8×8 pixels, the data set that is always there."""

import torch
from torch.utils.data import TensorDataset

from paceline.data.mnist import drawn_digits
from paceline.data.options import EMBEDDED, SYNTHETIC
from paceline.exceptions import DataError

__all__ = ["digits"]


def digits(*, train: bool, test_share: float = 0.2, data: str = EMBEDDED) -> TensorDataset:
    """The training or the test part; the split is always the same.

    Args:
        train: the training part, else the test part.
        test_share: for testing.
        data: "embedded", the real ones; "synthetic", as many drawn ones.

    Returns:
        Images (1×8×8, float32 from 0 to 1) and labels (int64).
    """
    if data == SYNTHETIC:
        return drawn_digits(round(1797 * (1 - test_share if train else test_share)), seed=int(train), size=8)
    if data != EMBEDDED:
        raise DataError(
            f"--data {data}: these digits come with scikit-learn. Give 'embedded' or 'synthetic'."
        )
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div_(16).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1797))
    cut = int(len(labels) * (1 - test_share))
    chosen = order[:cut] if train else order[cut:]
    return TensorDataset(images[chosen], labels[chosen])
