"""torch.distributed.rpc: the parameters live in another process; one `rpc_sync` is a round.

The call carries the gradient, makes the SGD step and returns the parameters. They arrive as a new
tensor; copying them into the worker's model is *not* in the round, which favours RPC by one pass.

As it comes, glibc maps and unmaps every 47 MB buffer, and page faults cost as much as the transfer.
`tuned` raises the thresholds so that the heap keeps and reuses them.
"""

import os
import sys

import torch
from torch.distributed import rpc

from benchmarks import peers

TUNED = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}

parameters = torch.ones(0)
"""The server's; a module's global, because `push_pull` is called by name from the worker."""


def rounds(n: int, rounds: int, *, tuned: bool = False) -> list[float]:
    """Seconds of each push + step + pull of `n` float32."""
    return peers.spawn(__name__, n, rounds, ranks=2, env=TUNED if tuned else None)


def push_pull(gradient: torch.Tensor) -> torch.Tensor:
    """On the server: one SGD step; the parameters after it."""
    return parameters.add_(gradient, alpha=-peers.LEARNING_RATE)


def main(n: int, rounds: int) -> None:
    """A child process."""
    rank = int(os.environ["RANK"])
    global parameters
    if rank == 1:
        parameters = torch.ones(n)
    store = f"file://{os.environ['BENCH_STORE']}"
    rpc.init_rpc(
        f"rank{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=store),
    )
    if rank == 0:
        gradient = torch.full((n,), 1e-3)

        def one_round() -> None:
            rpc.rpc_sync("rank1", push_pull, args=(gradient,))

        peers.tell(peers.timed(one_round, rounds))
    rpc.shutdown()


if __name__ == "__main__":
    # Not `main(…)`: the worker pickles `push_pull` by its module's name, and here that is __main__.
    from benchmarks.peers import torch_rpc

    torch_rpc.main(*map(int, sys.argv[1:]))
