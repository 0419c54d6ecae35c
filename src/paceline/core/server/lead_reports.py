"""Reports: what the leader tells the controller. `comm/messages.py` gives each its kind of frame."""

from typing import NamedTuple

__all__ = [
    "FullyReplicated",
    "LeaderReport",
    "ModeEntered",
    "ReplaceWorker",
    "RunEndsEarly",
    "SaveCut",
    "SaveEnded",
    "ServerEmptied",
    "ServerUnreachable",
    "SnapshotEnded",
    "SwitchRefused",
]


class SaveCut(NamedTuple):
    """The requested checkpoint no longer needs the workers."""

    version: int


class SaveEnded(NamedTuple):
    """A checkpoint was written or failed."""

    checkpoint: str | None
    """Path of the checkpoint; `kept`: the last one is of this version already; None: it failed."""
    version: int | None = None
    reason: str | None = None
    """Why it failed."""
    asked: bool = False
    """The controller requested it; else it is a periodic one."""


class SnapshotEnded(NamedTuple):
    """A snapshot for evaluation was written, or failed."""

    path: str | None
    """Its directory; None: it failed. A checkpoint of the wanted version serves as well."""
    version: int
    reason: str | None = None
    """Why it failed."""


class ReplaceWorker(NamedTuple):
    """A worker hangs, or pushes only invalid gradients."""

    replace: int
    """Rank of the worker."""
    incarnation: int | None
    reason: str


class RunEndsEarly(NamedTuple):
    """The workers' votes or a limit end the run."""

    reason: str


class FullyReplicated(NamedTuple):
    """Every slice has all its replicas."""

    servers: tuple[int, ...]
    """Servers that hold slices."""


class ServerEmptied(NamedTuple):
    """A server that was asked to leave has handed over its slices."""

    server: int


class ServerUnreachable(NamedTuple):
    """Workers cannot reach a server."""

    server: int


class ModeEntered(NamedTuple):
    """The run's mode from this version on."""

    mode: str
    version: int
    request: str | None = None
    """The switch request that takes effect with it."""


class SwitchRefused(NamedTuple):
    """The lead refuses a switch request."""

    request: str
    reason: str


LeaderReport = (
    SaveCut
    | SaveEnded
    | SnapshotEnded
    | ReplaceWorker
    | RunEndsEarly
    | FullyReplicated
    | ServerEmptied
    | ServerUnreachable
    | ModeEntered
    | SwitchRefused
)
