"""An engine whose fork server outlives a run: starting torch is paid for once, not once a test."""

import signal
import time

from paceline.engines import LocalEngine

__all__ = ["KeptEngine"]

_PATIENCE_S = 10.0


class KeptEngine(LocalEngine):
    """Use it for one run after the other; `close` ends a run's roles, `shut_down` the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.have_server()  # before the first test looks which processes there are

    def close(self) -> None:
        """Kill the roles of the last run and wait until they are gone."""
        deadline = time.monotonic() + _PATIENCE_S
        self.exits()
        while self._running or self._waiting:
            for role, rank, _ in [*self._running.values(), *self._waiting]:
                self.kill(role, rank, signal.SIGKILL)
            self.wait(0.05)
            self.exits()
            assert time.monotonic() < deadline, f"still running: {self.pids()}"
        self._signals.clear()
        if self._succession is not None:  # no successor for a run that is over
            self.guard(None)

    def shut_down(self) -> None:
        """End the fork server."""
        super().close()
