"""A worker of the chaos benchmark: FOLDER EPOCHS BATCHES STEP_MS. Its computing is emulated.

Every step leaves a line in FOLDER/steps-RANK.csv: when its exchange began and when it was over, on this
machine's monotonic clock. So what a fault costs is seen as the script sees it.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH = 8


def build() -> nn.Module:
    """A small model, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))


def samples(batches: int) -> tuple[Tensor, Tensor]:
    """Points, and to which of ten directions each is nearest."""
    random = torch.Generator().manual_seed(1)
    points = torch.randn(BATCH * batches, 32, generator=random)
    return points, (points @ torch.randn(32, 10, generator=random)).argmax(1)


def main() -> None:
    """Train."""
    folder, epochs, batches, step_s = (
        *(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])),
        float(sys.argv[4]) / 1000,
    )
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: DataLoader[object] = DataLoader(TensorDataset(*samples(batches)), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    steps = os.open(folder / f"steps-{paceline.rank()}.csv", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for _ in range(epochs):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            time.sleep(step_s)
            began = time.monotonic()
            optimizer.step()
            os.write(steps, f"{began:.6f},{time.monotonic():.6f}\n".encode())
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
