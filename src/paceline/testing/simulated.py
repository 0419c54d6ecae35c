"""A whole run in one process and in virtual time: what a mode does to a model, without a cluster.

The decider (mode machine, leases), the executor (updates) and the steppers (the workers' side) are the ones
that run live; only time and the links are simulated. Compute times are given, so staleness is what unequal
workers would really cause, and every run of a seed is the same.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from paceline.comm import Connection
from paceline.comm.faults import Faults
from paceline.comm.fence import Fence
from paceline.comm.worker_messages import AdmitReply, AssignMessage, AttachedReply, PushMessage
from paceline.core.decider import Decider
from paceline.core.descent import Descent
from paceline.core.events import Answered, Push, Spoiled
from paceline.core.leases import Lease, LeaseBook
from paceline.core.modes import PushId, parse_mode
from paceline.core.steps import Steps
from paceline.observe.record.spans import NO_SPANS
from paceline.params import Layout, OptimizerSpec, Placement, bind, describe, tensor_views
from paceline.ps.config import ServerConfig
from paceline.ps.executor import Executor, Pushed
from paceline.ps.outcomes import (
    Forgotten,
    ModeChanged,
    Outcome,
    Placed,
    PushSpoiled,
    Reduced,
    SlicesDue,
    SnapshotTaken,
    VectorAnswers,
)
from paceline.ps.peers import WorkerPeer
from paceline.ps.shard import Copy, Gradients, Shard
from paceline.worker.steppers import (
    Request,
    Stepper,
    StepperMemory,
    local_step_of,
    make_stepper,
    served_optimizer,
)

__all__ = ["SimulatedRun"]


@dataclass
class _Worker:
    """A worker as the simulation sees it; `requests` is what it does, up to its next exchange."""

    rank: int
    model: nn.Module
    stepper: Stepper
    sequence: int = 0
    read_version: int = 0
    lease: Lease | None = None
    unsent: list[int] = field(default_factory=list)
    unsent_samples: int = 0
    requests: Iterator[Request] | None = None
    request: Request | None = None
    epoch: int = 0
    waited: float = 0.0
    idle_since: float = 0.0


class _SimulatedCarrier:
    """A worker's gradients and its copy of the parameters are in this process.

    Args:
        admitted: called with the worker, the version, and whether it has fresh parameters.
    """

    checked = False
    streams = False
    has_thread = False

    def __init__(
        self,
        worker: int,
        gradients: Gradients,
        copy: list[Tensor],
        admitted: Callable[[int, int, bool], None],
    ) -> None:
        self.gradients = gradients
        self.copy: Copy | None = copy
        self._worker = worker
        self._admitted = admitted
        self._reply = (0, False)

    def begin_reply(self, reply: AdmitReply, *, fetch: bool) -> Sequence[Copy]:
        self._reply = reply.version, fetch
        return (self.copy,) if fetch and self.copy is not None else ()

    def end_reply(self) -> None:
        self._admitted(self._worker, *self._reply)

    def ready(self, message: PushMessage | AssignMessage) -> Fence | None:
        return None

    def pushed_parameters(self) -> Sequence[Tensor]:
        raise NotImplementedError("a simulated run has servers")

    def welcome(self, reply: AttachedReply, owned: Sequence[int]) -> None:
        """Nothing: it has no link, as below."""

    def slice_ready(self, position: int) -> None: ...
    def read_in_place(self, in_place: bool) -> None: ...
    def refit(self, shard: Shard) -> None: ...
    def skip(self) -> None: ...
    def resume(self, connection: Connection, received: int) -> None: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


class SimulatedRun:
    """Train a model with simulated workers.

    Args:
        model: makes one worker's model; called once for each worker, with the same random seed.
        optimizer: makes the optimizer of a model.
        backward: adds to a model's gradient that of the batch of samples at these indices.
        samples: in an epoch.
        step_s: virtual seconds of one step of each worker; their number is the number of workers.
        jitter: each step takes up to this part longer or shorter.
        latency_s: virtual seconds of an exchange.
    """

    def __init__(
        self,
        *,
        mode: str,
        model: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        backward: Callable[[nn.Module, list[int]], object],
        samples: int,
        batch_size: int,
        step_s: Sequence[float],
        jitter: float = 0.1,
        latency_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.mode = parse_mode(mode)
        self.mode.check(len(step_s))
        self.time = 0.0
        self.epochs = 0
        self._backward, self._samples = backward, samples
        self._step_s, self._jitter, self._latency_s = list(step_s), jitter, latency_s
        self._random = random.Random(seed)
        self._seed = seed
        self._decider = Decider(self.mode)
        config = ServerConfig(rank=0, servers=1, workers=len(step_s), mode=mode, run_dir="", deadline_s=0.0)
        self._executor = Executor(config, Faults.parse(""), NO_SPANS)
        self._events: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()
        self._orders: dict[int, Tensor] = {}
        self._until = 0
        self._on_epoch: Callable[[int], None] | None = None
        self._workers: dict[int, _Worker] = {}
        book = LeaseBook(
            samples=samples,
            batch_size=batch_size,
            drop_last=False,
            by_round=self.mode.by_round,
            copies=self.mode.copies,
        )
        for rank in range(len(step_s)):
            torch.manual_seed(seed)
            self._join(rank, model(), optimizer, book)
        for rank in self._workers:
            self._decider.join(rank, 0)
        torch.manual_seed(seed)
        self.model = model()
        """With the servers' parameters."""
        bind(self._parameters_of(self.model), tensor_views(self._base, self._layout))

    def _join(
        self,
        rank: int,
        model: nn.Module,
        make: Callable[[nn.Module], torch.optim.Optimizer],
        book: LeaseBook,
    ) -> None:
        optimizer = make(model)
        served = served_optimizer(self.mode, optimizer)
        layout, parameters = describe(model, optimizer)
        if not self._workers:
            self._layout = layout
            self._names = [t.name for t in layout.tensors]
            spec = OptimizerSpec.of(served)
            start = [p.detach().clone() for p in parameters]
            placement = Placement.over(layout, [0], 0)
            self._executor.adopt(layout, spec, None, placement, lambda slices: self._fill(layout, start))
            descent = Descent.of(spec.groups[0]) if self.mode.by_epoch else None
            self._decider.begin(book, 1, descent)
        slot, base = torch.zeros_like(self._base), self._base.clone()
        near = base.clone() if self.mode.local else base
        bind(parameters, tensor_views(near, layout))
        stepper = make_stepper(
            self.mode,
            layout,
            StepperMemory(slot, base, near),
            parameters,
            optimizer,
            local_step_of(optimizer),
        )
        self._workers[rank] = _Worker(rank, model, stepper)
        gradients = Gradients(slot, layout, layout.slices)
        no_link: Any = None
        carrier = _SimulatedCarrier(rank, gradients, self._shard.flats(base), self._admitted)
        peer = WorkerPeer(no_link, rank, 0, carrier)
        self._executor.peers[rank] = peer
        self._executor.keep_backup(peer)

    def _fill(self, layout: Layout, values: Sequence[Tensor]) -> None:
        for value, view in zip(values, tensor_views(self._base, layout), strict=True):
            view.copy_(value)

    @property
    def _base(self) -> Tensor:
        assert self._executor.base is not None
        return self._executor.base

    @property
    def _shard(self) -> Shard:
        return self._executor.present_shard

    def _parameters_of(self, model: nn.Module) -> list[nn.Parameter]:
        named = dict(model.named_parameters())
        return [named[name] for name in self._names]

    @property
    def staleness(self) -> float:
        """The mean over all applied pushes."""
        counts = self._decider.totals.staleness
        return sum(s * n for s, n in counts.items()) / max(1, sum(counts.values()))

    @property
    def accounts(self) -> list[dict[str, int]]:
        """What became of the samples of each epoch (LeaseBook.accounts)."""
        assert self._decider.book is not None
        return self._decider.book.accounts()

    @property
    def idleness(self) -> float:
        """The part of their time that the workers waited."""
        return sum(w.waited for w in self._workers.values()) / max(1e-12, self.time * len(self._workers))

    @property
    def version(self) -> int:
        """Updates applied."""
        return self._decider.version

    def train(self, epochs: int, on_epoch: Callable[[int], None] | None = None) -> None:
        """Run to the end; call it once.

        Args:
            on_epoch: called at the end of every epoch with its number; `model` is as the servers have it.
        """
        self._until, self._on_epoch = epochs, on_epoch
        for worker in self._workers.values():
            self._take(worker)
        self._run()
        # The scripts are through: what no push has covered is pushed, and everybody leaves.
        for worker in self._workers.values():
            if worker.stepper.unsent:
                worker.requests = worker.stepper.flush()
                self._drive(worker)
            else:
                self._act(self._decider.leave(worker.rank, 0, finished=True))
        self._run()

    def _run(self) -> None:
        while self._events:
            self.time, _, rank = heapq.heappop(self._events)
            worker = self._workers[rank]
            if worker.requests is None:
                worker.requests = self._step(worker)
            self._drive(worker)

    # --- one worker's life ------------------------------------------------------------------------

    def _take(self, worker: _Worker) -> None:
        """Ask for the next lease; without one the worker rests until the lead has an answer."""
        leases, steps = self._decider.take(worker.rank, worker.epoch, 1, wait=True)
        if leases is None:
            self._decider.carry(worker.rank, worker.unsent)
            worker.idle_since = self.time
        else:
            self._granted(worker, leases, self._decider.over(worker.epoch))
        self._act(steps)

    def _granted(self, worker: _Worker, leases: tuple[Lease, ...], over: bool) -> None:
        if leases:
            worker.lease = leases[0]
            if worker.read_version != self._decider.version and not self.mode.local:
                self._fetch(worker)  # the others went on while it rested
            step_s = self._step_s[worker.rank] * (1 + self._jitter * self._random.uniform(-1, 1))
            self._wake_in(worker, step_s)
        elif over and worker.epoch + 1 < self._until:
            worker.epoch += 1
            self._take(worker)

    def _wake_in(self, worker: _Worker, seconds: float) -> None:
        heapq.heappush(self._events, (self.time + seconds, next(self._numbers), worker.rank))

    def _step(self, worker: _Worker) -> Iterator[Request]:
        """One step of the script: forward, backward, optimizer.step(), the next lease."""
        assert worker.lease is not None
        worker.model.zero_grad()
        self._backward(worker.model, self._indices(worker.lease))
        yield from worker.stepper.step()
        worker.stepper.step_ended()
        if worker.lease is not None:  # no push has covered it
            worker.unsent.append(worker.lease.id)
            worker.unsent_samples += worker.lease.samples
            worker.lease = None
        if self.mode.own_threads:  # its thread, as fast as it can be
            yield from worker.stepper.flush()
        if self.mode.local and not self._try_take(worker):
            yield from worker.stepper.flush()  # before it rests
        if worker.lease is None:
            self._take(worker)

    def _try_take(self, worker: _Worker) -> bool:
        leases, _ = self._decider.take(worker.rank, worker.epoch, 1, wait=False)
        if leases:
            self._granted(worker, leases, False)
        return bool(leases)

    def _drive(self, worker: _Worker) -> None:
        """Run what the worker does to its next exchange, or to the end."""
        assert worker.requests is not None
        requests = worker.requests
        request = next(requests, None)
        if request is not None:
            self._exchange(worker, request)
        elif worker.requests is requests:
            worker.requests = None

    def _exchange(self, worker: _Worker, request: Request) -> None:
        worker.request, worker.idle_since = request, self.time
        if not request.push:
            if request.fetch:
                self._fetch(worker)
            self._go_on(worker)
            return
        leases, samples = worker.unsent, worker.unsent_samples
        worker.unsent, worker.unsent_samples = [], 0
        if request.covers_step and worker.lease is not None:
            leases, samples = [*leases, worker.lease.id], samples + worker.lease.samples
            worker.lease = None
        push = Push(
            id=PushId(worker.rank, 0, worker.sequence),
            read_version=worker.read_version,
            samples=samples,
            leases=tuple(leases),
            void=not request.finite,
            fetch=request.fetch,
        )
        worker.sequence += 1
        here, peer = self._executor.pushed, self._executor.peers[worker.rank]
        for older in [p for p, pushed in here.items() if pushed.peer is peer and not pushed.held]:
            del here[older]
        here[push.id] = Pushed(peer, peer.carrier.gradients, push.void, frozenset(request.missing))
        self._act(self._decider.push(push))

    def _admitted(self, rank: int, version: int, fresh: bool) -> None:
        """The servers have answered a worker, and given it fresh parameters if it wanted them."""
        worker = self._workers[rank]
        if fresh and self.mode.payload == "none":
            self._fetch(worker)  # live it reads the servers' memory
        elif fresh:
            worker.read_version = version
        self._go_on(worker)

    def _go_on(self, worker: _Worker) -> None:
        """The worker goes on, a latency later."""
        worker.request = None
        worker.waited += self.time - worker.idle_since + self._latency_s
        self._wake_in(worker, self._latency_s)

    def _fetch(self, worker: _Worker) -> None:
        peer = self._executor.peers[worker.rank]
        worker.read_version = self._decider.version
        self._shard.update((), None, [copy for copy in (peer.carrier.copy, peer.backup) if copy is not None])

    # --- the servers ------------------------------------------------------------------------------

    def _act(self, steps: Steps) -> None:
        self._execute(steps)
        while True:
            answers, more = self._decider.granted(1)
            while self.epochs < self._decider.epoch:
                self.epochs += 1
                if self._on_epoch is not None:
                    self._on_epoch(self.epochs)
            if not answers and not more:
                return
            self._execute(more)
            for rank, leases, over in answers:
                self._granted(self._workers[rank], leases, over)

    def _execute(self, steps: Steps) -> None:
        self._executor.queue.extend(steps)
        while (outcomes := self._executor.execute_next(_admit)) is not None:
            for outcome in outcomes:
                self._follow_from(outcome)

    def _follow_from(self, outcome: Outcome) -> None:
        match outcome:
            case VectorAnswers(answers):
                held = [*self._executor.queue]  # what follows an ask waits for what comes of it
                self._executor.queue.clear()
                self._act([*self._decider.decide(Answered((tuple(answers),))).steps, *held])
            case PushSpoiled(worker):
                self._decider.decide(Spoiled(worker))
            case Forgotten(peer):
                del self._executor.peers[peer.worker]
            case Reduced() | Placed() | SlicesDue() | ModeChanged() | SnapshotTaken():
                raise NotImplementedError(f"a simulated run has no {outcome}")
            case _:
                assert_never(outcome)

    def _indices(self, lease: Lease) -> list[int]:
        order = self._orders.get(lease.epoch)
        if order is None:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + lease.epoch)
            order = self._orders[lease.epoch] = torch.randperm(self._samples, generator=generator)
            self._orders.pop(lease.epoch - 2, None)
        return [i for start, stop in lease.ranges for i in order[start:stop].tolist()]


def _admit(worker: int, version: int) -> AdmitReply:
    return AdmitReply(version=version)
