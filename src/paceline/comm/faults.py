"""Faults on purpose, in a role, at a step: for tests. Off unless PACELINE_FAULTS says something.

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

import errno
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.exceptions import UsageError

__all__ = ["EVERY_RANK", "FAULTS", "KINDS", "OF_FRAMES", "Fault", "Faults"]

FAULTS = "PACELINE_FAULTS"
"""The environment variable, read by the controller when a run starts."""

OF_FRAMES = ("flip", "cut", "hangup", "drop", "duplicate", "reorder")
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
class Faults:
    """All faults of a run, or those of one role of it."""

    all: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Faults":
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
    def from_environment(cls) -> "Faults":
        """Those of PACELINE_FAULTS; mostly none."""
        return cls.parse(os.environ.get(FAULTS, ""))

    def __str__(self) -> str:
        return "; ".join(map(str, self.all))

    def of(self, role: str, rank: int, incarnation: int) -> "Faults":
        """What one process has to do. Nothing, if it is there in place of another."""
        if incarnation:
            return Faults()
        mine = [f for f in self.all if f.role == role and f.rank in (rank, EVERY_RANK)]
        return Faults(tuple(replace(f, rank=rank) for f in mine))

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


def _hits(fault: Fault, step: int) -> bool:
    chance = random.Random(f"{fault}/{step}").random() if fault.percent < 100 else 0.0
    return chance * 100 < fault.percent


def _stop(seconds: float) -> None:
    """Who is stopped cannot wake itself up."""
    if seconds:
        waker = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", waker], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
