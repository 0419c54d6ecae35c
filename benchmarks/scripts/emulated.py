"""A worker whose computing is emulated: FOLDER BATCHES EPOCHS STEP_MS SLOW_RANK SLOWER.

A whole batch takes STEP_MS without using the CPU (SLOWER times that on SLOW_RANK), a smaller one less; so
more workers than cores can be shown. The exchange is real, of a model of 10,000 parameters.
"""

import sys
import time
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from benchmarks import ours

BATCH = 8


def main() -> None:
    """Time epochs: they end for all workers at once."""
    folder, (batches, epochs, step_ms, slow_rank, slower) = sys.argv[1], map(float, sys.argv[2:])
    model = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(int(batches) * BATCH, 100))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    sample_s = step_ms / 1e3 / BATCH * (slower if paceline.rank() == int(slow_rank) else 1)
    ends = []
    for _ in range(int(epochs) + 1):
        for (inputs,) in loader:
            began = time.perf_counter()
            model(inputs).square().mean().backward()
            time.sleep(max(0.0, sample_s * len(inputs) - (time.perf_counter() - began)))
            optimizer.step()
            optimizer.zero_grad()
        ends.append(time.perf_counter())
    seconds = [after - before for before, after in pairwise(ends)]
    ours.report(folder, paceline.rank(), seconds=seconds)


if __name__ == "__main__":
    main()
