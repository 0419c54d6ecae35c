"""An engine whose fork server outlives a run: starting torch is paid for once, not once a test."""

import time

from paceline.engines import LocalEngine

__all__ = ["KeptEngine"]

_PATIENCE_S = 10.0


class KeptEngine(LocalEngine):
    """Use it for one run after the other; `close` ends a run's roles, `shut_down` the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.local.have_server()  # before the first test looks which processes there are

    def close(self) -> None:
        """Kill the roles of the last run and wait until they are gone."""
        deadline = time.monotonic() + _PATIENCE_S
        self.local.poll()
        while left := [*map(_parts, self.pids()), *self.local.starting()]:
            for role, rank in left:
                self.local.end(role, rank)
            self.wait(0.05)
            self.local.poll()
            assert time.monotonic() < deadline, f"still running: {self.pids()}"
        if self.local.guarded:  # no successor for a run that is over
            self.local.guard(None)

    def shut_down(self) -> None:
        """End the fork server."""
        super().close()


def _parts(name: str) -> tuple[str, int]:
    role, _, rank = name.partition(":")
    return role, int(rank)
