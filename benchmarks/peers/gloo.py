"""torch.distributed on gloo, two processes on one host.

sendrecv   rank 0 is the worker and sends its gradient; rank 1 receives it into a buffer that it
           keeps, makes the SGD step, and sends the parameters back into the worker's own.
allreduce  both ranks all-reduce their gradients in place. The SGD step that would follow on each
           rank is *not* in it, which favours gloo by one update pass.
"""

import os
import sys

import torch
import torch.distributed as dist

from benchmarks import peers


def rounds(n: int, how: str, rounds: int) -> list[float]:
    """Seconds of each round of `n` float32; `how` is "sendrecv" or "allreduce"."""
    return peers.spawn(__name__, n, how, rounds, ranks=2)


def main(n: int, how: str, rounds: int) -> None:
    """A child process."""
    rank = int(os.environ["RANK"])
    store = f"file://{os.environ['BENCH_STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    if n < 2**20:
        # Waking a second thread for so little makes gloo slower, and it should be at its best here.
        torch.set_num_threads(1)
    parameters, gradient = torch.ones(n), torch.full((n,), 1e-3)

    def allreduce() -> None:
        dist.all_reduce(gradient)

    def worker() -> None:
        dist.send(gradient, 1)
        dist.recv(parameters, 1)

    def server() -> None:
        dist.recv(gradient, 0)
        parameters.add_(gradient, alpha=-peers.LEARNING_RATE)
        dist.send(parameters, 0)

    if how == "allreduce":
        # Summed in place round after round, anything but zero would grow without end. `fill_`
        # rather than `zeros`: it has pages of its own, as a real gradient has.
        gradient.fill_(0)
        one_round = allreduce
    else:
        one_round = server if rank else worker
    dist.barrier()
    peers.tell(peers.timed(one_round, rounds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
