"""A data set of its own class, loaded by two processes, which print something once."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import paceline


class Clouds(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(256, 10)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert get_worker_info() is not None
        return self.inputs[index], (self.inputs[index].sum() > 0).long()


def begin(number: int) -> None:
    print(f"loader process {number}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    data = Clouds()
    model = nn.Linear(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(
        data, batch_size=32, shuffle=True, num_workers=2, persistent_workers=True, worker_init_fn=begin
    )
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for epoch in range(2):
        total, batches = 0.0, 0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total, batches = total + loss.item(), batches + 1
        print(f"epoch {epoch}: loss {total / max(batches, 1):.6f}")
