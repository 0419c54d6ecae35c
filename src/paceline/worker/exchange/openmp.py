"""Let torch's threads go while a worker waits for servers of its own host.

After every parallel region GNU OpenMP's threads look for the next one without sleeping, for milliseconds:
good between two layers, but when a step ends it takes the cores from the servers that update the model.
"""

import ctypes
import os
from collections.abc import Callable

__all__ = ["make_rest", "no_rest"]

_SOFT = 1  # omp_pause_soft: settings are kept
_MOST_THREADS = 32
"""Measured with up to 16; to start very many again takes longer than they are in the way."""
_LONG_EXCHANGE_BYTES = 4 << 20
"""An update of less is over before it is worth it."""


def make_rest(nbytes: int, threads: int) -> Callable[[], object]:
    """What to call before waiting for an update of so many bytes: ends the calling thread's other threads,
    which the next parallel operation starts again (0.1 ms together). Nothing, where that does not pay."""
    if not 1 < threads <= _MOST_THREADS or nbytes < _LONG_EXCHANGE_BYTES:
        return no_rest
    try:  # the one that torch has loaded, if it is this one
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        pause = library.omp_pause_resource_all  # OpenMP 5
    except (AttributeError, OSError):
        return no_rest
    return lambda: pause(_SOFT)


def no_rest() -> None:
    """Leave them as they are."""
