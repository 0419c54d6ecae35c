"""Warns: once by default, never, always, and as an error that it catches."""

import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

model = nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

for _ in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    warnings.warn("said once", stacklevel=1)
warnings.simplefilter("ignore", FutureWarning)
warnings.warn("never said", FutureWarning, stacklevel=1)
warnings.simplefilter("error", DeprecationWarning)
try:
    warnings.warn("raised", DeprecationWarning, stacklevel=1)
except DeprecationWarning as error:
    print("caught:", error)
