"""Forks: the fork server's job, done by this very process, for programs that only it knows."""

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from paceline.engines.forkserver import kill_group

__all__ = ["Forks"]


class Forks:
    """Forks roles from this process, and waits for each in a thread."""

    def __init__(self, control: socket.socket, program: Callable[[], None]) -> None:
        # The first torch.optim object of a process imports this, for seconds: once here, not in each role.
        import torch._dynamo  # noqa: F401

        self._control = control
        self._program = program
        self._threads: list[threading.Thread] = []
        self._running: set[int] = set()
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def handle(self, message: dict[str, Any]) -> None:
        """The same messages as the fork server's."""
        if "start" in message:
            self._fork(message["start"])
        elif "kill" in message and message["kill"] in self._running:
            kill_group(message["kill"], message["signal"])

    def _fork(self, spec: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                from paceline.engines.role import become

                # The parent may have used its thread pool, which does not survive a fork.
                config = {**spec["config"], "threads": 1}
                code = become({**spec, "config": config}, self._program)
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                os._exit(code)
        self._running.add(pid)
        self._say({"started": f"{spec['role']}:{spec['rank']}", "pid": pid})
        thread = threading.Thread(target=self._wait, args=(pid,), name=f"wait {pid}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _wait(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        self._running.discard(pid)
        kill_group(pid, signal.SIGKILL)
        self._say({"exited": pid, "status": status})

    def close(self) -> None:
        """Kill what runs, and wait for it."""
        for pid in list(self._running):
            kill_group(pid, signal.SIGKILL)
        for thread in self._threads:
            thread.join(timeout=5)
        self._control.close()

    def said(self) -> bytes:
        """What was said since the last call; the socket only shows that there is something."""
        found = b""
        with contextlib.suppress(queue.Empty):
            while True:
                found += self._said.get_nowait()
        return found

    def _say(self, message: dict[str, Any]) -> None:
        """Does not block: the same thread reads it."""
        self._said.put(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(OSError):  # a full socket shows already that there is something
            self._control.send(b".", socket.MSG_DONTWAIT)
