"""Raises the learning rate step by step, chooses one, begins again from the first parameters, and trains."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

first = copy.deepcopy(model.state_dict())
losses, rates = [], []
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    rates.append(optimizer.param_groups[0]["lr"])
    for group in optimizer.param_groups:
        group["lr"] *= 1.3
print("rates rise:", rates == sorted(rates), "losses are numbers:", all(each == each for each in losses))

model.load_state_dict(first)
for group in optimizer.param_groups:
    group["lr"] = 0.1
for _ in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained")
