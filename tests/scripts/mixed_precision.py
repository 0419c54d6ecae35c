"""bfloat16 by autocast on the CPU, and a gradient scaler that is switched off there."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
scaler = torch.amp.GradScaler("cpu", enabled=False)

for epoch in range(3):
    total, batches = 0.0, 0
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
            loss = nn.functional.cross_entropy(output.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        total, batches = total + loss.item(), batches + 1
    print(f"epoch {epoch}: loss {total / max(batches, 1):.6f}, computed in {output.dtype}")
