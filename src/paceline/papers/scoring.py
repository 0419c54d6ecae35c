"""Accuracy of a model whose batch normalisation has seen only small parts of batches, or nothing."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.data.accuracy import accuracy

__all__ = ["calibrated_accuracy"]

_IMAGES, _BATCH = 512, 128


def calibrated_accuracy(model: nn.Module, images: Tensor, test: Dataset[Any]) -> float:
    """Top-1 accuracy, with the statistics of batch normalisation taken anew from some training images.

    What a worker has remembered comes from its own parts of batches, as few as four images, so it would say
    more about their size than about the parameters. The model is left in training mode,
    with the new statistics.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    usual = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean of all batches
    model.train()
    with torch.no_grad():
        for part in images[:_IMAGES].split(_BATCH):
            model(part)
    for layer, momentum in zip(layers, usual, strict=True):
        layer.momentum = momentum
    return accuracy(model, test)
