"""An average of the model, in a copy of it."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
ema = copy.deepcopy(model)
swa = torch.optim.swa_utils.AveragedModel(model)

for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
    swa.update_parameters(model)
    with torch.no_grad():
        found = nn.functional.cross_entropy(ema(inputs), targets).item()
        other = nn.functional.cross_entropy(swa(inputs), targets).item()
    print(f"epoch {epoch}: the averages' losses are {found:.6f} and {other:.6f}")
if paceline.is_main():
    torch.save(ema.state_dict(), "ema.pt")
    torch.save(ema, "ema-whole.pt")
