"""What every carrier promises: the server's end (`ps/carriers`) and the worker's (`worker/exchange`).

Each test runs with every kind of carrier. A kind makes both ends over a real link; the harness plays the
server's executor and the worker's exchange.
"""

import dataclasses
import gc
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Connection, Frame, Kind, Region
from paceline.comm.device import DeviceBlock, SharedDevice
from paceline.comm.transfer import Transfer
from paceline.comm.worker_messages import (
    ADMIT,
    ATTACHED,
    ORDERED,
    TO_SERVER,
    AdmitReply,
    AssignMessage,
    AttachedReply,
    AttachMessage,
    OrderedMessage,
    PullMessage,
    PushMessage,
)
from paceline.core.modes import parse_mode
from paceline.exceptions import FrameError, LinkError
from paceline.observe.record.spans import NO_SPANS
from paceline.params import Layout, OptimizerSpec, describe, flat_view
from paceline.ps.carriers import Attaching, Carrier, make_carrier
from paceline.ps.device_parameters import DeviceParameters
from paceline.ps.device_reader import DeviceReader
from paceline.ps.device_shard import DeviceShard
from paceline.ps.shard import Contribution, Shard
from paceline.testing.host_device import HostDevice
from paceline.worker.exchange.device_link import DeviceLink
from paceline.worker.exchange.device_memory import DeviceMemory
from paceline.worker.exchange.exchange_memory import ExchangeMemory
from paceline.worker.exchange.inline_link import InlineLink
from paceline.worker.exchange.link_carrier import LinkCarrier
from paceline.worker.exchange.mirrored_link import MirroredLink
from paceline.worker.exchange.shared_link import SharedLink
from tests.links import linked, open_descriptors

LR = 0.5
SLICES = 3
PATIENCE_S = 10.0


@dataclasses.dataclass(frozen=True)
class CarrierKind:
    """How to make both ends."""

    name: str
    mode: str
    stream: str = "unix"
    """Of the link: "unix" or "tcp"."""
    inline: bool = False
    shares: bool = False
    """The worker maps the server's memory."""
    device: Callable[[], SharedDevice] | None = None
    """The server's memory is there."""
    mirrors: Callable[[], SharedDevice] | None = None
    """The worker copies slices between it and the memory that the server sees."""

    @property
    def all_owned(self) -> bool:
        """Whether there is one server, which answers for all slices."""
        return self.device is not None


def cuda_device() -> SharedDevice:
    from paceline.comm.cuda_device import CudaDevice

    return CudaDevice(torch.device("cuda"))


@contextmanager
def own_queue(kind: "CarrierKind") -> Iterator[None]:
    """Give a GPU its work in another queue than the rest of this process does, as another process would; wait
    until that is done."""
    if cuda_device not in (kind.device, kind.mirrors):
        yield
        return
    mine = torch.cuda.Stream()
    with torch.cuda.stream(mine):
        yield
    mine.synchronize()


KINDS = [
    CarrierKind("inline over TCP", "asp", "tcp", inline=True),
    CarrierKind("inline over a unix socket", "bsp", inline=True),
    CarrierKind("shared memory", "asp"),
    CarrierKind("shared, in place", "bsp", shares=True),
    CarrierKind("mirrored", "asp", mirrors=HostDevice),
    CarrierKind("device", "asp", device=HostDevice),
    CarrierKind("device, in place", "bsp", device=HostDevice),
    CarrierKind("CUDA, mirrored", "asp", mirrors=cuda_device),
    CarrierKind("CUDA", "asp", device=cuda_device),
    CarrierKind("CUDA, in place", "bsp", device=cuda_device),
]


def param(kind: CarrierKind) -> Any:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.param(kind, id=kind.name, marks=[pytest.mark.gpu, skip] if "CUDA" in kind.name else [])


class SameProcessMemory(DeviceMemory):
    """A process cannot open a CUDA handle that it made itself: blocks are found by their handles instead."""

    def __init__(self, layout: Layout, device: SharedDevice, parameters: DeviceParameters) -> None:
        super().__init__(layout, device)
        self.made: dict[bytes, DeviceBlock] = {}
        take = parameters.take

        def taken() -> DeviceBlock:
            block = take()
            self.made[block.handle] = block
            return block

        parameters.take = taken  # type: ignore[method-assign]
        self.made[parameters.handle] = SimpleNamespace(memory=parameters.base)  # type: ignore[assignment]

    def open(self, handle: bytes) -> DeviceBlock:
        return self.made[handle]


class Run:
    """One server and one worker: both ends of a link, and what stands around them."""

    def __init__(self, kind: CarrierKind, near: Connection, far: Connection, owned: Sequence[int]) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(SLICES)))
        groups = [{"params": layer.parameters()} for layer in model]
        optimizer = torch.optim.SGD(groups, lr=LR)
        self.kind = kind
        self.mode = parse_mode(kind.mode)
        self.layout: Layout = describe(model, optimizer, servers=1)[0]
        self.worker, self.far = near, far
        self.region = Region.create(self.layout.nbytes)
        base = torch.frombuffer(self.region.buffer, dtype=torch.uint8)
        spec, slices = OptimizerSpec.of(optimizer), self.layout.slices
        self.on_device: DeviceParameters | None = None
        self.memory: ExchangeMemory | DeviceMemory
        self.link: LinkCarrier
        if kind.device is not None:
            device = kind.device()
            self.on_device = DeviceParameters(device, base)
            reader = DeviceReader(device, lambda: None)
            self.shard: Shard = DeviceShard(self.layout, spec, slices, self.on_device.base, reader)
            # Another process would open the memory; one process opens a CUDA handle of its own to no end.
            self.memory = there = SameProcessMemory(self.layout, device, self.on_device)
            self.link = DeviceLink(near, there)
        else:
            self.shard = Shard(self.layout, spec, slices, base, owned=owned)
            shared = self.region if kind.shares else None
            self.memory = here = ExchangeMemory(self.layout, shared, may_share=kind.shares)
            self.link = InlineLink(near, 0, here, Transfer(), None) if kind.inline else SharedLink(here)
            if kind.mirrors is not None:
                self.link = MirroredLink(near, here, kind.mirrors())
        self.fill(lambda i: float(i + 1))
        self.link.arrange(self.layout.slices, owned)
        self.came: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.carrier = self._attach(owned)

    def _attach(self, owned: Sequence[int]) -> Carrier:
        message = AttachMessage(fingerprint=self.layout.fingerprint, incarnation=0, carrier="")
        descriptors = self.link.offer(message)
        self.worker.tell(message, (), descriptors)
        for end in (self.worker, self.far):
            end.keep()
        frame = self.far.receive()
        attach = TO_SERVER.read(frame.kind, frame.body)
        assert attach == message and isinstance(attach, AttachMessage)
        carrier = make_carrier(
            Attaching(
                connection=self.far,
                worker=0,
                message=attach,
                descriptors=frame.descriptors,
                layout=self.layout,
                shard=self.shard,
                on_device=self.on_device,
                transfer=Transfer(),
                in_place=self.mode.in_place,
                sent_in_place=self.mode.in_place,
                groups_of=lambda optimizer: None,
                release=lambda connection: None,
                post=lambda link, frame, reason: self.came.put(frame),
                spans=NO_SPANS,
            )
        )
        if carrier.copy is not None:
            self.shard.update((), None, [carrier.copy])
        carrier.welcome(AttachedReply(version=0), owned)
        frame = self.worker.receive()
        reply = ATTACHED.read(frame.kind, frame.body)
        self.link.hear(reply)
        self._read(frame, reply)
        return carrier

    def close(self) -> None:
        self.carrier.close()
        self.link.close()
        self.shard.close()
        self.region.close()
        if self.on_device is not None:
            self.on_device.close()
        if isinstance(self.memory, ExchangeMemory):
            self.memory.region.close()

    # --- the worker -------------------------------------------------------------------------------

    def gradient(self, value: float) -> None:
        """What the next push brings: `value` times the number of the slice."""
        for piece in self.layout.slices:
            flat_view(self.memory.gradients, piece).fill_(value * (piece.index + 1))

    def request(self, kind: type[OrderedMessage] = PushMessage, **fields: Any) -> None:
        numbers = {"n": 1, "sequence": 0, "read_version": 0}
        self.worker.tell(*self.link.write(kind(**{**numbers, **fields}), None))

    def reply(self) -> AdmitReply:
        """Wait until the reply has come whole."""
        frame = self.worker.receive()
        reply = ADMIT.read(frame.kind, frame.body)
        self.link.hear(reply)
        self._read(frame, reply)
        if isinstance(self.link, MirroredLink):  # as a HostMirror's queue does
            for piece in self.shard.slices:
                self.link.flags.wait_in_order(piece.index, self.link.replies)
        return reply

    def _read(self, frame: Frame, reply: AdmitReply | AttachedReply) -> None:
        for _ in self.link.read(reply) if frame.payload_bytes else ():
            pass

    def parameters(self) -> list[Tensor]:
        """Of each slice, as the worker's model has them."""
        return [flat_view(self.memory.parameters(self.mode), piece) for piece in self.layout.slices]

    # --- the server -------------------------------------------------------------------------------

    def fill(self, value: Callable[[int], float]) -> None:
        for i, flat in enumerate(self.shard.parameters):
            flat.fill_(value(i))

    def arrived(self) -> Frame:
        """The next request, whose payload is in the carrier's memory."""
        frame = self.came.get(timeout=PATIENCE_S) if self.carrier.has_thread else self.far.receive()
        assert frame is not None
        request = ORDERED.read(frame.kind, frame.body)
        if not isinstance(request, PullMessage) and (fence := self.carrier.ready(request)) is not None:
            fence.wait()
        return frame

    def answer(
        self,
        version: int,
        *,
        fetch: bool = True,
        push: bool = True,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Apply what was pushed, and answer."""
        copies = self.carrier.begin_reply(AdmitReply(version=version), fetch=fetch)
        streams = fetch and self.carrier.streams
        given = [Contribution(0, self.carrier.gradients)] if push else []
        by_slice = self.kind.mirrors is not None  # the worker waits for each slice by itself
        if by_slice:
            between()
        self.shard.update(given, None, copies, self.carrier.slice_ready if streams else None)
        if not by_slice:
            between()
        self.carrier.end_reply()

    def round(self, value: float, version: int, *, fetch: bool = True) -> None:
        self.gradient(value)
        self.request(sequence=version)
        self.arrived()
        self.answer(version, fetch=fetch)
        assert self.reply().version == version


@contextmanager
def running(kind: CarrierKind, owned: Sequence[int] = range(SLICES)) -> Iterator[Run]:
    if kind.all_owned and len(owned) < SLICES:
        pytest.skip("one server has all slices")
    with linked(kind.stream) as (near, far):
        run = Run(kind, near, far, [*owned])
        try:
            yield run
        finally:
            run.close()


@pytest.fixture(params=map(param, KINDS))
def kind(request: pytest.FixtureRequest) -> CarrierKind:
    return request.param


def expected(steps: float) -> list[float]:
    """The value of every slice after pushes whose values add up to `steps`."""
    return [(i + 1) * (1 - LR * steps) for i in range(SLICES)]


def check(found: Sequence[Tensor], values: Sequence[float]) -> None:
    for flat, value in zip(found, values, strict=True):
        assert flat.tolist() == pytest.approx([value] * flat.numel())


def test_a_worker_that_attaches_has_the_parameters(kind: CarrierKind) -> None:
    with running(kind) as run:
        check(run.parameters(), expected(0))


def test_a_push_arrives_and_its_reply_brings_the_updated_parameters(kind: CarrierKind) -> None:
    with running(kind) as run:
        run.gradient(0.25)
        run.request(sequence=1)
        frame = run.arrived()
        assert frame.kind is Kind.PUSH and frame.body["sequence"] == 1
        check(run.carrier.gradients.flat, [0.25, 0.5, 0.75])
        run.answer(7)
        assert run.reply().version == 7
        check(run.shard.parameters, expected(0.25))
        check(run.parameters(), expected(0.25))


def test_many_rounds_follow_one_another(kind: CarrierKind) -> None:
    with running(kind) as run:
        total = 0.0
        for version in range(1, 20):
            total += 1 / version
            run.round(1 / version, version)
            check(run.parameters(), expected(total))


def test_a_reply_without_a_fetch_leaves_a_copy_as_it_is(kind: CarrierKind) -> None:
    with running(kind) as run:
        run.round(0.5, 1, fetch=False)
        check(run.shard.parameters, expected(0.5))
        if not run.memory.in_place(run.mode):
            check(run.parameters(), expected(0))
        run.round(0.5, 2)
        check(run.parameters(), expected(1.0))


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("owned", [[0, 1, 2], [1], []])
def test_no_worker_goes_on_before_all_work_is_done(kind: CarrierKind, owned: list[int], fetch: bool) -> None:
    """Else its next push would come into the memory of this one."""
    with running(kind, owned) as run:
        whole = threading.Event()
        heard: list[bool] = []

        def wait() -> None:
            with own_queue(kind):
                run.reply()
            whole.set()

        run.gradient(1.0)
        run.request(sequence=1)
        run.arrived()
        waiting = threading.Thread(target=wait)
        waiting.start()
        run.answer(1, fetch=fetch, between=lambda: heard.append(whole.wait(0.05)))
        assert heard == [False]
        assert whole.wait(PATIENCE_S)
        waiting.join()


def test_slices_that_the_server_does_not_answer_for_are_not_written(kind: CarrierKind) -> None:
    """Another server brings them."""
    with running(kind, owned=[0, 2]) as run:
        before = run.parameters()[1].clone()
        run.round(0.5, 1)
        found = run.parameters()
        check([found[0], found[2]], [expected(0.5)[0], expected(0.5)[2]])
        assert torch.equal(found[1], before)


def test_a_server_that_answers_for_more_slices_brings_them_from_then_on(kind: CarrierKind) -> None:
    with running(kind, owned=[0]) as run:
        run.round(0.5, 1)
        run.shard.own([0, 1, 2])
        run.carrier.refit(run.shard)
        run.gradient(0.5)
        run.request(sequence=2)
        run.arrived()
        copies = run.carrier.begin_reply(AdmitReply(version=2, owned=(0, 1, 2)), fetch=True)
        given = [Contribution(0, run.carrier.gradients)]
        run.shard.update(given, None, copies, run.carrier.slice_ready if run.carrier.streams else None)
        run.carrier.end_reply()
        run.reply()
        check(run.parameters(), expected(1.0))


def test_a_worker_has_a_copy_of_its_own_once_the_mode_forbids_reading_in_place(kind: CarrierKind) -> None:
    with running(kind) as run:
        run.round(0.5, 1)
        run.carrier.read_in_place(False)
        run.round(0.25, 2)
        run.mode = parse_mode("asp")
        check(run.parameters(), expected(0.75))
        run.fill(lambda i: -1.0)  # another worker's push
        check(run.parameters(), expected(0.75))


def test_a_pull_brings_parameters_without_a_push(kind: CarrierKind) -> None:
    with running(kind) as run:
        run.fill(lambda i: 10.0 * i)
        run.request(PullMessage)
        assert run.arrived().kind is Kind.PULL
        run.answer(3, push=False)
        run.reply()
        check(run.parameters(), [0.0, 10.0, 20.0])


def test_an_assign_brings_values_that_take_the_parameters_place(kind: CarrierKind) -> None:
    with running(kind) as run:
        run.gradient(2.0)
        run.request(AssignMessage, sequence=1)
        run.arrived()
        run.shard.assign(run.carrier.gradients.flat)
        run.answer(1, push=False)
        run.reply()
        check(run.parameters(), [2.0, 4.0, 6.0])


def test_a_request_that_is_skipped_gets_no_answer_and_the_next_one_does(kind: CarrierKind) -> None:
    """Other servers had answered it before this one was in the order."""
    with running(kind) as run:
        run.request(PullMessage)
        run.arrived()
        run.carrier.skip()
        assert not run.worker.wait(0.05)
        run.round(0.5, 4)
        check(run.parameters(), expected(0.5))


def test_a_link_goes_on_over_another_socket(kind: CarrierKind) -> None:
    with running(kind) as run, linked(kind.stream) as (fresh, theirs):
        run.round(0.5, 1)
        run.far.sock.shutdown(2)
        if run.carrier.has_thread:
            assert run.came.get(timeout=PATIENCE_S) is None
        with pytest.raises(LinkError):
            run.worker.receive()
        run.carrier.resume(theirs, run.worker.received)
        resumed = fresh.receive()
        assert resumed.kind is Kind.RESUMED
        run.worker.go_on(fresh, resumed.body["received"])
        run.round(0.25, 2)
        check(run.parameters(), expected(0.75))


def test_closing_ends_the_link_at_once_and_leaves_no_descriptor(kind: CarrierKind) -> None:
    """Also while its worker waits for an answer: meanwhile the server would serve no other worker."""
    with running(kind):
        pass  # what is opened once in a process is open now
    gc.collect()
    before = open_descriptors()
    with running(kind) as run:
        run.request(PullMessage)
        run.arrived()
        run.carrier.close()
        with pytest.raises(LinkError):
            run.reply()
    del run
    gc.collect()  # a mapping has a descriptor of its own, and lives as long as what refers to it
    assert open_descriptors() == before


def test_a_carrier_that_a_server_does_not_know_is_refused(kind: CarrierKind) -> None:
    with running(kind) as run:
        message = AttachMessage(fingerprint="", incarnation=0, carrier="pigeon")
        attaching: Any = dataclasses.make_dataclass("A", ["message"])(message)
        with pytest.raises(
            FrameError, match="'pigeon' is not known here; known: device, inline, mirrored, shared"
        ):
            make_carrier(attaching)
        assert run.carrier is not None


def test_a_push_that_its_workers_device_never_finished_is_not_applied(kind: CarrierKind) -> None:
    """The worker dies after its message and before its GPU has written the gradient: what lies in the slot is
    a part of it, or the gradient of before."""
    if kind.device is None:
        pytest.skip("a push is whole when its message is there")
    with running(kind) as run:
        run.round(0.5, 1)
        run.worker.tell(PushMessage(n=2, sequence=2, read_version=1, fence=2))  # nobody raises the flag
        frame = run.far.receive()
        message = ORDERED.read(frame.kind, frame.body)
        assert isinstance(message, PushMessage)
        fence = run.carrier.ready(message)
        assert fence is not None and not fence.reached()
        run.carrier.release()
        fence.wait()
        run.shard.update([Contribution(0, run.carrier.gradients)], None)
        assert isinstance(run.shard, DeviceShard)
        run.shard.reduce([])  # waits for the device
        check(run.shard.parameters, expected(0.5))
        assert run.shard.take_refusals()
