"""Turns messages of workers into requests of the core."""

from typing import assert_never

from paceline.comm.worker_messages import (
    AssignMessage,
    CallMessage,
    DetachMessage,
    LeaderQuestion,
    OrderedMessage,
    PullMessage,
    PushMessage,
    TakeMessage,
    VoteMessage,
)
from paceline.core.ballot import WHO
from paceline.core.events import (
    Call,
    Carry,
    Count,
    DrawOrder,
    Event,
    GiveBack,
    Load,
    Push,
    Refuse,
    Skip,
    Take,
    Vote,
)
from paceline.core.modes import PushId
from paceline.core.server.lead_machine import LEASES_AT_ONCE
from paceline.core.server.worker_requests import (
    AssignRequest,
    CallRequest,
    PullRequest,
    PushRequest,
    TakeRequest,
    VoteRequest,
    WorkerRequest,
)
from paceline.exceptions import FrameError
from paceline.ps.peers import WorkerPeer

__all__ = ["account_events", "push_request", "read_request"]

_MOST_SAMPLES = 1 << 31
"""Maximum number of samples that a message may count where no lease says how many there are."""


def read_request(
    message: OrderedMessage | LeaderQuestion, peer: WorkerPeer, optimizers: int
) -> WorkerRequest:
    """The request that a message makes.

    Args:
        peer: the worker that sent it.
        optimizers: number of optimizers of the run.

    Raises:
        FrameError: a number is out of its range, or the run knows no such vote.
    """
    worker = peer.worker
    if not isinstance(message, PushMessage):
        _check_numbers(message)
    match message:
        case PushMessage():
            return push_request(message, peer, optimizers)
        case PullMessage(n=number, fetch=fetch, load=loaded, without=without, ready=ready):
            load = None if loaded is None else Load(worker, peer.incarnation, loaded)
            return PullRequest(worker, number, fetch, load, frozenset(without), ready)
        case AssignMessage(n=number, sequence=sequence, ready=ready):
            return AssignRequest(worker, number, PushId(worker, peer.incarnation, sequence), ready)
        case TakeMessage():
            return _take(message, worker)
        case VoteMessage(who=who, wants=wants, n=number, ready=ready):
            if who not in WHO:
                raise FrameError(f"a vote of {who!r:.40}, expected one of {', '.join(WHO)}")
            return VoteRequest(Vote(worker, number, who, wants), ready)
        case CallMessage(place=place, value=value, n=number, ready=ready):
            return CallRequest(Call(worker, number, place, value), ready)
        case _:
            assert_never(message)


def _check_numbers(message: OrderedMessage | LeaderQuestion) -> None:
    """Raise FrameError for a number that no worker of ours sends: the core counts with them."""
    match message:
        case PushMessage():
            numbers = (message.sequence, message.read_version, message.weight, message.samples)
            if max(message.samples, message.weight) > _MOST_SAMPLES:
                raise FrameError(f"a push of {message.samples:,} samples")
        case TakeMessage(epoch=epoch):
            numbers = (epoch, 0, 0, 0)
        case AssignMessage(sequence=sequence):
            numbers = (sequence, 0, 0, 0)
        case PullMessage(load=load):
            numbers = (load or 0, 0, 0, 0)
        case VoteMessage() | CallMessage():
            numbers = (message.n - 1, 0, 0, 0)  # they are numbered from 1
        case _:
            assert_never(message)
    if min(*numbers, message.n, message.ready) < 0:
        raise FrameError(
            f"a {type(message).__name__} with a negative number, or numbered 0 instead of from 1"
        )


def push_request(message: PushMessage, peer: WorkerPeer, optimizers: int) -> PushRequest:
    """As `read_request`, of a push."""
    _check_numbers(message)
    worker = peer.worker
    several = optimizers > 1
    push = Push(
        PushId(worker, peer.incarnation, message.sequence),
        message.read_version,
        message.samples,
        message.leases,
        message.void,
        message.norm,
        message.fetch,
        message.optimizer if several else 0,
        message.weight if several else 0,
    )
    told = account_events(message, worker)
    if message.refused:
        told = (Refuse(worker, message.refused), *told)
    return PushRequest(worker, message.n, push, told, message.carries == "parameters", message.ready)


def _take(message: TakeMessage, worker: int) -> TakeRequest:
    epoch = message.epoch
    told: list[Event] = []
    if message.give_back:
        told.append(GiveBack(worker, message.give_back))
    if message.carry:
        told.append(Carry(worker, message.carry))
    told += account_events(message, worker)
    if message.order is not None:
        fingerprint, sampler = message.order
        told.append(DrawOrder(worker, epoch, fingerprint[:64], sampler[:200]))
    limit = min(LEASES_AT_ONCE, max(0, message.limit))
    return TakeRequest(Take(worker, epoch, limit, message.wait, message.n), tuple(told), message.ready)


def account_events(message: PushMessage | TakeMessage | DetachMessage, worker: int) -> tuple[Event, ...]:
    """Batches that a worker's script read and made no step with come with its next message, and so do
    samples that a script without a loader has counted."""
    if not (0 <= message.logged <= _MOST_SAMPLES and 0 <= message.skipped_samples <= _MOST_SAMPLES):
        raise FrameError(f"{message.logged:,} samples counted and {message.skipped_samples:,} passed over")
    told: tuple[Event, ...] = (Count(message.logged),) if message.logged > 0 else ()
    if message.skipped is not None:
        told = (*told, Skip(worker, message.skipped, message.skipped_samples))
    return told
