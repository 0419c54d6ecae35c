"""How well a language model predicts."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

__all__ = ["perplexity"]


@torch.no_grad()
def perplexity(model: nn.Module, data: Dataset[Any], *, batch_size: int = 32, ignored: int = -100) -> float:
    """Among how many tokens the model hesitates: exp of the mean cross-entropy of a token.

    The model is in evaluation mode meanwhile, and is put back into the mode in which it was.

    Args:
        data: inputs and targets; the model's outputs are scores of every token of the vocabulary, in the last
            dimension.
        ignored: targets of this value do not count.

    Returns:
        nan if there is no target.
    """
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    inputs: Tensor
    targets: Tensor
    for inputs, targets in DataLoader(data, batch_size=batch_size):
        scores = model(inputs)
        loss = nn.functional.cross_entropy(
            scores.flatten(0, -2), targets.flatten(), ignore_index=ignored, reduction="sum"
        )
        total += float(loss)
        tokens += int((targets != ignored).sum())
    model.train(was_training)
    return math.exp(total / tokens) if tokens else math.nan
