"""Steps after every second batch, with clipped gradients."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

every = 2
for epoch in range(3):
    total, batches = 0.0, 0
    for at, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y) / every
        loss.backward()
        if (at + 1) % every == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total, batches = total + loss.item() * every, batches + 1
    print(f"epoch {epoch}: loss {total / max(batches, 1):.6f}")
