"""A training loop in plain PyTorch: one process alone, or DistributedDataParallel on gloo."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import models, peers


def steps(model: str, batch: int, ranks: int, steps: int) -> list[float]:
    """Seconds of each step of `benchmarks.models.build(model)`; `batch` is of each rank."""
    return peers.spawn(__name__, model, batch, steps, ranks=ranks)


def main(name: str, batch: int, steps: int) -> None:
    """A child process."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = models.build(name)
    loader = models.loader(name, batch=batch, steps=steps, workers=ranks)
    if ranks == 1:
        peers.tell(models.timed_steps(model, models.optimizer(model), loader, steps))
        return
    # The ranks compute at the same time: share the cores, as torchrun users are told to.
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    store = f"file://{os.environ['BENCH_STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    model = DistributedDataParallel(model)
    sampler: DistributedSampler[object] = DistributedSampler(loader.dataset)
    share = DataLoader(loader.dataset, batch_size=batch, sampler=sampler)
    peers.tell(models.timed_steps(model, models.optimizer(model), share, steps))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
