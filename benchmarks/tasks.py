"""What `convergence` trains: handwritten digits, and a task that is hard on stale gradients.

`spirals` is five spiral arms in the plane, each of them a class. A straight cut is of no use, and what is, a
network finds along flat, winding valleys: that takes a high learning rate, at which gradients computed
on old parameters point the wrong way. Layer normalization and clipped gradients keep a network that is
trained so from being lost altogether; it is worse instead.

The learning rate is what a user of bsp with 12 workers would take, and the kindest to asp among those: the
lowest of 1, 2, 5 × 10ⁿ that is within 0.01 of the best (mean of three seeds).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["TASKS", "Task", "task"]

SPIRALS = 5
_TURNS = 0.6
_NOISE_TURNS = 0.02


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data, a model, and how it is trained: SGD with momentum on clipped gradients, at one rate."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    build: Callable[[], nn.Module]
    """A fresh model, drawn from torch's global generator."""
    batch: int
    """Of each worker."""
    epochs: int
    learning_rate: float
    max_norm: float
    """Workers clip their gradients to this norm."""
    momentum: float = 0.9

    def optimizer(self, parameters: list[Tensor], learning_rate: float) -> torch.optim.Optimizer:
        """The optimizer that a script of this task has."""
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=self.momentum)

    def backward(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
        """Leave the clipped gradient of one batch in a model whose gradients were zero; returns the loss."""
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
        return loss.item()

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Share of the test samples that the model gets right."""
        inputs, labels = self.test
        return float((model(inputs).argmax(1) == labels).float().mean())


def task(name: str) -> Task:
    """A task by its name, its data always the same."""
    return TASKS[name]()


@cache
def digits() -> Task:
    """The 1,797 handwritten digits and the CNN of examples/digits.py."""
    from examples.digits import DigitsNet
    from paceline.data.digits import digits as samples

    train, test = samples(train=True).tensors, samples(train=False).tensors
    return Task(
        name="digits",
        train=(train[0], train[1]),
        test=(test[0], test[1]),
        build=DigitsNet,
        batch=16,
        epochs=20,
        learning_rate=0.05,
        max_norm=5.0,
    )


@cache
def spirals() -> Task:
    """Five arms of 0.6 turns, 4,000 points to train on and 4,000 to test."""
    random = np.random.default_rng(0)
    return Task(
        name="spirals",
        train=_arms(4000, random),
        test=_arms(4000, random),
        build=_small_network,
        batch=16,
        epochs=20,
        learning_rate=0.05,
        max_norm=1.0,
    )


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "spirals": spirals}


def _arms(count: int, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Points near the arms, as many on each unit of area inside as outside, and whose arm it is."""
    labels = random.integers(SPIRALS, size=count)
    radius = np.sqrt(random.uniform(0.01, 1, count))
    turns = labels / SPIRALS + _TURNS * radius + random.normal(0, _NOISE_TURNS, count)
    points = radius[:, None] * np.stack([np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)], axis=1)
    return torch.from_numpy(points.astype(np.float32)), torch.from_numpy(labels)


def _small_network() -> nn.Module:
    """4,677 parameters."""
    return nn.Sequential(
        *(nn.Linear(2, 64), nn.LayerNorm(64, elementwise_affine=False), nn.ReLU()),
        *(nn.Linear(64, 64), nn.LayerNorm(64, elementwise_affine=False), nn.ReLU()),
        nn.Linear(64, SPIRALS),
    )
