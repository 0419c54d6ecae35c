"""Ctrl-C, SIGTERM and SIGHUP as requests to stop the run."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

__all__ = ["interrupts"]


@contextlib.contextmanager
def interrupts(stop: Callable[[int], None]) -> Iterator[None]:
    """Context manager: these signals call `stop` with their number. Outside the main thread it does
    nothing, since Python handles signals there only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the user wants the run to go on
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda which, _: stop(which)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
