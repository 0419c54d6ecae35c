"""The script that `startup` launches: one training step of the digits CNN, then wait to be seen.

Under torchrun it uses DDP, otherwise `paceline.prepare`. After its first step a worker writes the
time to the folder in BENCH_STAMPS, and stays until the benchmark has looked at its memory.
"""

import json
import os
import time
from pathlib import Path

import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import models


def main() -> None:
    """Train one step and leave the stamp."""
    model, batches = models.build("digits"), models.loader("digits", batch=64, steps=1, workers=2)
    optimizer = models.optimizer(model)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    else:
        import paceline

        model, optimizer, batches = paceline.prepare(model, optimizer, batches)
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        break
    stamp(Path(os.environ["BENCH_STAMPS"]), int(os.environ["RANK"]))
    if under_torchrun:
        dist.destroy_process_group()


def stamp(folder: Path, rank: int) -> None:
    """Leave `rank`'s time and process id, and wait until the benchmark has seen them."""
    text = json.dumps({"rank": rank, "at": time.monotonic(), "pid": os.getpid()})
    hidden = folder / f".{rank}"
    hidden.write_text(text)
    hidden.rename(folder / f"rank-{rank}.json")
    while not (folder / "seen").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main()
