"""Stops when the validation loss does not get better."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

held_out = torch.randn(64, 10)
answers = (held_out.sum(1) > 0).long()
model = nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

best, bad = float("inf"), 0
for epoch in range(50):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), paceline.run_parameters():
        found = nn.functional.cross_entropy(model(held_out), answers).item()
    print(f"epoch {epoch}: validation loss {found:.6f}")
    best, bad = (found, 0) if found < best - 0.01 else (best, bad + 1)
    if paceline.should_stop(bad >= 2):
        print("enough")
        break
