"""CPU cores that a worker keeps to itself (`--pin`)."""

import os
from collections.abc import Collection

__all__ = ["cores_of", "pin_to_cores"]


def pin_to_cores(rank: int, threads: int) -> None:
    """Keep this process, and the threads that it starts from now on, on cores of its own.

    Does nothing where the system cannot (macOS); the plan warns of that.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores_of(rank, threads, os.sched_getaffinity(0)))


def cores_of(rank: int, threads: int, allowed: Collection[int]) -> set[int]:
    """The cores of one worker: the next ones behind those of the worker before it.

    Where there are fewer cores than threads of all workers, the count begins again at the first core, so
    that every core has as many threads as the others, or one more.

    Args:
        threads: number of threads of each worker.
        allowed: cores that the run may use.
    """
    there = sorted(allowed)
    return {there[(rank * threads + i) % len(there)] for i in range(threads)}
