"""LocalAgent: roles as processes of this host, children of a fork server or of this process."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from paceline.engines.base import AgentEvent, Exited, RoleSpec, Started
from paceline.engines.forks import Forks
from paceline.engines.handover import Handover, Succession
from paceline.engines.outbox import Outbox

__all__ = ["LocalAgent"]

_CLOSE_S = 5.0


class LocalAgent:
    """Starts roles from a fork server with torch loaded, or, for a program that only this process
    knows (a notebook's functions), by forking this process itself. Roles die with either.

    Args:
        program: what workers run instead of a script; given, roles are forks of this process.
        handover: go on with the fork server and the roles of a process that died.
    """

    def __init__(
        self, program: Callable[[], None] | None = None, *, handover: Handover | None = None
    ) -> None:
        self._running: dict[int, tuple[str, int, int]] = {}
        self._waiting: list[tuple[str, int, int]] = []
        self._doomed: set[tuple[str, int, int]] = set()
        """Roles that are killed as soon as they run."""
        self._found: list[AgentEvent] = []
        self._buffer = b""
        self._gone = False
        """There is no fork server. The first one starts when it is needed: by then the caller has set its
        signal handlers."""
        self._forks = False
        """Whether the fork server has forked something: it is past loading torch."""
        self._succession: Succession | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._forked: Forks | None = None
        self._unused: socket.socket | None = None
        """Other end of `_control` while there is no fork server: nothing comes from it, not even its end."""
        if handover is None:
            self._control, theirs = socket.socketpair()
            if program is None:
                self._unused, self._gone = theirs, True
            else:
                self._forked = Forks(theirs, program)
        else:
            self._control = handover.control
            self._succession = handover.succession
            for left in handover.roles:
                who = (left.role, left.rank, left.incarnation)
                if left.status is None:
                    self._running[left.pid] = who
                    self._found.append(Started(*who, left.pid))
                else:
                    self._found.append(_exited(who, left.status))
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
        """See Agent."""
        self.have_server()
        self._waiting.append((spec.role, spec.rank, spec.incarnation))
        self._say({"start": spec.to_json()})

    def have_server(self) -> None:
        """Start a fork server if there is none yet, or it was killed."""
        if self._gone:
            self._leave_server()
            self._start_server()

    def _leave_server(self) -> None:
        """The fork server is gone, or there was none."""
        self._control.close()
        if self._unused is not None:
            self._unused.close()
            self._unused = None
        if self._process is not None:
            self._process.wait()
            self._process = None

    def fileno(self) -> int:
        """See Agent."""
        return self._control.fileno()

    def poll(self) -> list[AgentEvent]:
        """See Agent."""
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
                if self._gone:
                    self._leave_server()
                    self._control, self._unused = socket.socketpair()
                    self._outbox = Outbox(self._control)
                gone = [*self._running.values(), *self._waiting]
                self._running.clear()
                self._waiting.clear()
                self._doomed.clear()
                return [*found, *(Exited.of(*who, None, signal.SIGKILL) for who in gone)]
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "started" in message:
                    self._forks = True
                    who, pid = self._waiting.pop(0), message["pid"]
                    self._running[pid] = who
                    found.append(Started(*who, pid))
                    if who in self._doomed:
                        self._doomed.discard(who)
                        self._kill(pid)
                else:
                    found.append(_exited(self._running.pop(message["exited"]), message["status"]))
            self._outbox.flush()
        return found

    def _give_up(self) -> None:
        """The fork server hangs: it ends with its roles, which is then seen as any other end of it."""
        if self._process is not None:
            self._process.kill()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def pids(self) -> dict[str, int]:
        """Process ids of running roles by name."""
        return {f"{role}:{rank}": pid for pid, (role, rank, _) in self._running.items()}

    def starting(self) -> list[tuple[str, int]]:
        """Role and rank of processes that were asked for and do not run yet."""
        return [(role, rank) for role, rank, _ in self._waiting]

    def end(self, role: str, rank: int) -> None:
        """See Agent."""
        for pid, who in self._running.items():
            if who[:2] == (role, rank):
                self._kill(pid)
        self._doomed.update(who for who in self._waiting if who[:2] == (role, rank))

    def guard(self, succession: Succession | None) -> None:
        """See Guardian. Not for roles that are forks of this process."""
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

    @property
    def guarded(self) -> bool:
        """Whether a successor is to be started if this process dies."""
        return self._succession is not None

    def close(self) -> None:
        """See Agent."""
        if self._control.fileno() < 0:
            return
        if self._gone:
            self._leave_server()
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

    def _kill(self, pid: int) -> None:
        self._say({"kill": pid, "signal": signal.SIGKILL})

    def _say(self, message: dict[str, Any]) -> None:
        if self._forked is not None:
            self._forked.handle(message)
            return
        self._outbox.put(message)


def _exited(who: tuple[str, int, int], status: int) -> Exited:
    """How a process ended, from what `waitpid` said."""
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return Exited.of(*who, os.WEXITSTATUS(status) if os.WIFEXITED(status) else None, killed)
