"""Functions, a main(), what is to happen at the end, and a thread that writes a file meanwhile."""

import atexit
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    inputs = torch.randn(256, 10)
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=32, shuffle=True)


def train_one_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[object]) -> float:
    total, batches = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total, batches = total + loss.item(), batches + 1
    return total / max(batches, 1)


def main() -> None:
    loader = make_loader()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    losses = [train_one_epoch(model, optimizer, loader) for _ in range(3)]
    print("losses:", ", ".join(f"{loss:.6f}" for loss in losses))
    if paceline.is_main():
        done = threading.Event()
        threading.Thread(target=lambda: (done.wait(), Path("thread.txt").write_text("written"))).start()
        atexit.register(Path("atexit.txt").write_text, f"{len(losses)} epochs")
        done.set()


if __name__ == "__main__":
    main()
