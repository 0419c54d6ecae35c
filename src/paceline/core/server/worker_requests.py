"""Requests: what a worker asks of the servers, once a frame is read and checked.

Pushes, pulls and assigns go to all servers, and the order answers them (AdmitStep). The leader alone answers
requests for leases, votes and calls of collectives. A worker makes one request at a time and waits for the
answer. It repeats an unanswered request to the next leader.
"""

from typing import NamedTuple

from paceline.core.events import Call, Event, Load, Push, Take, Vote
from paceline.core.modes.machine import PushId

__all__ = [
    "AssignRequest",
    "CallRequest",
    "OrderedRequest",
    "PullRequest",
    "PushRequest",
    "TakeRequest",
    "VoteRequest",
    "WorkerRequest",
]


class PushRequest(NamedTuple):
    """A worker pushed a gradient."""

    worker: int
    number: int
    """Number of the request; pushes, pulls and assigns of a worker are numbered together."""
    push: Push
    told: tuple[Event, ...] = ()
    """Events that the message reports beside the push: refused and skipped batches, counted samples."""
    parameters: bool = False
    """allreduce: it brings the worker's parameters instead of a gradient."""
    ready: int = 0
    """Number of the announced placement that the worker is ready for; 0: of none."""


class AssignRequest(NamedTuple):
    """A worker sent parameters that the servers are to take over."""

    worker: int
    number: int
    push: PushId
    ready: int = 0


class PullRequest(NamedTuple):
    """A worker wants an answer in the order, mostly fresh parameters."""

    worker: int
    number: int
    fetch: bool = True
    """Whether it wants fresh parameters."""
    load: Load | None = None
    """An optimizer state that it gave to the servers before."""
    without: frozenset[int] = frozenset()
    """Servers that it cannot reach any more. It is answered when the placement does without them."""
    ready: int = 0


class TakeRequest(NamedTuple):
    """A worker asks for leases."""

    take: Take
    told: tuple[Event, ...] = ()
    """Events that the message reports beside: leases given back or carried, skipped batches, an order."""
    ready: int = 0

    @property
    def worker(self) -> int:
        return self.take.worker


class VoteRequest(NamedTuple):
    """A worker asks whether the run ends early."""

    vote: Vote
    ready: int = 0

    @property
    def worker(self) -> int:
        return self.vote.worker


class CallRequest(NamedTuple):
    """A worker calls a collective."""

    call: Call
    ready: int = 0

    @property
    def worker(self) -> int:
        return self.call.worker


OrderedRequest = PushRequest | PullRequest | AssignRequest
"""A request that goes to all servers, and that the order answers."""
WorkerRequest = OrderedRequest | TakeRequest | VoteRequest | CallRequest
