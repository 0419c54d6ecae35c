"""A process with torch loaded that forks roles, and guards the controller.

`main(FD)` in a fresh interpreter: FD is a stream socket to the engine. Lines of JSON: in come
{"start": spec}, {"kill": pid, "signal": n}, {"guard": what takes over} with its descriptors, and {"close":
true}; out go {"started": name, "pid": pid} and {"exited": pid, "status": wait status}.

When the engine closes, all roles are killed. When it dies without a word, so are they, unless it asked to be
guarded: then the roles go on, and a fork of this process takes over (`Handover`).

Python's own forkserver would pickle its arguments, import the parent's __main__ and start a resource
tracker; here a role is the same JSON that the other engines carry (docs/decisions.md).
"""

import array
import collections
import contextlib
import gc
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.comm.loading import load
from paceline.engines.handover import Handover, Left, Succession
from paceline.engines.mps import Mps
from paceline.storage.plain_files import append_to

__all__ = ["kill_group", "main", "outlive_sigterm"]

_MOST_DESCRIPTORS = 2
_NOT_STARTED = 71
"""Exit code of a role that could not be forked (EX_OSERR)."""
_MOST_HEIRS, _WITHIN_S = 10, 60.0
"""More controllers than this that die so soon one after the other would not be the last."""


class ForkServer:
    """Forks roles on request and reports their ends."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._buffer = b""
        self._descriptors: list[int] = []
        """That came with a message which is not dealt with yet."""
        self._running: dict[int, tuple[str, int, int]] = {}
        self._left: dict[tuple[str, int], Left] = {}
        """The last process of each role and rank."""
        self._succession: Succession | None = None
        self._heirs: set[int] = set()
        self._mps: Mps | None = None
        self._asked_for_mps = False
        self._failed = 0
        """Counts roles that could not be forked, downwards: each gets a number that no process has."""
        self._takeovers: collections.deque[float] = collections.deque(maxlen=_MOST_HEIRS)
        # SIGCHLD wakes the selector through this pipe.
        self._wakened, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waker = waker
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> None:
        """Serve until the engine is gone and no successor takes over."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wakened, selectors.EVENT_READ)
            try:
                while True:
                    for key, _ in selector.select():
                        if key.fileobj is self._control:
                            dead = self._control
                            if not self.receive():
                                if not self._find_heir():
                                    return
                                selector.unregister(dead)
                                dead.close()
                                selector.register(self._control, selectors.EVENT_READ)
                        else:
                            os.read(self._wakened, 4096)
                            self._reap()
            finally:
                for pid in self._running:
                    kill_group(pid, signal.SIGKILL)
                if self._mps is not None:
                    for pid in self._running:
                        os.waitpid(pid, 0)  # it uses the service until it has ended
                    self._mps.stop()

    def receive(self) -> bool:
        """Deal with what the engine says. False: it has gone."""
        room = socket.CMSG_LEN(_MOST_DESCRIPTORS * 4)
        data: bytes = b""
        with contextlib.suppress(ConnectionResetError):  # it died and left something unread
            data, ancillary, _, _ = self._control.recvmsg(1 << 16, room, socket.MSG_CMSG_CLOEXEC)
            for _, _, rights in ancillary:
                self._descriptors.extend(array.array("i", rights))
        if not data:
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if any("close" in message for message in messages):  # roles before it need not start any more
            self._succession = None
            return False
        for message in messages:
            self._handle(message)
        return True

    def _handle(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._fork(message["start"])
        elif "guard" in message:
            self._be_guard(message["guard"])
        elif message["kill"] in self._running:
            kill_group(message["kill"], message["signal"])

    def _fork(self, spec: dict[str, Any]) -> None:
        def be_role() -> int:
            from paceline.engines.role import become

            self.release()
            return become(spec, parent=me)

        if spec.get("mps") and not self._asked_for_mps:
            self._asked_for_mps = True
            self._mps = Mps.start()
        me = os.getpid()
        who = (spec["role"], spec["rank"], spec["incarnation"])
        try:
            pid = _forked(be_role)
        except OSError as error:  # no more processes, or no memory for one
            self._not_started(spec, error)
            return
        self._running[pid] = who
        self._left[who[:2]] = Left(*who, pid, None)
        self._say({"started": f"{spec['role']}:{spec['rank']}", "pid": pid})

    def _not_started(self, spec: dict[str, Any], error: OSError) -> None:
        """Say so in the role's log, and have it count as a role that ended."""
        with contextlib.suppress(OSError), open(append_to(Path(spec["log"])), "a") as log:
            log.write(f"{spec['role']}:{spec['rank']} could not be started: {error}\n")
        self._failed -= 1
        self._say({"started": f"{spec['role']}:{spec['rank']}", "pid": self._failed})
        self._say({"exited": self._failed, "status": _NOT_STARTED << 8})

    def _reap(self) -> None:
        for pid in [*self._running, *self._heirs]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            if pid in self._heirs:
                self._heirs.discard(pid)
                continue
            who = self._running.pop(pid)
            kill_group(pid, signal.SIGKILL)  # its own children, if it left any
            if self._left[who[:2]].pid == pid:
                self._left[who[:2]] = Left(*who, pid, status)
            self._say({"exited": pid, "status": status})

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    # --- the controller's death -------------------------------------------------------------------

    def _be_guard(self, wish: dict[str, Any] | None) -> None:
        self._close_guarded()
        if wish is not None:
            listener, lock = self._descriptors
            self._descriptors = []
            self._succession = Succession(**wish, listener=listener, lock=lock)

    def _close_guarded(self) -> None:
        if self._succession is not None:
            os.close(self._succession.listener)
            os.close(self._succession.lock)
            self._succession = None

    def _find_heir(self) -> bool:
        """The controller died: have a fork of this process take over, if it wished that."""
        succession, now = self._succession, time.monotonic()
        if succession is None:
            return False
        if len(self._takeovers) == _MOST_HEIRS and now - self._takeovers[0] < _WITHIN_S:
            sys.stderr.write(f"{_MOST_HEIRS} controllers died within a minute: the run ends\n")
            return False
        self._takeovers.append(now)
        self._reap()
        mine, theirs = socket.socketpair()
        handover = Handover(succession, theirs, tuple(self._left.values()), time.time())

        def be_heir() -> int:
            mine.close()
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            for pipe in (self._wakened, self._waker):
                os.close(pipe)
            self._control.close()
            _tell_terminal(succession.run)
            _write_to(succession.log)
            try:
                take_over: Callable[[Handover], int] = load(succession.call)
                return take_over(handover)
            except BaseException:
                traceback.print_exc()
                # An orderly end: another successor would fail in the same way.
                with contextlib.suppress(OSError):
                    theirs.sendall(b'{"close": true}\n')
                return 1

        self._heirs.add(_forked(be_heir))
        theirs.close()
        self._control, self._buffer = mine, b""
        return True

    def release(self) -> None:
        """Close all descriptors: in a forked role, nothing of the fork server stays open."""
        os.close(self._wakened)
        os.close(self._waker)
        self._control.close()
        self._close_guarded()


def _forked(be: Callable[[], int]) -> int:
    """Fork a process that is this and nothing else. Returns its number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            outlive_sigterm()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = be()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    return pid


def _tell_terminal(run: str) -> None:
    """Tell the dead controller's terminal, if it is still open, that the run has not ended."""
    text = (
        "paceline: the controller was killed, and the run goes on in the background: "
        f"`paceline top {run}` shows it, `paceline stop {run}` stops it.\n"
    )
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())


def _write_to(log: str) -> None:
    """Output goes to this file from now on: the terminal was the dead controller's."""
    file = append_to(Path(log))
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)


def outlive_sigterm() -> None:
    """Let this process, but none that it starts, go on after SIGTERM.

    systemd, SLURM and others send SIGTERM to all processes of a run at once. The controller then has a
    checkpoint written, which needs the fork server, the servers and the workers; it ends them itself.
    A handler and not SIG_IGN: programs that a script starts would inherit that, and could not be terminated.
    """
    mine = os.getpid()

    def on_sigterm(number: int, frame: object) -> None:
        if os.getpid() != mine:  # a fork by the script, as multiprocessing makes them
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, on_sigterm)


def kill_group(pid: int, number: int) -> None:
    """A role leads its own process group (once it has got that far)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main(fd: int) -> None:
    """Load what every role needs, once, then fork."""
    outlive_sigterm()
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
