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
    model, optimizer = paceline.prepare(model, optimizer)
    # One backward puts a gradient into the slot and makes .grad a view of it; it stays there.
    (model.weight * torch.full((n,), 1e-3)).sum().backward()
    seconds, ends = [], []
    for _ in range(rounds + peers.WARM_UP):
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        ends.append(time.monotonic())
    ours.report(folder, paceline.rank(), seconds=seconds[peers.WARM_UP :], ends=ends[peers.WARM_UP :])


if __name__ == "__main__":
    main()
