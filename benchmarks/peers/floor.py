"""The floor: one thread, one update pass (p -= lr * g) and one copy pass, nothing is sent."""

import sys

import torch

from benchmarks import peers


def rounds(n: int, rounds: int) -> list[float]:
    """Seconds of each update + copy of `n` float32."""
    return peers.spawn(__name__, n, rounds)


def main(n: int, rounds: int) -> None:
    """The child process."""
    torch.set_num_threads(1)
    parameters, gradient, copy = torch.ones(n), torch.full((n,), 1e-3), torch.ones(n)

    def one_round() -> None:
        parameters.add_(gradient, alpha=-peers.LEARNING_RATE)
        copy.copy_(parameters)

    peers.tell(peers.timed(one_round, rounds))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
