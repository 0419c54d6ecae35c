"""The threads that share the slices of a shard.

torch's own threads inside an operation would do as well on an idle machine, but they spin at barriers, and
a server shares its cores with workers (docs/decisions.md, 8 and 67). No two lanes run on one core while
another is idle: left to itself, the scheduler wakes a thread beside the one that called it, and an update
is over before it looks again.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["Lanes"]


class Lanes:
    """The calling thread and `count - 1` more."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads: list[int] = []
        self._pool = ThreadPoolExecutor(count - 1, "lane", self._begin) if count > 1 else None
        self._core = -1
        """Where the calling thread ran when the others were sent elsewhere."""

    def _begin(self) -> None:
        torch.set_grad_enabled(False)
        self._threads.append(threading.get_native_id())
        self._core = -1

    def each(self, number: int, work: Callable[[int], None]) -> None:
        """Call `work` with 0 to `number - 1`, without grad; whoever has time takes the next."""
        rest = iter(range(number))
        if self._pool is None and not torch.is_grad_enabled():
            _take(rest, work)
            return
        self._spread()
        with torch.no_grad():
            others = []
            if self._pool is not None:
                others = [self._pool.submit(_take, rest, work) for _ in range(1, self._count)]
            _take(rest, work)
            for other in others:
                other.result()

    def _spread(self) -> None:
        """Give every other thread cores of its own, beside the one that this thread is on."""
        if _core is None or not self._threads or (core := _core()) == self._core:
            return
        self._core = core
        cores = sorted(os.sched_getaffinity(0) - {core})
        if len(cores) < len(self._threads):
            return  # fewer cores than lanes: the scheduler does what it can
        with contextlib.suppress(OSError):  # cores taken from this process a moment ago
            for n, thread in enumerate(self._threads):
                os.sched_setaffinity(thread, cores[n :: len(self._threads)])

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _take(rest: Iterator[int], work: Callable[[int], None]) -> None:
    for i in rest:
        work(i)


_core: Callable[[], int] | None = None
if hasattr(os, "sched_setaffinity"):  # Linux
    _core = getattr(ctypes.CDLL(None), "sched_getcpu", None)
