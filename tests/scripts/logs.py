"""Logging to a file, as the script says, and warnings to standard error."""

import logging

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

logging.basicConfig(filename="train.log", level=logging.DEBUG, format="%(levelname)s %(name)s %(message)s")
log = logging.getLogger("training")
console = logging.StreamHandler()
console.setLevel(logging.WARNING)
log.addHandler(console)

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

model = nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)

for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    log.info("epoch %d", epoch)
log.warning("the end")
logging.debug("handlers: %d", len(logging.getLogger().handlers))
