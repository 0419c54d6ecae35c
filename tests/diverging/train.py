"""A script that learns in bsp and diverges in asp without damping: its rate is too high for late gradients.

With a delay of d updates, gradient descent on a parabola of curvature c is stable for rate · c below
2 sin(π / (4d + 2)): 2 without delay (bsp), 0.45 with a delay of 3, which is what four asp workers have. Here
rate · c is about 1.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--lr", type=float, default=0.5)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--no-loss", action="store_true", help="log nothing")
parser.add_argument("--sleep", type=float, default=0.002, help="seconds of computing: all workers are at it")
args = parser.parse_args()

torch.set_num_threads(1)
draw = torch.Generator().manual_seed(args.seed)
x = torch.randn(2048, 8, generator=draw)
truth = torch.randn(8, 1, generator=draw)
y = x @ (truth * (19 / truth.square().sum()).sqrt())  # the first loss is about 19
y += 0.1 * torch.randn(2048, 1, generator=draw)
torch.manual_seed(args.seed)
model = nn.Linear(8, 1, bias=False)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for _ in range(args.epochs):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        time.sleep(args.sleep)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not args.no_loss:
            paceline.log(loss=loss.item())
