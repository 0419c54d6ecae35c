"""An engine whose fork server outlives a run: starting torch is paid for once, not once a test."""

import time

import psutil

from paceline.comm import Address
from paceline.engines import LocalEngine
from paceline.engines.base import RoleSpec
from paceline.engines.local_agent import LocalAgent

__all__ = ["KeptEngine"]

_PATIENCE_S = 10.0


class _RememberingAgent(LocalAgent):
    """Knows which role it started last."""

    def __init__(self) -> None:
        super().__init__()
        self.last: RoleSpec | None = None

    def start(self, spec: RoleSpec) -> None:
        """See Agent."""
        self.last = spec
        super().start(spec)


class KeptEngine(LocalEngine):
    """Use it for one run after the other; `close` ends a run's roles, `shut_down` the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.local.close()  # it has started nothing yet
        self.local: _RememberingAgent = _RememberingAgent()
        self.local.have_server()  # before the first test looks which processes there are

    @property
    def secret(self) -> bytes:
        """Of the run that was started last."""
        assert self.local.last is not None, "no run was started yet"
        return bytes.fromhex(self.local.last.secret)

    def listening(self, link: str = "auto") -> dict[str, Address]:
        """Where the servers and the controller of that run listen, by name.

        Args:
            link: "auto", or "tcp": by TCP only, which the controller does not listen on.
        """
        assert self.local.last is not None
        found = {name: _address_of(pid) for name, pid in self.pids().items() if name.startswith("server:")}
        if link == "tcp":
            return {name: Address(unix=None, host=at.host, port=at.port) for name, at in found.items()}
        return {**found, "controller": Address.from_json(self.local.last.controller)}

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


def _address_of(pid: int) -> Address:
    """Where a server listens, as the kernel says."""
    process = psutil.Process(pid)
    ports = [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    bound = [str(each.laddr).lstrip("@\0") for each in process.net_connections("unix")]
    names = [name for name in bound if name.startswith("paceline-")]
    return Address(unix=names[0] if names else None, host="127.0.0.1", port=ports[0])
