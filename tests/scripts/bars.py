"""Progress bars of tqdm: one an epoch, with lines written above it, and two below each other."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm, trange

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

model = nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

for epoch in range(2):
    bar = tqdm(loader, desc=f"epoch {epoch}")
    for x, y in bar:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    tqdm.write(f"epoch {epoch} is done")

for _ in trange(2, desc="outer", disable=None):  # only in a terminal
    for _ in trange(3, desc="inner", leave=False):
        pass
print("no line's end", end="")
print("a last word", file=sys.stderr)
