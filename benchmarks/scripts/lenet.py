"""A worker that trains LeNet on drawn digits: FOLDER BATCH ROUNDS. A round is 75 iterations.

The model, the data and the optimizer are those of examples/mnist.py. On a GPU the CPU waits for it at the end
of a round.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from benchmarks import ours
from examples.mnist import lenet
from paceline.data.mnist import drawn_digits

SAMPLES = 6000
WARM_UP, ROUND = 25, 75


def main() -> None:
    """Train, and report how long each iteration of a round took."""
    folder, batch, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    model = lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(drawn_digits(SAMPLES, seed=0), batch_size=batch, shuffle=True, drop_last=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    on_gpu = next(model.parameters()).is_cuda

    batches = _for_ever(loader)

    def iterate(count: int) -> None:
        for _ in range(count):
            images, labels = next(batches)
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()

    iterate(WARM_UP)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        iterate(ROUND)
        seconds.append((time.perf_counter() - began) / ROUND)
    ours.report(folder, paceline.rank(), seconds=seconds, on_gpu=on_gpu)


def _for_ever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
