"""Workers' links, as a server keeps them whatever its role is."""

import queue
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paceline.comm import Kind
from paceline.comm.faults import Faults
from paceline.core.sequencer import OrderLog
from paceline.observe.record.spans import NO_SPANS
from paceline.params import OptimizerSpec, Placement, describe
from paceline.ps.attachments import Attachments
from paceline.ps.config import ServerConfig
from paceline.ps.executor import Executor
from paceline.ps.leader import LeadServer
from paceline.ps.part_writer import PartWriter
from paceline.ps.parts import ServerParts
from paceline.ps.peers import WorkerPeer
from paceline.ps.server import Server
from tests.links import linked


class Posts:
    """A hub: what threads post waits here for the main thread."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.post = self.waiting.put

    def release(self, connection: Any) -> None:
        pass


class Leading(LeadServer):
    """A leader that is built from a follower's parts; it remembers who left."""

    def __init__(self, parts: ServerParts) -> None:
        Server.__init__(self, parts)
        self._linkless = {}
        self.left: list[int] = []

    def look(self) -> None:
        """What its loop does."""
        for peer in self.parts.attachments.lost():
            self._worker_lost(peer)

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        self.left.append(peer.worker)


def following() -> Server:
    """A follower with a model."""
    config = ServerConfig(rank=0, servers=2, workers=2, mode="asp", run_dir="", deadline_s=1.0, replicas=1)
    hub: Any = Posts()
    controller: Any = SimpleNamespace(watch=lambda back: None)
    executor = Executor(config, Faults.parse(""), NO_SPANS)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout, _ = describe(model, optimizer)
    placement = Placement.over(layout, [0], 0)
    executor.adopt(layout, OptimizerSpec.of(optimizer), None, placement, lambda slices: None)
    return Server(
        ServerParts(
            config=config,
            secret=b"",
            controller=controller,
            hub=hub,
            spans=NO_SPANS,
            executor=executor,
            attachments=Attachments(executor, hub, NO_SPANS),
            part_writer=PartWriter("server-0.safetensors", Faults.parse(""), NO_SPANS, hub.post),
            log=OrderLog(4),
        )
    )


def ended_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_link_that_breaks_after_a_promotion_is_seen_by_the_new_leader() -> None:
    """Its thread was started when this server was a follower."""
    with linked() as (mine, theirs):
        follower = following()
        layout = follower.parts.executor.layout
        assert layout is not None
        mine.peer = "worker:1"
        body = {"incarnation": 0, "fingerprint": layout.fingerprint, "inline": True, "keeps": True}
        frame: Any = SimpleNamespace(kind=Kind.ATTACH, body=body, descriptors=[])
        peer = follower.parts.attachments.attach(mine, frame, leave=lambda older: None)
        peer.pid = ended_process()
        leader = Leading(follower.parts)
        theirs.close()
        leader.parts.hub.waiting.get(timeout=30)()
        leader.look()
        assert leader.left == [1]
        leader.parts.attachments.detach(peer, finished=False)
        assert not leader.parts.executor.peers
        leader.parts.executor.present_shard.close()
