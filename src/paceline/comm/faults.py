"""Faults on purpose, in a role, at a step: for tests. Off unless PACELINE_FAULTS says something.

    kill worker:1@5; stop worker:0@3:2s; slow worker:2@1-20:50ms; nan worker:1@4; flip worker:0@6

| fault | what happens at that step (a worker's) or update (a server's) |
|---|---|
| `kill` | the process gets SIGKILL |
| `stop` | it gets SIGSTOP, and SIGCONT after the time that is given, if one is |
| `slow` | it takes so much longer |
| `nan`, `huge` | the gradient is NaN, or 10⁴ times what it was (workers) |
| `flip`, `cut` | a bit of the next frame to the lead is flipped, or the link ends within it (workers) |

`kill controller@100` kills the controller of a `paceline run`, once it has heard of that many updates.

A fault hits the first process in its place, not the one that replaces it. The same text is the same faults.
"""

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass

from paceline.exceptions import UsageError

__all__ = ["FAULTS", "KINDS", "Fault", "Faults"]

FAULTS = "PACELINE_FAULTS"
"""The environment variable, read by the controller when a run starts."""

KINDS = ("kill", "stop", "slow", "nan", "huge", "flip", "cut")
_OF_WORKERS = ("nan", "huge", "flip", "cut")
_SECONDS = {"ms": 1e-3, "s": 1.0}
_FORM = re.compile(r"(\w+)\s+(?:(worker|server):(\d+)|controller)@(\d+)(?:-(\d+))?(?::([\d.]+)(ms|s))?")
_EXAMPLE = "kill worker:1@5; stop worker:0@3:2s; slow worker:2@1-20:50ms"


@dataclass(frozen=True)
class Fault:
    """One fault. `str()` is what `Faults.parse` reads."""

    kind: str
    role: str
    rank: int
    first: int
    last: int
    """Steps or updates, counted from 1, both included."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"a fault {self.kind!r}: there is no such kind. Valid: {', '.join(KINDS)}")
        if self.kind in _OF_WORKERS and self.role != "worker":
            raise UsageError(f"a fault {self.kind!r} is a worker's, got {self.role}:{self.rank}")
        if self.role == "controller" and self.kind != "kill":
            raise UsageError(f"a fault {self.kind!r} cannot be the controller's: it can only be killed")
        if not 1 <= self.first <= self.last:
            raise UsageError(f"a fault at steps {self.first}-{self.last}: they are counted from 1, upwards")
        if self.kind == "slow" and not self.seconds:
            raise UsageError("a fault 'slow' needs how much longer it takes, as in slow worker:2@1-20:50ms")

    def __str__(self) -> str:
        steps = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        seconds = f":{self.seconds:g}s" if self.seconds else ""
        who = self.role if self.role == "controller" else f"{self.role}:{self.rank}"
        return f"{self.kind} {who}@{steps}{seconds}"


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
            kind, role, rank, first, last, number, unit = match.groups()
            seconds = float(number) * _SECONDS[unit] if number else 0.0
            who = (role, int(rank)) if role else ("controller", 0)
            found.append(Fault(kind, *who, int(first), int(last or first), seconds))
        return cls(tuple(found))

    @classmethod
    def from_environment(cls) -> "Faults":
        """Those of PACELINE_FAULTS; mostly none."""
        return cls.parse(os.environ.get(FAULTS, ""))

    def __str__(self) -> str:
        return "; ".join(map(str, self.all))

    def of(self, role: str, rank: int, incarnation: int) -> "Faults":
        """What one process has to do. Nothing, if it is there in place of another."""
        mine = [f for f in self.all if (f.role, f.rank) == (role, rank) and not incarnation]
        return Faults(tuple(mine))

    def at(self, step: int) -> list[str]:
        """Make the faults of this step happen; those that are the caller's to make are returned by kind."""
        rest = []
        for fault in self.all:
            if fault.first <= step <= fault.last:
                if fault.kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault.kind == "stop":
                    _stop(fault.seconds)
                elif fault.kind == "slow":
                    time.sleep(fault.seconds)
                else:
                    rest.append(fault.kind)
        return rest

    def reached(self, update: int) -> None:
        """As `at`, for the controller: it hears of updates now and then, not of each."""
        if any(fault.first <= update for fault in self.all):
            os.kill(os.getpid(), signal.SIGKILL)


def _stop(seconds: float) -> None:
    """Who is stopped cannot wake itself up."""
    if seconds:
        waker = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", waker], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
