"""Why a process of a run ended, as a value: the run's decisions depend on this, not on signal numbers.

`cause_of` classifies an exception where it was raised; `ending_of` classifies what the system says of a
process that ended. `explained` is an exception's message with what to do about it.
"""

import contextlib
import errno
import resource
from dataclasses import dataclass
from enum import Enum
from signal import Signals

from paceline import exceptions

__all__ = ["Cause", "ProcessEnd", "cause_of", "ending_of", "explained"]


class Cause(Enum):
    """Why a role ended."""

    CRASHED = "crashed"
    """Killed by a signal: by compiled code that crashed, by the system, by hand."""
    OUT_OF_MEMORY = "out of memory"
    """An allocation failed, on the host or on a device."""
    NO_RESOURCES = "no resources"
    """The system refused something else: file descriptors, processes, room on a disk, a network."""
    DEVICE = "device error"
    """The GPU failed, or a kernel on it. The process cannot use it any more; another one can. A script's own
    mistake (a label that is out of range) comes again at the same step, and then fails the run."""
    LOST_LINK = "lost link"
    """It lost its connection to another role, whose end is probably the cause."""
    LOST_HOST = "lost host"
    """Its host is gone, or cannot be reached."""
    EXITED = "exited"
    """It exited by itself. Its report says why, unless it exited without one."""
    USER_ERROR = "user error"
    """The script, or its settings, are wrong: a new process would fail in the same way."""

    @property
    def may_pass(self) -> bool:
        """Whether another process in its place may do better."""
        return self in _MAY_PASS


_MAY_PASS = (Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.NO_RESOURCES, Cause.DEVICE, Cause.LOST_HOST)


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended."""

    cause: Cause
    how: str
    """Completes a sentence: `was killed by SIGKILL`."""
    hint: str = ""
    """What usually causes this."""


_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_NO_RESOURCES = (
    "Too many open files",
    "received 0 items of ancdata",  # what torch says when a descriptor could not be received
    "unable to open shared memory object",
    "No space left on device",
    "can't start new thread",
)
_DEVICE = (
    "device-side assert triggered",
    "illegal memory access was encountered",
    "illegal instruction was encountered",
    "misaligned address",
    "unspecified launch failure",
    "uncorrectable ECC error",
    "CUDA error: unknown error",
    "CUDA-capable device(s) is/are busy or unavailable",
    "hardware stack error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_NOT_INITIALIZED",
)
_CHILD_CRASHED = ("is killed by signal", "exited unexpectedly")
"""Of a DataLoader's processes."""
_SYSTEM = {
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.ENOBUFS, errno.EBUSY),
    *(errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO, errno.ETIMEDOUT),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
}
"""Errors of the system, its disks and its networks. Others (no such file, …) would come again."""


def cause_of(error: BaseException) -> Cause:
    """Why this exception ended a role, by its class and message, or by those of what it was raised from."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        cause = _own_cause(each)
        if cause is not Cause.USER_ERROR or isinstance(each, exceptions.PacelineError):
            return cause
        each = each.__cause__
    return Cause.USER_ERROR


def _own_cause(error: BaseException) -> Cause:
    # By the names of its classes: torch is not imported here, and other libraries never are.
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, exceptions.LinkError):
        # A device that failed is often met first where work is handed to it for another process.
        return Cause.DEVICE if _cause_in(str(error)) is Cause.DEVICE else Cause.LOST_LINK
    if isinstance(error, exceptions.PacelineError):
        return Cause.USER_ERROR
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names:
        return Cause.OUT_OF_MEMORY
    if "BrokenExecutor" in names:
        return Cause.CRASHED
    if isinstance(error, OSError):
        if error.errno == errno.ENOMEM:
            return Cause.OUT_OF_MEMORY
        of_network = names & {"TimeoutError", "Timeout", "ConnectionError"}
        return Cause.NO_RESOURCES if error.errno in _SYSTEM or of_network else Cause.USER_ERROR
    if isinstance(error, RuntimeError):
        with contextlib.suppress(Exception):  # a user's class, whose __str__ fails
            return _cause_in(str(error))
    return Cause.USER_ERROR


def _cause_in(message: str) -> Cause:
    """Of a RuntimeError, which torch raises for everything: its text has to say what it is."""
    if "DataLoader worker" in message and any(part in message for part in _CHILD_CRASHED):
        return Cause.CRASHED
    for cause, parts in (
        (Cause.OUT_OF_MEMORY, _OUT_OF_MEMORY),
        (Cause.NO_RESOURCES, _NO_RESOURCES),
        (Cause.DEVICE, _DEVICE),
    ):
        if any(part in message for part in parts):
            return cause
    return Cause.USER_ERROR


def explained(error: BaseException) -> str:
    """The exception's message; where a limit of the system was met, also the limit and how to raise it."""
    text = str(error)
    number = getattr(error, "errno", None)
    if number == errno.EMFILE or "Too many open files" in text or "received 0 items of ancdata" in text:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"{text}. This process may have {soft:,} files and connections open (`ulimit -n`): raise that "
            f"before the run is started (here up to {_number(hard)}), or use fewer workers, servers or "
            "DataLoader processes."
        )
    if number == errno.ENFILE:
        return f"{text}. The whole system has no file descriptors left (fs.file-max)."
    if number == errno.EAGAIN or "can't start new thread" in text:
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        return (
            f"{text}. This user may have {_number(soft)} processes and threads (`ulimit -u`; a container may "
            "have a lower limit, pids.max): raise that, or use fewer workers, servers or threads."
        )
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        what = text or "no memory left"
        return f"{what}. Use a smaller batch or model, fewer workers on this machine, or more memory."
    return text


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def ending_of(code: int | None, signal: int | None) -> ProcessEnd:
    """How a process ended, by its exit code or by the signal that killed it."""
    if not signal:
        return ProcessEnd(Cause.EXITED, f"exited with code {code}")
    return ProcessEnd(Cause.CRASHED, f"was killed by {_name(signal)}", _guess(signal))


def _name(signal: int) -> str:
    try:
        return Signals(signal).name
    except ValueError:  # the real-time ones have no names of their own
        return f"signal {signal}"


def _guess(signal: int) -> str:
    """What kills processes with this signal, most of the time."""
    if signal == Signals.SIGKILL:
        return "The system kills like this when memory runs out."
    if signal in (Signals.SIGSEGV, Signals.SIGBUS, Signals.SIGILL, Signals.SIGFPE, Signals.SIGABRT):
        return "Compiled code that the script uses crashed."
    return "Somebody sent it that signal."
