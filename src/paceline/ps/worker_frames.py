"""Reads frames of workers into requests: the one place that knows the fields of their messages."""

from typing import Any

from paceline.comm import Frame, Kind
from paceline.comm.frames import field, whole, wholes
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

__all__ = ["LEADER_ONLY", "ORDERED", "account_events", "read_request"]

ORDERED = (Kind.PUSH, Kind.PULL, Kind.ASSIGN)
"""Requests that the order answers."""
LEADER_ONLY = (Kind.TAKE, Kind.VOTE, Kind.CALL)
"""Requests that the leader alone answers."""

_MOST_SAMPLES = 1 << 31
"""Maximum number of samples that a message may count where no lease says how many there are."""

Body = dict[str, Any]


def read_request(frame: Frame, peer: WorkerPeer, optimizers: int) -> WorkerRequest:
    """The request that a frame carries.

    Args:
        peer: the worker that sent it.
        optimizers: number of optimizers of the run.

    Raises:
        FrameError: a field is missing or of the wrong type.
    """
    kind, body = frame.kind, frame.body
    if kind is Kind.PUSH:
        return _push(body, peer, optimizers)
    ready = whole(body, "ready", 0)
    if kind is Kind.PULL:
        return _pull(body, peer, ready)
    if kind is Kind.TAKE:
        return _take(body, peer, ready)
    if kind is Kind.ASSIGN:
        push = PushId(peer.worker, peer.incarnation, whole(body, "sequence"))
        return AssignRequest(peer.worker, whole(body, "n"), push, ready)
    number = whole(body, "n")
    if kind in (Kind.VOTE, Kind.CALL) and not number:
        raise FrameError(f"a {kind.name} with number 0: they are numbered from 1")
    if kind is Kind.VOTE:
        who = field(body, "who", str)
        if who not in WHO:
            raise FrameError(f"a vote of {who!r:.40}, expected one of {', '.join(WHO)}")
        return VoteRequest(Vote(peer.worker, number, who, field(body, "wants", bool)), ready)
    if kind is Kind.CALL:
        call = Call(peer.worker, number, field(body, "place", str), field(body, "value", str))
        return CallRequest(call, ready)
    raise FrameError(f"{kind.name} is no request")


def _push(body: Body, peer: WorkerPeer, optimizers: int) -> PushRequest:
    worker = peer.worker
    several = optimizers > 1
    push = Push(
        PushId(worker, peer.incarnation, whole(body, "sequence")),
        whole(body, "read_version"),
        _samples(body, "samples"),
        _leases(body, "leases"),
        field(body, "void", bool, False),
        field(body, "norm", float) if "norm" in body else None,
        field(body, "fetch", bool, True),
        whole(body, "optimizer", 0) if several else 0,
        _samples(body, "weight") if several else 0,
    )
    told = account_events(body, worker)
    if "refused" in body:
        told = (Refuse(worker, _leases(body, "refused")), *told)
    return PushRequest(
        worker,
        whole(body, "n"),
        push,
        told,
        field(body, "carries", str, "slot") == "parameters",
        whole(body, "ready", 0),
    )


def _pull(body: Body, peer: WorkerPeer, ready: int) -> PullRequest:
    load = None
    if "load" in body:
        load = Load(peer.worker, peer.incarnation, whole(body, "load"))
    without = wholes(body, "without")
    fetch = field(body, "fetch", bool, True)
    return PullRequest(peer.worker, whole(body, "n"), fetch, load, frozenset(without), ready)


def _take(body: Body, peer: WorkerPeer, ready: int) -> TakeRequest:
    worker, epoch = peer.worker, whole(body, "epoch")
    told: list[Event] = []
    if "give_back" in body:
        told.append(GiveBack(worker, _leases(body, "give_back")))
    if "carry" in body:
        told.append(Carry(worker, _leases(body, "carry")))
    told += account_events(body, worker)
    if "order" in body:
        drawn = field(body, "order", list)
        if len(drawn) != 2 or not all(isinstance(each, str) for each in drawn):
            raise FrameError("an order of samples that is not a fingerprint and a sampler's name")
        told.append(DrawOrder(worker, epoch, drawn[0][:64], drawn[1][:200]))
    limit = min(LEASES_AT_ONCE, max(0, field(body, "limit", int)))
    take = Take(worker, epoch, limit, field(body, "wait", bool), whole(body, "n", 0))
    return TakeRequest(take, tuple(told), ready)


def account_events(body: Body, worker: int) -> tuple[Event, ...]:
    """Batches that a worker's script read and made no step with come with its next message, and so do
    samples that a script without a loader has counted."""
    told: tuple[Event, ...] = ()
    if (logged := _samples(body, "logged")) > 0:
        told = (Count(logged),)
    if "skipped" in body:
        told = (*told, Skip(worker, _leases(body, "skipped"), _samples(body, "skipped_samples")))
    return told


def _samples(body: Body, name: str) -> int:
    """A number of samples that no lease says."""
    if (samples := whole(body, name, 0)) > _MOST_SAMPLES:
        raise FrameError(f"field {name!r} is {samples}, which are more samples than a step can have")
    return samples


def _leases(body: Body, name: str) -> tuple[int, ...]:
    """Numbers of leases that a worker sent."""
    return tuple(wholes(body, name))
