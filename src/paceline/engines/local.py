"""Roles as processes of this machine."""

import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from paceline.engines.base import Exit, Handover, RoleSpec, Succession
from paceline.engines.forkserver import kill_group
from paceline.engines.outbox import Outbox

__all__ = ["LocalEngine"]

_CLOSE_S = 5.0


class LocalEngine:
    """Starts roles from a fork server with torch loaded, or, for a program that only this process
    knows (a notebook's functions), by forking this process itself.

    Args:
        program: what workers run instead of a script; given, roles are forks of this process.
        handover: go on with the fork server and the roles of a process that died.
    """

    def __init__(
        self, program: Callable[[], None] | None = None, *, handover: Handover | None = None
    ) -> None:
        self._running: dict[int, tuple[str, int, int]] = {}
        self._waiting: list[tuple[str, int, int]] = []
        self._signals: list[tuple[tuple[str, int, int], int]] = []
        self._found: list[Exit] = []
        self._buffer = b""
        self._gone = False
        """There is no fork server. The first one starts when it is needed: by then the caller has set its
        signal handlers."""
        self._forks = False
        """Whether the fork server has forked something: it is past loading torch."""
        self._succession: Succession | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._forked: _Forks | None = None
        if handover is None:
            self._control, theirs = socket.socketpair()
            if program is None:
                theirs.close()
                self._gone = True
            else:
                self._forked = _Forks(theirs, program)
        else:
            self._control = handover.control
            self._succession = handover.succession
            for left in handover.roles:
                who = (left.role, left.rank, left.incarnation)
                if left.status is None:
                    self._running[left.pid] = who
                else:
                    self._found.append(_exit(who, left.status))
        self._outbox = Outbox(self._control)

    def _start_server(self) -> None:
        """Start a fork server."""
        self._buffer = b""
        self._gone = self._forks = False
        self._control, theirs = socket.socketpair()
        self._outbox = Outbox(self._control)
        start = f"from paceline.engines.forkserver import main; main({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        if self._succession is not None:
            self.guard(self._succession)

    def start(self, spec: RoleSpec) -> None:
        """See Engine."""
        self.have_server()
        self._waiting.append((spec.role, spec.rank, spec.incarnation))
        self._say({"start": spec.to_json()})

    def have_server(self) -> None:
        """Start a fork server if there is none yet, or it was killed."""
        if self._gone:
            self._control.close()
            if self._process is not None:
                self._process.wait()
            self._start_server()

    def fileno(self) -> int:
        """See Engine."""
        return self._control.fileno()

    def wait(self, timeout_s: float) -> None:
        """Block until `exits` may have news, at most this long."""
        select.select([self._control], [], [], timeout_s)

    def exits(self) -> list[Exit]:
        """See Engine."""
        found, self._found = self._found, []
        self._outbox.flush()
        if self._outbox.stalled:
            self._give_up()
        while select.select([self._control], [], [], 0)[0]:
            data = b""
            with contextlib.suppress(ConnectionResetError):  # it left something unread
                data = self._control.recv(1 << 16)
            if data and self._forked is not None:
                data = self._forked.said()
            elif not data:
                # The fork server itself was killed: so were its roles.
                self._gone = self._forked is None
                gone = [*self._running.values(), *self._waiting]
                self._running.clear()
                self._waiting.clear()
                return [*found, *(Exit(*who, None, signal.SIGKILL) for who in gone)]
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "started" in message:
                    self._forks = True
                    who = self._waiting.pop(0)
                    self._running[message["pid"]] = who
                    for number in [number for waiting, number in self._signals if waiting == who]:
                        self._say({"kill": message["pid"], "signal": number})
                    self._signals = [each for each in self._signals if each[0] != who]
                else:
                    found.append(_exit(self._running.pop(message["exited"]), message["status"]))
            self._outbox.flush()
        return found

    def _give_up(self) -> None:
        """The fork server hangs: it ends with its roles, which is then seen as any other end of it."""
        if self._process is not None:
            self._process.kill()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def pids(self) -> dict[str, int]:
        """See Engine."""
        return {f"{role}:{rank}": pid for pid, (role, rank, _) in self._running.items()}

    def starting(self) -> list[tuple[str, int]]:
        """See Engine."""
        return [(role, rank) for role, rank, _ in self._waiting]

    def kill(self, role: str, rank: int, signal: int) -> None:
        """See Engine."""
        for pid, (r, k, _) in self._running.items():
            if (r, k) == (role, rank):
                self._say({"kill": pid, "signal": signal})
        asked = [(who, signal) for who in self._waiting if who[:2] == (role, rank)]
        self._signals += [each for each in asked if each not in self._signals]

    def guard(self, succession: Succession | None) -> None:
        """See Engine. Roles that are forks of this process cannot be guarded: they know no other."""
        self._succession = succession
        if succession is None:
            self._say({"guard": None})
            return
        if self._gone:
            self.have_server()  # which is then told
            return
        wish = asdict(succession)
        descriptors = [wish.pop("listener"), wish.pop("lock")]
        self._outbox.put({"guard": wish}, descriptors)

    def close(self) -> None:
        """See Engine."""
        if self._control.fileno() < 0:
            return
        if self._forked is not None:
            self._forked.close()
            self._control.close()
            return
        self._outbox.drop()  # roles that it has not heard of need not start any more
        self._say({"close": True})
        told = self._outbox.finish(_CLOSE_S)
        if self._process is not None and not (told and self._forks):
            self._process.kill()  # it hangs, or loads torch: what it may have forked ends with it
        if self._process is None:  # it is not our child: its end of the socket closes with it
            self._control.settimeout(_CLOSE_S)
            with contextlib.suppress(OSError):
                while self._control.recv(1 << 16):
                    pass
        self._control.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _say(self, message: dict[str, Any]) -> None:
        if self._forked is not None:
            self._forked.handle(message)
            return
        self._outbox.put(message)


def _exit(who: tuple[str, int, int], status: int) -> Exit:
    """How a process ended, from what `waitpid` said."""
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return Exit(*who, os.WEXITSTATUS(status) if os.WIFEXITED(status) else None, killed)


class _Forks:
    """The fork server's job done by this very process, for programs that only it knows."""

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
