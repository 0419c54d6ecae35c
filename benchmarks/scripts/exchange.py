"""A worker that does nothing but exchange: FOLDER N ROUNDS."""

import sys
import time

import torch
from torch import nn

import paceline
from benchmarks import ours, peers


def main() -> None:
    """Time rounds of push + update + pull; the gradient lies in the slot already."""
    folder, n, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(n))
    optimizer = torch.optim.SGD(model.parameters(), lr=peers.LEARNING_RATE)
    # A gradient that is there before prepare() goes into the slot, and .grad is a view of it from then on.
    model.weight.grad = torch.full((n,), 1e-3)
    model, optimizer = paceline.prepare(model, optimizer)
    seconds, ends = [], []
    for _ in range(rounds + peers.WARM_UP):
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        ends.append(time.monotonic())
    ours.report(folder, paceline.rank(), seconds=seconds[peers.WARM_UP :], ends=ends[peers.WARM_UP :])


if __name__ == "__main__":
    main()
