"""A worker whose pushes and parameters travel over its socket, as its server sees it."""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from paceline.comm import Connection, Frame, Kind
from paceline.comm.transfer import Transfer
from paceline.comm.worker_messages import AdmitReply, AttachMessage, PullMessage, PushMessage
from paceline.observe.record.spans import NO_SPANS
from paceline.params import OptimizerSpec, bytes_of, describe, flat_view
from paceline.ps.carriers import Attaching
from paceline.ps.carriers.inline_carrier import InlineCarrier
from paceline.ps.shard import Shard
from tests.links import linked

LR = 0.5


class Serving:
    """A server with one worker: three slices, of which it answers for some."""

    def __init__(self, connection: Connection, owned: list[int]) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        groups = [{"params": layer.parameters()} for layer in model]
        optimizer = torch.optim.SGD(groups, lr=LR)
        self.layout, _ = describe(model, optimizer, servers=1)
        base = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        spec = OptimizerSpec.of(optimizer)
        self.shard = Shard(self.layout, spec, self.layout.slices, base, owned=owned)
        self.came: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        connection.keep()
        self.connection = connection
        self.carrier = InlineCarrier(
            Attaching(
                connection=connection,
                worker=0,
                message=AttachMessage(fingerprint="", incarnation=0, carrier="inline"),
                descriptors=(),
                layout=self.layout,
                shard=self.shard,
                on_device=None,
                transfer=Transfer(),
                in_place=False,
                sent_in_place=False,
                groups_of=lambda optimizer: None,
                release=lambda connection: None,
                post=lambda link, frame, reason: self.came.put(frame),
                spans=NO_SPANS,
            )
        )

    def apply(self, version: int, *, fetch: bool, between: Callable[[], None] = lambda: None) -> None:
        """What the worker pushed is applied, and it is answered; `between` is called after every slice."""
        carrier = self.carrier
        copies = carrier.begin_reply(AdmitReply(version=version), fetch=fetch)
        with torch.no_grad():
            for i, state in enumerate(self.shard.parameters):
                state.sub_(carrier.gradients.flat[i], alpha=LR)
                if fetch and i in self.shard.owned:
                    copied = copies[0][i]
                    assert copied is not None
                    copied.copy_(state)
                    carrier.slice_ready(i)
                between()
        carrier.end_reply()


@contextmanager
def serving(owned: list[int]) -> Iterator[tuple[Connection, Serving]]:
    with linked("tcp") as (worker, server):
        worker.keep()
        it = Serving(server, owned)
        try:
            yield worker, it
        finally:
            it.carrier.close()


def push(worker: Connection, it: Serving, value: float) -> None:
    gradient = torch.zeros(it.layout.nbytes, dtype=torch.uint8)
    for piece in it.layout.slices:
        flat_view(gradient, piece).fill_(value)
    views = [bytes_of(flat_view(gradient, piece)) for piece in it.layout.slices]
    worker.tell(PushMessage(n=1, sequence=0, read_version=0), views)


@pytest.mark.parametrize(("owned", "fetch"), [([0, 1, 2], False), ([0], False), ([], True)])
def test_no_worker_goes_on_before_its_push_is_applied_everywhere(owned: list[int], fetch: bool) -> None:
    """Else its next one would come into the memory of this one."""
    with serving(owned) as (worker, it):
        push(worker, it, 1.0)
        it.came.get(timeout=5)
        heard: list[bool] = []
        it.apply(1, fetch=fetch, between=lambda: heard.append(worker.wait(0.02)))
        assert heard == [False, False, False]
        frame = worker.receive()
        assert frame.kind is Kind.ADMIT and frame.payload_bytes == 0
        for value in it.shard.parameters:
            assert torch.equal(value, torch.full_like(value, -LR))


def test_the_whole_of_an_answer_is_not_there_before_all_work_is_done() -> None:
    with serving([0]) as (worker, it):
        push(worker, it, 1.0)
        it.came.get(timeout=5)
        heard: list[bool] = []

        def look() -> None:
            if not heard:
                assert worker.receive().payload_bytes == 64  # the head may come early
            heard.append(worker.wait(0.02))

        it.apply(1, fetch=True, between=look)
        assert heard == [False, False, False]
        room = bytearray(64)
        worker.read_into([memoryview(room)])
        assert torch.frombuffer(room, dtype=torch.float32).eq(-LR).all()


def test_an_answer_that_came_while_the_link_was_broken_is_sent_when_it_goes_on() -> None:
    """Orders overtake requests: the lead has got this one, and here it was lost with the socket."""
    with serving([0, 1, 2]) as (worker, it), linked("tcp") as (fresh, theirs):
        push(worker, it, 1.0)
        it.came.get(timeout=5)
        it.apply(1, fetch=False)
        assert worker.receive().body == {"version": 1}
        it.connection.sock.shutdown(2)
        assert it.came.get(timeout=5) is None
        it.apply(2, fetch=True)
        it.carrier.resume(theirs, worker.received)
        resumed = fresh.receive()
        assert resumed.kind is Kind.RESUMED
        worker.go_on(fresh, resumed.body["received"])
        worker.tell(PullMessage(n=2, sequence=1, read_version=1))
        frame = worker.receive()
        assert frame.body == {"version": 2}
        blob = bytearray(worker.read_blob(frame, 1000))
        assert torch.frombuffer(blob, dtype=torch.float32).eq(-2 * LR).all()


def test_a_link_that_is_closed_while_its_worker_waits_for_an_answer_ends_at_once() -> None:
    """Else closing waits for its thread, for seconds, and meanwhile the server serves nobody."""
    with serving([0]) as (worker, it):
        push(worker, it, 1.0)
        it.came.get(timeout=5)
        it.carrier.close()
        assert not it.carrier.link.alive
