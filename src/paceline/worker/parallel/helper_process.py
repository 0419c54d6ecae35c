"""Processes that a worker forks to compute for it.

A fork has the script's models and functions as they are, so nothing is ever pickled. It holds none of the
worker's sockets, and ends with the worker, however that ends.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.exceptions import DeadlineError, LinkError, PacelineError, UsageError
from paceline.worker.parallel.mailbox import Mailbox

__all__ = ["HelperProcess"]

_PR_SET_PDEATHSIG = 1

Serve = Callable[[Any, list[Tensor]], tuple[Any, Sequence[Tensor]]]
"""Answers a message of the worker."""


class HelperProcess:
    """A process that answers messages, as the worker sees it.

    Args:
        name: for messages: "process 1 of --local processes:2".
        begin: called once in the new process; returns what answers the worker's messages there.
        deadline_s: how long an answer may take.
        keep: descriptors that the new process needs.
    """

    def __init__(
        self, name: str, begin: Callable[[], Serve], *, deadline_s: float, keep: Sequence[int] = ()
    ) -> None:
        self._name = name
        self._deadline_s = deadline_s
        mine, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):  # else the fork would write it again
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        worker = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _be_helper(worker, theirs, begin, keep)
            finally:
                os._exit(1)
        theirs.close()
        mine.settimeout(deadline_s)
        self._box = Mailbox(mine)

    def ask(self, body: Any, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message; `answer` waits for what comes of it."""
        with self._told_when_gone():
            self._box.send(body, tensors)

    def answer(self) -> tuple[Any, list[Tensor]]:
        """The answer to the oldest message; its tensors are good until the next message.

        Raises:
            RuntimeError: what was asked for failed there; with the traceback.
            UsageError: the same, if it says what to do.
            LinkError: the process has ended.
            DeadlineError: it takes too long.
        """
        with self._told_when_gone():
            body, tensors = self._box.receive()
        if "failed" in body and not body["traceback"] and body["failed"].startswith("UsageError: "):
            raise UsageError(body["failed"].removeprefix("UsageError: "))
        if "failed" in body:
            raise RuntimeError(f"in {self._name}: {body['failed']}\n{body['traceback']}")
        return body, tensors

    def close(self) -> None:
        """End the process, and wait until it has."""
        self._box.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)  # it keeps nothing that must be put in order
            os.waitpid(self.pid, 0)

    @contextlib.contextmanager
    def _told_when_gone(self) -> Any:
        try:
            yield
        except TimeoutError:
            raise DeadlineError(
                f"{self._name} did not answer within {self._deadline_s:g} s (--deadline). Raise the deadline "
                "if a step may take this long."
            ) from None
        except (EOFError, OSError) as error:
            raise LinkError(
                f"{self._name} (pid {self.pid}) has ended: {str(error) or 'it was killed'}"
            ) from None


def _be_helper(worker: int, sock: socket.socket, begin: Callable[[], Serve], keep: Sequence[int]) -> None:
    """The life of the new process. Does not return."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:  # it died before that
        os._exit(0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    kept = sorted({*keep, sock.fileno()})
    for below, above in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(below + 1, above)
    torch.set_num_threads(1)  # OpenMP's pool did not come along
    box = Mailbox(sock)
    serve: Serve | None = None
    while True:
        try:
            body, tensors = box.receive()
        except (EOFError, OSError):
            os._exit(0)
        try:
            serve = serve or begin()
            answer, found = serve(body, tensors)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            trace = "" if isinstance(error, PacelineError) else traceback.format_exc()
            answer, found = {"failed": said, "traceback": trace}, ()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        try:
            box.send(answer, found)
        except OSError:
            os._exit(0)
