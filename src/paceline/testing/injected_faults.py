"""Faults on purpose, for tests of how a program and its run take them. Off unless PACELINE_FAULTS is set.

```python
with faulty("kill worker:1@5; slow worker:0@1-20:50ms"):
    result = paceline.fit(task, workers=2)

with faulty(random_faults(seed=7, workers=4, steps=100, kinds=("kill", "stop"), count=3)):
    …
```

From a shell: `PACELINE_FAULTS="kill worker:1@5" paceline run …`, and there also `kill controller@100` (the
controller of `fit` is your own process). Roles load this module only if they have faults.

    kill worker:1@5; stop worker:0@3:2s; slow worker:2@1-20:50ms; nan worker:1@4; full server:0@2

| fault | what happens at that step (a worker's) or update (a server's) |
|---|---|
| `kill` | the process gets SIGKILL |
| `stop` | it gets SIGSTOP, and SIGCONT after the time that is given, if one is |
| `slow` | it takes so much longer |
| `nan`, `huge` | the gradient is NaN, or 10⁴ times what it was (workers) |
| `flip`, `cut`, `hangup` | a bit of the next message is flipped, or the link ends within it, or behind it |
| `drop`, `duplicate`, `reorder` | the next frame is lost, comes twice, or after the one behind it |
| `delay` | the next frame leaves so much later |
| `full` | the disk is full while it writes its part of the n-th checkpoint (servers) |
| `slowdisk` | every megabyte of that part takes so much longer (servers) |

Of a worker it is a frame to one of the servers, of a server an answer to one of the workers. A chance may
stand behind: `drop worker:*@1-1000:10%` hits each step of every worker with it, by a seed of its own.

`kill controller@100` kills the controller of a `paceline run`, once it has heard of that many updates.

A fault hits the first process in its place, not the one that replaces it. The same text is the same faults.
"""

import contextlib
import errno
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.comm.faults import FAULTS, OF_FRAMES, Faults
from paceline.comm.tls import Stream
from paceline.exceptions import UsageError
from paceline.testing.environment import environment

__all__ = [
    "EVERY_RANK",
    "KINDS",
    "Damage",
    "Fault",
    "InjectedFaults",
    "faulty",
    "parse_faults",
    "random_faults",
]

KINDS = ("kill", "stop", "slow", "delay", "nan", "huge", *OF_FRAMES, "full", "slowdisk")
_OF_WORKERS = ("nan", "huge")
_OF_DISKS = ("full", "slowdisk")
_TAKES_TIME = ("slow", "delay", "slowdisk")
_SECONDS = {"ms": 1e-3, "s": 1.0}
_FORM = re.compile(
    r"(\w+)\s+(?:(worker|server):(\d+|\*)|controller)@(\d+)(?:-(\d+))?(?::([\d.]+)(ms|s))?(?::([\d.]+)%)?"
)
EVERY_RANK = -1
_EXAMPLE = "kill worker:1@5; stop worker:0@3:2s; slow worker:2@1-20:50ms"


@dataclass(frozen=True)
class Fault:
    """One fault. `str()` is what `Faults.parse` reads."""

    kind: str
    role: str
    rank: int
    """Or EVERY_RANK."""
    first: int
    last: int
    """Steps, updates or checkpoints, counted from 1, both included."""
    seconds: float = 0.0
    percent: float = 100.0
    """The chance with which each of them is hit."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"a fault {self.kind!r}: there is no such kind. Valid: {', '.join(KINDS)}")
        if self.kind in _OF_WORKERS and self.role != "worker":
            raise UsageError(f"a fault {self.kind!r} is a worker's, got {self.role}:{self.rank}")
        if self.kind in _OF_DISKS and self.role != "server":
            raise UsageError(f"a fault {self.kind!r} is a server's, got {self.role}:{self.rank}")
        if self.role == "controller" and self.kind != "kill":
            raise UsageError(f"a fault {self.kind!r} cannot be the controller's: it can only be killed")
        if not 1 <= self.first <= self.last:
            raise UsageError(f"a fault at steps {self.first}-{self.last}: they are counted from 1, upwards")
        if self.kind in _TAKES_TIME and not self.seconds:
            place = "server:0@2" if self.kind in _OF_DISKS else "worker:2@1-20"
            raise UsageError(
                f"a fault {self.kind!r} needs how much longer it takes, as in {self.kind} {place}:50ms"
            )
        if not 0 < self.percent <= 100:
            raise UsageError(f"a fault with a chance of {self.percent:g} %: give more than 0, at most 100")

    def __str__(self) -> str:
        steps = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        seconds = f":{self.seconds:g}s" if self.seconds else ""
        rank = "*" if self.rank == EVERY_RANK else self.rank
        who = self.role if self.role == "controller" else f"{self.role}:{rank}"
        percent = f":{self.percent:g}%" if self.percent < 100 else ""
        return f"{self.kind} {who}@{steps}{seconds}{percent}"


@dataclass(frozen=True)
class InjectedFaults(Faults):
    """All faults of a run, or those of one role of it."""

    all: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "InjectedFaults":
        """The faults that a user's text means. Raises UsageError."""
        found = []
        for item in filter(None, map(str.strip, text.split(";"))):
            match = _FORM.fullmatch(item)
            if match is None:
                raise UsageError(f"{FAULTS}: {item!r:.80} is not a fault. As in {_EXAMPLE}")
            kind, role, rank, first, last, number, unit, percent = match.groups()
            seconds = float(number) * _SECONDS[unit] if number else 0.0
            who = (role, EVERY_RANK if rank == "*" else int(rank)) if role else ("controller", 0)
            chance = float(percent or 100)
            found.append(Fault(kind, *who, int(first), int(last or first), seconds, chance))
        return cls(tuple(found))

    @classmethod
    def from_environment(cls) -> "InjectedFaults":
        """Those of PACELINE_FAULTS; mostly none."""
        return cls.parse(os.environ.get(FAULTS, ""))

    def __str__(self) -> str:
        return "; ".join(map(str, self.all))

    def of(self, role: str, rank: int, incarnation: int) -> "InjectedFaults":
        """What one process has to do. Nothing, if it is there in place of another."""
        if incarnation:
            return InjectedFaults()
        mine = [f for f in self.all if f.role == role and f.rank in (rank, EVERY_RANK)]
        return InjectedFaults(tuple(replace(f, rank=rank) for f in mine))

    def at(self, step: int) -> list[str]:
        """Make the faults of this step happen; those that are the caller's to make are returned by kind."""
        rest = []
        for fault in self.all:
            here = fault.first <= step <= fault.last and fault.kind not in _OF_DISKS
            if here and _hits(fault, step):
                if fault.kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault.kind == "stop":
                    _stop(fault.seconds)
                elif fault.kind in ("slow", "delay"):
                    time.sleep(fault.seconds)
                else:
                    rest.append(fault.kind)
        return rest

    def at_checkpoint(self, number: int) -> Callable[[], None] | None:
        """What to call before every write of this checkpoint; mostly nothing. It may raise OSError."""
        mine = [f for f in self.all if f.kind in _OF_DISKS and f.first <= number <= f.last]

        def before_write() -> None:
            for fault in mine:
                time.sleep(fault.seconds)
                if fault.kind == "full":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return before_write if mine else None

    def reached(self, update: int) -> None:
        """As `at`, for the controller: it hears of updates now and then, not of each."""
        if any(fault.first <= update for fault in self.all):
            os.kill(os.getpid(), signal.SIGKILL)


def parse_faults(text: str) -> InjectedFaults:
    """What `Faults.parse` loads."""
    return InjectedFaults.parse(text)


class Damage:
    """What happens to the next frame of a link.

    Args:
        kind: one of `OF_FRAMES`.
        delayed: a frame that an earlier damage has held back.
    """

    def __init__(self, kind: str, delayed: bytes = b"") -> None:
        self._kind = kind
        self.delayed = delayed

    @property
    def active(self) -> bool:
        """Whether it is still to happen, or not over yet."""
        return bool(self._kind or self.delayed)

    def __call__(self, sock: Stream, head: bytes, payload: Sequence[memoryview]) -> bytes | None:
        """Send a frame, damaged. Returns the head that the link has to send; None: nothing."""
        kind, self._kind = self._kind, ""
        if kind == "flip":
            return head[:-1] + bytes([head[-1] ^ 1])
        if not kind and not self.delayed:
            return head
        whole = b"".join([head, *payload])
        with contextlib.suppress(OSError):
            match kind:
                case "cut":
                    sock.sendall(whole[: len(whole) // 2])
                    sock.shutdown(socket.SHUT_RDWR)
                case "hangup":
                    sock.sendall(whole)
                    sock.shutdown(socket.SHUT_RDWR)
                case "duplicate":
                    sock.sendall(whole + whole)
                case "reorder":
                    self.delayed = whole
                case "":
                    sock.sendall(whole + self.delayed)  # the frame that should have come first
                    self.delayed = b""
        return None


def _hits(fault: Fault, step: int) -> bool:
    chance = random.Random(f"{fault}/{step}").random() if fault.percent < 100 else 0.0
    return chance * 100 < fault.percent


def _stop(seconds: float) -> None:
    """Stop this process, and let another one wake it up."""
    if seconds:
        waker = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", waker], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


@contextlib.contextmanager
def faulty(faults: InjectedFaults | str) -> Iterator[None]:
    """Runs that start in this block have these faults. It sets PACELINE_FAULTS: for one thread at a time."""
    with environment(FAULTS, str(InjectedFaults.parse(str(faults)))):
        yield


def random_faults(
    *,
    seed: int,
    workers: int,
    steps: int,
    kinds: Sequence[str] = ("kill",),
    count: int = 1,
    servers: int = 0,
    seconds: float = 0.5,
) -> InjectedFaults:
    """So many faults of these kinds, each in a role and at a step of its own; by the seed always the same.

    Args:
        steps: they happen within so many (of `full` and `slowdisk`: checkpoints).
        servers: how many servers may be hit, too, by those kinds that can hit them.
        seconds: how long a `stop`, a step of `slow` or a `delay` takes.
    """
    chance = random.Random(seed)
    by_workers = [("worker", rank) for rank in range(workers)]
    by_servers = [("server", rank) for rank in range(servers)]
    found = []
    for _ in range(count):
        kind = chance.choice(list(kinds))
        if kind in ("full", "slowdisk"):
            places = by_servers or [("server", 0)]
        else:
            places = by_workers + (by_servers if kind not in ("nan", "huge") else [])
        role, rank = chance.choice(places)
        step = chance.randint(1, steps)
        takes = kind in ("stop", "slow", "delay", "slowdisk")
        found.append(Fault(kind, role, rank, step, step, seconds if takes else 0.0))
    return InjectedFaults(tuple(found))
