"""One cycle of the learning rate, as long as the training, step by step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

model = nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
epochs = 3
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=epochs * len(loader))
model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)

for epoch in range(epochs):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    print(f"epoch {epoch}: lr {scheduler.get_last_lr()[0]:.6f}")
