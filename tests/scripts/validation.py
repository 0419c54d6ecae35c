"""Every worker measures the whole validation set after each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

held_out = torch.randn(96, 10)
validation = DataLoader(TensorDataset(held_out, (held_out.sum(1) > 0).long()), batch_size=32)
model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)


@torch.no_grad()
def evaluate() -> tuple[float, int]:
    model.eval()
    loss, right = 0.0, 0
    for x, y in validation:
        output = model(x)
        loss += nn.functional.cross_entropy(output, y, reduction="sum").item()
        right += int((output.argmax(1) == y).sum())
    model.train()
    return loss / 96, right


for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with paceline.run_parameters():
        found, right = evaluate()
    print(f"epoch {epoch}: validation loss {found:.6f}, {right} of 96 right")
