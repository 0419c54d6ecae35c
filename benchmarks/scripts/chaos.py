"""A worker of the chaos benchmark: EPOCHS BATCHES STEP_MS. Its computing is emulated."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    """Train a small model on random samples."""
    epochs, batches, step_ms = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(1)
    samples = 8 * batches
    data = TensorDataset(
        torch.randn(samples, 32, generator=random), torch.randint(10, (samples,), generator=random)
    )
    loader: DataLoader[object] = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            time.sleep(step_ms / 1000)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
