"""What can happen to a run: the events that the controller handles."""

from typing import NamedTuple

from paceline.control.request_desk import UserRequest
from paceline.control.role_links import Joined, Said, StopSignal, TurnedAway
from paceline.engines import Exited, HostJoined, HostLost, JoinRefused

__all__ = ["CauseOverdue", "RunEvent", "SaveOverdue", "ServerSilent", "Tick"]


class CauseOverdue(NamedTuple):
    """No role has reported the cause of a lost link in time."""


class SaveOverdue(NamedTuple):
    """The servers make no progress with the checkpoint that the run waits for."""


class ServerSilent(NamedTuple):
    """A server sends no reports any more."""

    rank: int
    seconds: float


class Tick(NamedTuple):
    """The end of a turn of the loop."""

    now: float


RunEvent = (
    Joined
    | Said
    | TurnedAway
    | StopSignal
    | Exited
    | HostJoined
    | HostLost
    | JoinRefused
    | UserRequest
    | CauseOverdue
    | SaveOverdue
    | ServerSilent
    | Tick
)
