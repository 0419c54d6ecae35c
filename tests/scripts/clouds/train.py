"""python -m clouds.train"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline

from .data import clouds


def main() -> None:
    print(__name__, __package__, sys.argv[1:])
    data = clouds()
    model = nn.Linear(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=32))
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")


if __name__ == "__main__":
    main()
