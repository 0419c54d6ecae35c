"""Arguments."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser(description="Train a little.")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, required=True, help="the learning rate")
parser.add_argument("--widths", type=int, nargs="*", default=[])
args = parser.parse_args()
print(args)

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

layers = [nn.Linear(a, b) for a, b in zip([10, *args.widths], [*args.widths, 2], strict=True)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

for epoch in range(args.epochs):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}")
