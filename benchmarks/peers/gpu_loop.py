"""A training loop on a GPU in plain PyTorch: one process alone, or DistributedDataParallel.

Two processes of DDP on one GPU use gloo: NCCL refuses two ranks on one device.
"""

import os
import sys

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import gpu_models, peers


def steps(model: str, batch: int, ranks: int, rounds: int) -> list[float]:
    """Seconds of a step in each round; `batch` is of all ranks together."""
    return peers.spawn(__name__, model, batch // ranks, rounds, ranks=ranks)


def main(name: str, batch: int, rounds: int) -> None:
    """A child process."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = gpu_models.build(name)
    if ranks > 1:
        store = f"file://{os.environ['BENCH_STORE']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        model = DistributedDataParallel(model)
    step = gpu_models.step_of(model, gpu_models.optimizer(name, model), *gpu_models.inputs(name, batch))
    peers.tell(gpu_models.timed(step, rounds)[0])
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
