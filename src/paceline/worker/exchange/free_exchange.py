"""dogwild's exchange thread: it carries what changed to the servers and back, at its own pace.

It shares only the parameters' memory with the training loop, without locks: an element that both write at
the same moment keeps one of the two writes. That is the mode's bargain.
"""

import threading
from collections.abc import Callable

__all__ = ["FreeExchange"]


class FreeExchange:
    """Calls `exchange` again and again in a thread of its own, while there is something to carry."""

    def __init__(self, exchange: Callable[[], None]) -> None:
        self._exchange = exchange
        self._news = threading.Event()
        self._ending = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to carry. Raises what the thread died of, if it did."""
        if self._error is not None:
            raise self._error
        self._news.set()

    def stop(self) -> None:
        """End the thread after the exchange it is in."""
        self._ending = True
        self._news.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                self._news.wait()
                self._news.clear()
                if self._ending:
                    return
                self._exchange()
        except BaseException as error:
            self._error = error
