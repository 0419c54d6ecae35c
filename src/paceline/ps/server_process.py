"""ServerProcess: the loop of a server's process, and the role that the server has now.

The main thread reads small frames and updates slices. Links over shared memory are served by it directly, so
a round costs no hand-over between threads; a link that carries payloads itself has a thread that moves its
bytes while the main thread updates.
"""

import sys
import time

import torch

from paceline.comm import Connection
from paceline.comm.lasting import LastingLink
from paceline.ps.config import ServerConfig
from paceline.ps.follower import Follower
from paceline.ps.leader import Leader
from paceline.ps.parts import ServerParts, make_parts

__all__ = ["ServerProcess", "serve"]

_REPORT_S = 0.5
"""Time between two reports of a server to the controller."""
_TICK_S = 0.25
"""Time between two looks around when nothing happens."""
_LOOK_S = 0.01
"""The same while a worker's link is broken: its process may have ended."""


class ServerProcess:
    """Runs a role until it ends; promotes a follower when the controller says so. The main thread only."""

    def __init__(self, parts: ServerParts, role: Leader | Follower) -> None:
        self.role = role
        self._parts = parts
        self._reported_at = 0.0
        parts.hub.handler = role
        # Called, in another thread, when another controller takes over.
        parts.controller.link.watch(lambda fresh: parts.hub.post(lambda: self._controller_back(fresh)))

    def run(self) -> None:
        """Serve until the controller stops this server."""
        parts = self._parts
        try:
            self._meet_controller()
            while self.role.running:
                self.turn()
        finally:
            self.role.close()
            parts.close()

    def turn(self) -> None:
        """One turn of the loop: wait for something to happen, at most for a tick, and see to it."""
        parts = self._parts
        parts.hub.poll(_LOOK_S if parts.attachments.broken else _TICK_S)
        for peer in parts.attachments.lost():
            self.role.worker_lost(peer)
        now = time.monotonic()
        if now - self._reported_at > _REPORT_S:
            self._reported_at = now
            parts.tell_report()
        self.role.tick(now)
        if isinstance(self.role, Follower) and self.role.is_promoted and self.role.running:
            self.role = parts.hub.handler = Leader.succeeding(self.role)

    def _meet_controller(self) -> None:
        self._parts.hub.add(self._parts.controller.link)
        self._parts.controller.introduce()

    def _controller_back(self, fresh: Connection) -> None:
        if not self.role.running:
            fresh.close()
            return
        self._parts.controller.renew(fresh)
        self._meet_controller()
        self.role.controller_back()


def serve(config: ServerConfig, secret: bytes, controller: LastingLink) -> None:
    """Be a server in this process until the controller stops it."""
    if config.import_from is not None:
        sys.path.insert(0, config.import_from)
    torch.set_num_threads(1)  # the shard has its own threads
    torch.set_grad_enabled(False)
    parts = make_parts(config, secret, controller)
    role = Leader.first(parts) if config.lead == config.rank else Follower(parts)
    ServerProcess(parts, role).run()
