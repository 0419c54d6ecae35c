"""A worker that trains the digits CNN: FOLDER EPOCHS OPTIMIZER LR SEED STEP_MS.

With STEP_MS a step takes at least that long without using the CPU (a third of it in forward, the rest in
backward), so that what a worker waits for is the links.
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from benchmarks import ours
from examples.digits import DigitsNet
from paceline.data.accuracy import accuracy
from paceline.data.digits import digits
from paceline.worker import current_session

OPTIMIZERS = {
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
}


def main() -> None:
    """Train, and report idleness, accuracy and bytes."""
    folder, epochs, name, lr, seed, step_ms = sys.argv[1:]
    step_s = float(step_ms) / 1e3
    torch.manual_seed(int(seed))
    model = DigitsNet()
    optimizer = OPTIMIZERS[name](model.parameters(), float(lr))
    loader = DataLoader(digits(train=True), batch_size=32, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    seconds, idle = [], []
    began, cpu = time.perf_counter(), time.thread_time()
    for _ in range(int(epochs)):
        model.train()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            time.sleep(step_s / 3)
            loss.backward()
            time.sleep(step_s * 2 / 3)
            optimizer.step()
            optimizer.zero_grad()
            took = time.perf_counter() - began
            seconds.append(took)
            idle.append(max(0.0, took - step_s - (time.thread_time() - cpu)) / took)
            began, cpu = time.perf_counter(), time.thread_time()
    with paceline.run_parameters():
        score = accuracy(model, digits(train=False))
    client = current_session().client  # type: ignore[attr-defined]
    ours.report(
        folder,
        paceline.rank(),
        seconds=seconds,
        idle=idle,
        accuracy=score,
        bytes_per_push=client.links.bytes_sent / max(1, len(seconds)),
        bytes_per_reply=client.links.bytes_received / max(1, len(seconds)),
    )


if __name__ == "__main__":
    main()
