"""A variable of the environment, for a while."""

import contextlib
import os
from collections.abc import Iterator

__all__ = ["environment"]


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set it in this block; afterwards it is what it was. Not for two threads at once."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
