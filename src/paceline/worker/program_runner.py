"""Runs the user's script or module as Python itself would."""

import atexit
import contextlib
import gc
import io
import multiprocessing.util
import runpy
import sys
import threading
from collections.abc import Iterator, Sequence

__all__ = ["begin_program", "end_program", "exit_code", "run_program"]


def begin_program() -> None:
    """Forget what whoever forked this process wanted to be called at its end, and what it holds in memory:
    its files are not this program's, and to look at every object at the end takes time."""
    gc.freeze()
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def end_program() -> None:
    """What Python does when a program ends, in a process that goes on for a while: wait for threads, call
    what is registered with atexit, and write what open files still hold."""
    for call in reversed(getattr(threading, "_threading_atexits", [])):  # thread pools end here
        call()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for each in gc.get_objects():
        if issubclass(type(each), io.TextIOBase | io.BufferedIOBase):
            with contextlib.suppress(Exception):
                each.flush()
    # Only then: of what is in a cycle, the file itself may be closed before the text that it is to get.
    gc.collect()


def exit_code(error: SystemExit) -> int:
    """Of a process that ends with this; what is not a number is written to standard error, as Python does."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{error.code}\n")
    return 1


def run_program(script: str, args: Sequence[str], *, search: str, module: bool) -> None:
    """Run a script as `python script args`, or a module as `python -m script args`, to its end.

    Args:
        search: what stands first in `sys.path`: the script's directory, or where the run was started.
        module: `script` is a module's name.
    """
    with _surroundings(script, args, search):
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def _surroundings(script: str, args: Sequence[str], search: str) -> Iterator[None]:
    """sys.argv and sys.path as Python would have them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *args]  # of a module, runpy puts its file's path there
    sys.path[0:0] = [search]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
