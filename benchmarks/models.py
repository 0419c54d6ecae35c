"""The models that are trained, their data, and the one loop that every side times.

The data is random: only time is measured. Ours, the plain loop and DDP all run `timed_steps`, so
that a difference between them is a difference in model, optimizer and loader, not in the loop.
"""

import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WARM_UP = 3
LEARNING_RATE = 0.01


def build(name: str) -> nn.Module:
    """A fresh model, the same weights in every process: "resnet18" (for 32x32) or "digits"."""
    torch.manual_seed(0)
    if name == "resnet18":
        from torchvision.models import resnet18

        model: nn.Module = resnet18(num_classes=10)
        return model
    from examples.digits import DigitsNet

    net: nn.Module = DigitsNet()
    return net


def loader(name: str, *, batch: int, steps: int, workers: int = 1) -> DataLoader[Any]:
    """Shuffled random samples, enough for `steps` (and the warm-up) of all workers in one epoch."""
    shape = {"resnet18": (3, 32, 32), "digits": (1, 8, 8)}[name]
    samples = batch * (steps + WARM_UP) * workers
    random = torch.Generator().manual_seed(0)
    images = torch.randn(samples, *shape, generator=random)
    labels = torch.randint(10, (samples,), generator=random)
    return DataLoader(TensorDataset(images, labels), batch_size=batch, shuffle=True)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def timed_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, steps: int) -> list[float]:
    """Train for an epoch; seconds of at most `steps` steps after a warm-up, from one's end to the next's.

    In modes without rounds a worker makes as many steps as it has time for.
    """
    ends: list[float] = []
    for images, labels in batches:
        if not ends:
            ends.append(time.perf_counter())
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    seconds = [after - before for before, after in pairwise(ends)]
    return seconds[WARM_UP : WARM_UP + steps]
