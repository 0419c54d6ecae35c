"""A warm-up, then a cosine, epoch by epoch; schedulers that prepare() does not get."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

model = nn.Linear(10, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=2)
scheduler = SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, T_max=4)], milestones=[2])

for epoch in range(6):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    print(f"epoch {epoch}: lr {optimizer.param_groups[0]['lr']:.6f}")
