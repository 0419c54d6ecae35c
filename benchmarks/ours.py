"""The Paceline side of every case: one function a benchmark, through the real client and servers.

Each call starts a fresh run and ends it. Warm-up rounds are run and not returned.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """What launching a script cost."""

    seconds: float
    """From the command to the end of the last worker's first step."""
    memory_mb: dict[str, float]
    """Role ("worker:0", "server:0", "controller", …) to its unique memory (USS): what the machine
    would get back if that role ended."""


def exchange(n: int, *, link: str, mode: str, workers: int, rounds: int) -> list[float]:
    """Push a gradient of `n` float32, SGD step (no momentum), pull; one server.

    Args:
        n: number of float32 parameters, in one tensor.
        link: "shm" or "tcp".
        mode: "asp" (parameters copied out) or "bsp" (read in place where the link allows).
        workers: how many push at the same time.
        rounds: rounds of each worker.

    Returns:
        Seconds of each round as a worker sees it, of all workers, taken while all were running:
        at least `rounds` numbers. The gradient lies in the slot before a round begins.
    """
    raise NotImplementedError


def train(
    model: str, *, workers: int, servers: int, mode: str, batch: int, steps: int
) -> list[float]:
    """Train `benchmarks.models.build(model)` with `benchmarks.models.timed_steps`, prepared.

    Args:
        model: "resnet18" or "digits".
        batch: of each worker.

    Returns:
        Seconds of each of `steps` steps on worker 0.
    """
    raise NotImplementedError


def first_step(script: Path, *, workers: int, servers: int) -> FirstStep:
    """Launch `script` (benchmarks/first_step.py) with `paceline run`, until its first step is done.

    `benchmarks.peers.torchrun.launch` takes any command and does the timing.
    """
    raise NotImplementedError
