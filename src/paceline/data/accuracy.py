"""Share of a classifier's answers that are right."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

__all__ = ["accuracy"]


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset[Any], *, top: int = 1, batch_size: int = 256) -> float:
    """Share of inputs whose label is among the `top` highest outputs, with the model in evaluation mode.

    The model is put back into the mode in which it was.
    """
    was_training = model.training
    model.eval()
    right = total = 0
    inputs: Tensor
    labels: Tensor
    for inputs, labels in DataLoader(data, batch_size=batch_size):
        right += int((model(inputs).topk(top, 1).indices == labels[:, None]).any(1).sum())
        total += len(labels)
    model.train(was_training)
    return right / max(1, total)
