"""The witness: FOLDER SAMPLES BATCH EPOCHS STEP_MS. Its parameters say who applied which samples.

There is one parameter an epoch, with one number for every sample and worker. A step adds something to the
numbers of its samples in the column of its worker, and something enormous to those that are not zero already.
Whatever a mode makes of a gradient (a mean, a damped step, an elastic difference): a sample that was applied
once has one number that is not zero, a lost one has none, and a repeated one has two or an enormous one.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

COLUMNS = 6
"""At most so many workers."""
ENORMOUS = 1e6


class Witness(nn.Module):
    """Parameters that remember."""

    def __init__(self, samples: int, epochs: int) -> None:
        super().__init__()
        zeros = [torch.zeros(samples, COLUMNS, dtype=torch.float64) for _ in range(epochs)]
        self.epochs = nn.ParameterList(zeros)

    def forward(self, samples: Tensor, epoch: int, worker: int) -> Tensor:
        """A loss whose gradient marks these samples."""
        marks = self.epochs[epoch][samples, worker]
        repeated = (marks.detach() != 0).double()
        return -(marks * (1 + ENORMOUS * repeated)).mean()


def main() -> None:
    """Train."""
    folder = Path(sys.argv[1])
    samples, batch, epochs = map(int, sys.argv[2:5])
    step_s = float(sys.argv[5]) / 1000
    model = Witness(samples, epochs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.arange(samples))
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(data, batch_size=batch, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    worker = paceline.rank()
    until = time.monotonic() + 10  # the player cannot kill what it does not know yet
    while not (folder.parent / "go").exists() and time.monotonic() < until:
        time.sleep(0.01)
    steps = os.open(folder / f"steps-{worker}.csv", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for epoch in range(epochs):
        for (chosen,) in loader:
            optimizer.zero_grad()
            model(chosen, epoch, worker).backward()
            time.sleep(step_s)  # computing, emulated
            optimizer.step()
            os.write(steps, f"{epoch},{' '.join(map(str, chosen.tolist()))}\n".encode())


if __name__ == "__main__":
    main()
