"""Messages of a peer that holds the secret and breaks the protocol, against a leader and a follower with a
model and two workers: each is refused, or does no harm, and a healthy worker's push is applied afterwards.

The cases start from valid messages. `PACELINE_SEED=n` repeats them.
"""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from paceline.comm import Connection, Frame, Hub, Kind, Listener, Region
from paceline.comm.faults import Faults
from paceline.comm.frames import decode_body, encode
from paceline.comm.handshake import Keys
from paceline.comm.server_messages import ModelMessage
from paceline.core.decider import Decider
from paceline.core.leases import LeaseBook
from paceline.core.server.standby import Standby
from paceline.exceptions import PacelineError, UpdateOverflow
from paceline.observe.record.spans import NO_SPANS
from paceline.params import Numerics, OptimizerSpec, Placement, describe
from paceline.ps.attachments import Attachments
from paceline.ps.config import ServerConfig
from paceline.ps.controller_line import ControllerLine
from paceline.ps.executor import Executor
from paceline.ps.expected_roles import ExpectedRoles
from paceline.ps.follower import Follower
from paceline.ps.leader import Leader
from paceline.ps.part_writer import PartWriter
from paceline.ps.parts import ServerParts
from paceline.ps.run_store import LocalParts
from tests.links import SECRET, sockets
from tests.mutations import mutated

FAST, SLOW = 2000, 200_000
KEY = b"k" * 32


def server(directory: Path, rank: int) -> ServerParts:
    """A server of two, in this process."""
    config = ServerConfig(
        rank=rank, servers=2, workers=2, mode="asp", run_dir=str(directory), deadline_s=60.0, replicas=1
    )
    link: Any = SimpleNamespace(tell=lambda message: None, send=lambda *frame: None)
    handler: Any = SimpleNamespace(on_end=lambda connection, reason: None)
    hub = Hub(handler, Listener(tcp=False), SECRET, patience_s=60)
    executor, expected = Executor(config, Faults.parse(""), NO_SPANS), ExpectedRoles()
    return ServerParts(
        config=config,
        secret=SECRET,
        controller=ControllerLine(link, {}),
        hub=hub,
        spans=NO_SPANS,
        executor=executor,
        attachments=Attachments(executor, hub, NO_SPANS, expected),
        expected=expected,
        part_writer=PartWriter(
            f"server-{rank}.safetensors", Faults.parse(""), NO_SPANS, hub.post, LocalParts()
        ),
        checkpoint_parts=LocalParts(),
    )


class Under:
    """A server under attack, with two workers that have attached to it."""

    def __init__(self, directory: Path, role: str) -> None:
        (directory / "checkpoints").mkdir(parents=True)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        self.layout, _ = describe(model, optimizer)
        self.spec = OptimizerSpec.of(optimizer)
        self.parts = server(directory, 1)
        placement = Placement.over(self.layout, [0, 1], 1)
        self.parts.executor.adopt(self.layout, self.spec, None, placement, lambda slices: None)
        follower = Follower(self.parts)
        decider = Decider(self.parts.executor.mode)
        book = LeaseBook(samples=64, batch_size=4, drop_last=False, by_round=False)
        decider.begin(book, 1, None)
        follower.machine.adopt(self.layout, placement, 1, Standby(decider), takes_part=True)
        follower.heir.model = ModelMessage(
            **{**self.offer, "state_keys": ("weight", "bias")},
            checkpoint=None,
            placement=placement,
            takes_part=True,
            extras_bytes=0,
        )
        self.role: Leader | Follower = follower
        if role == "leader":
            self.role = Leader.succeeding(follower)
        self.parts.hub.handler = self.role
        self.memory = [Region.create(2 * self.layout.nbytes) for _ in range(2)]
        self.ends: list[Connection] = []
        self.links: list[Connection] = []
        for worker in range(2):
            self.attach(worker, 0)

    @property
    def offer(self) -> dict[str, Any]:
        return {
            "layout": self.layout.to_json(),
            "optimizer": self.spec.to_json(),
            "data": {"samples": 64, "batch_size": 4, "drop_last": False},
            "state_keys": ["weight", "bias"],
            "numerics": Numerics.here().to_json(),
        }

    def attach(self, worker: int, incarnation: int) -> None:
        """A healthy worker attaches."""
        near, far = sockets("unix")
        mine, theirs = (Connection(sock, Keys(send=KEY, receive=KEY)) for sock in (near, far))
        mine.peer = f"worker:{worker}"
        self.parts.expected.expect({0: 0, 1: 0, worker: incarnation}, {0: 0, 1: 0})
        for known, end in ((self.links, mine), (self.ends, theirs)):
            for old in known[worker : worker + 1]:
                old.close()
            known[worker : worker + 1] = [end]
        self.parts.hub.add(mine)
        body = {**self.valid(Kind.ATTACH), "incarnation": incarnation}
        self.role.on_frame(mine, Frame(Kind.ATTACH, body, 0, [os.dup(self.memory[worker].fd)]))

    def valid(self, kind: Kind) -> dict[str, Any]:
        """A message as a healthy worker sends it."""
        return {
            Kind.ATTACH: {
                "fingerprint": self.layout.fingerprint,
                "incarnation": 1,
                "pid": os.getpid(),
                "keeps": False,
                "carrier": "shared",
                "in_place": True,
                "compress": "none",
                "compress_replies": False,
                "listens": {"unix": "a name", "host": "127.0.0.1", "port": 1},
            },
            Kind.PUSH: {
                "n": 1,
                "sequence": 0,
                "read_version": 0,
                "samples": 4,
                "leases": [0],
                "void": False,
                "norm": 1.0,
                "fetch": True,
                "refused": [1],
                "logged": 1,
                "skipped": [2],
                "skipped_samples": 0,
                "missing": [0],
                "residual": 0.0,
                "ready": 0,
                "carries": "slot",
                "settings": [
                    {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()}
                    for group in self.spec.groups
                ],
            },
            Kind.PULL: {"n": 2, "sequence": 0, "read_version": 0, "ready": 0, "without": [0]},
            Kind.ASSIGN: {"n": 3, "sequence": 1, "read_version": 0, "ready": 0},
            Kind.TAKE: {
                "n": 4,
                "epoch": 0,
                "limit": 2,
                "wait": True,
                "ready": 0,
                "give_back": [3],
                "carry": [4],
                "order": ["0123456789abcdef", "RandomSampler"],
            },
            Kind.VOTE: {"n": 5, "who": "any", "wants": True, "ready": 0},
            Kind.CALL: {"n": 6, "place": "train.py:5", "value": "[1, 2]", "ready": 0},
            Kind.DETACH: {"left": True, "logged": 2, "skipped": [5], "skipped_samples": 1},
            Kind.STATE: {},
            Kind.LOAD: {"number": 0, "optimizer": 0},
            Kind.BUFFERS: {},
            Kind.WEIGHTS: {"extras_bytes": 8},
            Kind.SAVED: {"cut": 0},
            Kind.SENDS: {"slices": [0]},
            Kind.PROBE: {},
            Kind.OFFER: self.offer,
            Kind.ADOPT: {},
            Kind.ORDER: {"steps": [], "events": []},
            Kind.PLACED: {"number": 0},
            Kind.ADMIT: {"version": 1},
            Kind.HELLO: {"role": "worker", "rank": 0, "incarnation": 0, "resume": 0, "token": "x"},
        }[kind]

    KINDS = (
        *(Kind.ATTACH, Kind.PUSH, Kind.PULL, Kind.ASSIGN, Kind.TAKE, Kind.VOTE, Kind.CALL, Kind.DETACH),
        *(Kind.STATE, Kind.SAVED, Kind.SENDS, Kind.PROBE, Kind.OFFER, Kind.ADOPT, Kind.ORDER, Kind.PLACED),
        *(Kind.ADMIT, Kind.HELLO, Kind.LOAD, Kind.BUFFERS, Kind.WEIGHTS),
    )

    def attack(self, kind: Kind, body: Any, randoms: random.Random) -> bool:
        """Worker 1 sends this. Returns whether it was refused; raises if the server would die of it."""
        link = self.links[1]
        try:
            data = encode(kind, body, sequence=0, payload_bytes=0, key=KEY)
            body = decode_body(data[40:])  # as it comes over the wire
        except (PacelineError, ValueError, RecursionError):
            return True  # it never comes so far
        blob = None
        if kind in (Kind.STATE, Kind.SAVED, Kind.LOAD, Kind.BUFFERS, Kind.WEIGHTS):
            blob = randoms.choice([b"", b"x" * 30, save({"a": torch.zeros(3)}), b"\xff" * 8, None])
        frame = Frame(kind, body, 0 if blob is None else len(blob), [], blob)
        if kind is Kind.ATTACH and randoms.random() < 0.7:
            frame.descriptors.append(os.dup(self.memory[1].fd))
        try:
            if kind is Kind.HELLO:
                self.role.on_hello(link, body)
            else:
                self.role.on_frame(link, frame)
        except PacelineError:
            return True
        finally:
            while frame.descriptors:
                os.close(frame.descriptors.pop())
            for each in self.ends:
                self.read(each)
        return False

    def read(self, end: Connection) -> None:
        """A worker reads what it was sent."""
        with contextlib.suppress(PacelineError, OSError):
            while end.wait(0) and end.sock.recv(1 << 16):
                pass

    def close(self) -> None:
        self.role.close()
        for each in (*self.links, *self.ends):
            each.close()
        self.parts.executor.present_shard.close()
        self.parts.hub.close()
        for region in self.memory:
            region.close()


@pytest.fixture(params=["leader", "follower"])
def under(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Under]:
    made = Under(tmp_path / "run", request.param)
    yield made
    made.close()


def assault(under: Under, cases: int, seed: int) -> None:
    randoms = random.Random(seed)
    refused = 0
    for number in range(cases):
        kind = randoms.choice(Under.KINDS)
        body = mutated(under.valid(kind), randoms)
        try:
            refused += under.attack(kind, body, randoms)
        except Exception as error:
            pytest.fail(f"PACELINE_SEED={seed}, case {number}: {kind.name} {body!r:.500}: {error!r}")
        if 1 not in under.parts.executor.peers or under.links[1].sock.fileno() < 0:
            under.attach(1, number + 2)  # it was let go; it comes again
    assert refused > cases / 4, "the cases are not hostile"


def alive(under: Under) -> bool:
    """Whether the healthy worker's push is still taken."""
    before = len(under.parts.executor.pushed)
    body = {"n": 1 << 40, "sequence": 1 << 40, "read_version": 0, "samples": 0, "leases": [], "fetch": True}
    version = under.parts.executor.version if hasattr(under.parts.executor, "version") else None
    with contextlib.suppress(UpdateOverflow):  # settings that overflow end the run, which says so
        under.role.on_frame(under.links[0], Frame(Kind.PUSH, body, 0, []))
    if isinstance(under.role, Follower):
        return len(under.parts.executor.pushed) == before + 1
    assert version is None or under.parts.executor.version >= version
    return True


def test_2000_hostile_messages_harm_nobody(under: Under) -> None:
    assault(under, FAST // 2, int(os.environ.get("PACELINE_SEED", "1")))
    assert alive(under)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_000_hostile_messages_harm_nobody(under: Under) -> None:
    assault(under, SLOW // 2, int(os.environ.get("PACELINE_SEED", "2")))
    assert alive(under)
