"""Random numbers: every worker draws its own.

All workers run the same script with the same seed, so without this they would draw the same dropout masks for
different data. At prepare() each worker's global generators (torch's, numpy's, Python's) get a state that
follows from the state the script gave them, the run's seed, the worker, and the update at which it joined.
Worker 0 of a new run keeps the script's own: one worker is plain PyTorch.

What all workers must draw alike (a stream of which each takes its part) is drawn `Apart`.
"""

import hashlib
import random
from typing import Any

import numpy as np
import torch

__all__ = ["Apart", "derive", "keeps_own", "part_generator", "part_ways"]


def derive(own: bytes, *where: int) -> int:
    """A seed of 63 bits that follows from the state a generator has and from the place of who draws."""
    place = "/".join(map(str, where)).encode()
    return int.from_bytes(hashlib.blake2b(own, key=place[:64], digest_size=8).digest()) >> 1


def keeps_own(rank: int, version: int) -> bool:
    """Whether a worker that joins at this version goes on with the script's own random numbers."""
    return rank == 0 and version == 0


def part_ways(seed: int, rank: int, version: int) -> None:
    """Give this worker random numbers of its own.

    Args:
        seed: of the run.
        version: the number of updates that the run had made when the worker joined.
    """
    if keeps_own(rank, version):
        return
    where = (seed, rank, version)
    numpy_state: Any = np.random.get_state()
    torch.manual_seed(derive(_bytes(torch.get_rng_state()), *where))  # on all devices
    np.random.seed(_words(derive(numpy_state[1].tobytes() + bytes([numpy_state[2] % 256]), *where)))
    random.seed(derive(repr(random.getstate()).encode(), *where))


def part_generator(generator: Any, seed: int, rank: int, version: int) -> Any:
    """A worker's own in place of a generator that the script made: a DataLoader's, which seeds its processes.

    The script may use its generator for something else, so that one stays as it is.
    """
    if generator is None or keeps_own(rank, version):
        return generator
    return torch.Generator().manual_seed(derive(_bytes(generator.get_state()), seed, rank, version))


class Apart:
    """Random numbers that follow from a seed alone, apart from the script's: `with apart: …` draws from them.

    It goes on where the last `with` ended, and leaves the global generators as they were.
    """

    def __init__(self, seed: int) -> None:
        mine = _global_states()
        torch.default_generator.manual_seed(seed)
        np.random.seed(_words(seed))
        random.seed(seed)
        self._states = _global_states()
        _put(mine)

    def __enter__(self) -> None:
        self._script = _global_states()
        _put(self._states)

    def __exit__(self, *_: object) -> None:
        self._states = _global_states()
        _put(self._script)


def _global_states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _put(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def _words(seed: int) -> list[int]:
    """As numpy's old generator takes it."""
    return [seed % 2**32, seed >> 32]


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
