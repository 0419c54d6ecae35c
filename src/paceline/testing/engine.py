"""An engine whose fork server outlives a run: starting torch is paid for once, not once a test."""

import signal
import time

import psutil

from paceline.comm import Address
from paceline.engines import LocalEngine
from paceline.engines.base import RoleSpec

__all__ = ["KeptEngine"]

_PATIENCE_S = 10.0


class KeptEngine(LocalEngine):
    """Use it for one run after the other; `close` ends a run's roles, `shut_down` the engine."""

    def __init__(self) -> None:
        super().__init__()
        self._last: RoleSpec | None = None
        self.have_server()  # before the first test looks which processes there are

    def start(self, spec: RoleSpec) -> None:
        """See Engine."""
        self._last = spec
        super().start(spec)

    @property
    def secret(self) -> bytes:
        """Of the run that was started last."""
        assert self._last is not None, "no run was started yet"
        return bytes.fromhex(self._last.secret)

    def listening(self, link: str = "auto") -> dict[str, Address]:
        """Where the servers and the controller of that run listen, by name.

        Args:
            link: "auto", or "tcp": by TCP only, which the controller does not listen on.
        """
        assert self._last is not None
        found = {name: _address_of(pid) for name, pid in self.pids().items() if name.startswith("server:")}
        if link == "tcp":
            return {name: Address(unix=None, host=at.host, port=at.port) for name, at in found.items()}
        return {**found, "controller": Address.from_json(self._last.controller)}

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


def _address_of(pid: int) -> Address:
    """Where a server listens, as the kernel says."""
    process = psutil.Process(pid)
    ports = [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    bound = [str(each.laddr).lstrip("@\0") for each in process.net_connections("unix")]
    names = [name for name in bound if name.startswith("paceline-")]
    return Address(unix=names[0] if names else None, host="127.0.0.1", port=ports[0])
