"""A DDP process of the chaos benchmark, under torchrun: FOLDER STEPS STEP_MS EVERY.

The same model and emulated step as scripts/chaos.py. Rank 0 keeps a checkpoint every EVERY steps, from which
all begin when torchrun starts them again; every process leaves a line for every step, and its process id.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scripts.chaos import BATCH, build, samples


def main() -> None:
    """Train from the last checkpoint on."""
    folder, steps, step_s, every = (
        *(Path(sys.argv[1]), int(sys.argv[2])),
        *(float(sys.argv[3]) / 1000, int(sys.argv[4])),
    )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A name of its own for every restart: without, processes were refused at the addresses found there.
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*where, is_master=False)  # type: ignore[attr-defined]
    name = f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    attempt = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=size)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    model = build()
    kept = folder / "checkpoint.pt"
    first = 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"])
        first = state["step"]
    points, labels = samples(60)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    record = os.open(folder / f"steps-{rank}.csv", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for step in range(first, steps):
        at = (step * size + rank) * BATCH % len(points)
        began = time.monotonic()
        loss = nn.functional.cross_entropy(parallel(points[at : at + BATCH]), labels[at : at + BATCH])
        time.sleep(step_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(record, f"{began:.6f},{time.monotonic():.6f},{step}\n".encode())
        if rank == 0 and (step + 1) % every == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, folder / "checkpoint.tmp")
            os.replace(folder / "checkpoint.tmp", kept)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
