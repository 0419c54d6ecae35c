"""Rulings: all that follows from an event, beside what the decider itself knows."""

from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.leases import Lease
from paceline.core.steps import Steps
from paceline.core.totals import Applied

__all__ = ["CallAnswer", "LeaseGrant", "Reply", "Ruling", "Verdict"]


class LeaseGrant(NamedTuple):
    """The answer to a worker that asked for leases."""

    worker: int
    leases: tuple[Lease, ...]
    over: bool
    """Whether there are no more of its epoch."""


class Verdict(NamedTuple):
    """The answer to a worker that asked whether the run ends early."""

    worker: int
    stop: bool


class CallAnswer(NamedTuple):
    """A worker that called a collective is answered."""

    worker: int


Reply = LeaseGrant | Verdict | CallAnswer


class Ruling(NamedTuple):
    """All that follows from an event."""

    steps: Steps
    """Of the run's order."""
    replies: Sequence[Reply] = ()
    """To workers, once the steps are in the order."""
    news: Sequence[str] = ()
    """What the user should read."""
    sick: Sequence[int] = ()
    """Workers that are to be replaced: their gradients, and only theirs, are not finite again and again."""
    applied: Sequence[Applied] = ()
    """The pushes that the steps apply."""
    refused_norm: tuple[float, float] | None = None
    """The norm of the push, if it was refused for that, and the usual one."""
