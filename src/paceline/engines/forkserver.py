"""A process with torch loaded that forks roles.

`main(FD)` in a fresh interpreter: FD is a stream socket to the engine. Lines of JSON: in come
{"start": spec} and {"kill": pid, "signal": n}, out go {"started": name, "pid": pid} and {"exited": pid,
"status": wait status}. When the engine closes the socket, or dies, all roles are killed.

Python's own forkserver would pickle its arguments, import the parent's __main__ and start a resource
tracker; here a role is the same JSON that the other engines carry (docs/decisions.md).
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

__all__ = ["kill_group", "main"]


class ForkServer:
    """Forks roles on request and reports their ends."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._buffer = b""
        self._running: set[int] = set()
        # SIGCHLD wakes the selector through this pipe.
        self._wakened, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waker = waker
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> None:
        """Serve until the engine is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wakened, selectors.EVENT_READ)
            try:
                while True:
                    for key, _ in selector.select():
                        if key.fileobj is self._control:
                            data = self._control.recv(1 << 16)
                            if not data:
                                return
                            *lines, self._buffer = (self._buffer + data).split(b"\n")
                            for line in lines:
                                self._handle(json.loads(line))
                        else:
                            os.read(self._wakened, 4096)
                            self._reap()
            finally:
                for pid in self._running:
                    kill_group(pid, signal.SIGKILL)

    def _handle(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._fork(message["start"])
        elif message["kill"] in self._running:
            kill_group(message["kill"], message["signal"])

    def _fork(self, spec: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(self._wakened)
                os.close(self._waker)
                self._control.close()
                from paceline.engines.role import become

                code = become(spec)
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        self._running.add(pid)
        self._say({"started": f"{spec['role']}:{spec['rank']}", "pid": pid})

    def _reap(self) -> None:
        for pid in list(self._running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._running.discard(pid)
                kill_group(pid, signal.SIGKILL)  # its own children, if it left any
                self._say({"exited": pid, "status": status})

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")


def kill_group(pid: int, number: int) -> None:
    """A role leads its own process group (once it has got that far)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main(fd: int) -> None:
    """Load what every role needs, once, then fork."""
    control = socket.socket(fileno=fd)
    # The first torch.optim object of a process imports torch._dynamo, which costs as much as torch.
    import torch
    import torch._dynamo

    import paceline.engines.role  # noqa: F401

    torch.set_num_threads(1)  # no thread pool may exist before a fork
    gc.collect()
    gc.freeze()  # roles need not scan what is loaded here, nor touch, and so unshare, its pages
    try:
        ForkServer(control).run()
    finally:
        os._exit(0)  # libraries that complain when an interpreter ends have nothing to tell us
