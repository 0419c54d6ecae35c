"""Values logged in a run: how long a call of paceline.log takes.

logged.py FOLDER ROUNDS CALLS PAUSE_US NAMES
"""

import sys
import time

import torch
from torch import nn

import paceline
from benchmarks import ours

folder, rounds, calls, pause_us, names = sys.argv[1], *map(int, sys.argv[2:])
model = nn.Linear(2, 1)
model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
values = {f"value{n}": 0.5 for n in range(names)}
clock = time.perf_counter
seconds = []
for number in range(rounds + 1):
    spent = 0.0
    for _ in range(calls):
        if pause_us:
            until = clock() + pause_us * 1e-6
            while clock() < until:
                pass
        began = clock()
        paceline.log(**values)
        spent += clock() - began
    if number:  # the first round warms up
        seconds.append(spent / calls)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
ours.report(folder, paceline.rank(), seconds=seconds)
