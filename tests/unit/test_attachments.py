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
from paceline.observe.spans import NO_SPANS
from paceline.params import OptimizerSpec, Placement, describe
from paceline.ps.attachments import Attachments
from paceline.ps.config import ServerConfig
from paceline.ps.executor import Executor
from paceline.ps.leader import LeadServer
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
    """A leader that was a follower; it remembers who left."""

    left: list[int]

    def _take_over(self) -> None:
        self.left, self._linkless = [], {}

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        self.left.append(peer.worker)


class Following(Server):
    """A follower with one worker, whose gradients come over its socket."""

    def __init__(self) -> None:
        self.config = ServerConfig(
            rank=0, servers=2, workers=2, mode="asp", run_dir="", deadline_s=1.0, replicas=1
        )
        self._hub: Any = Posts()
        self._executor = Executor(self.config, Faults.parse(""), NO_SPANS)
        self._attachments = Attachments(self._executor, self._hub, NO_SPANS)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layout, _ = describe(model, optimizer)
        placement = Placement.over(layout, [0], 0)
        self._executor.adopt(layout, OptimizerSpec.of(optimizer), None, placement, lambda slices: None)


def ended_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_link_that_breaks_after_a_promotion_is_seen_by_the_new_leader() -> None:
    """Its thread was started when this server was a follower."""
    with linked() as (mine, theirs):
        follower = Following()
        layout = follower._executor.layout
        assert layout is not None
        mine.peer = "worker:1"
        body = {"incarnation": 0, "fingerprint": layout.fingerprint, "inline": True, "keeps": True}
        frame: Any = SimpleNamespace(kind=Kind.ATTACH, body=body, descriptors=[])
        peer = follower._attach(mine, frame)
        peer.pid = ended_process()
        leader = Leading.succeeding(follower)
        assert isinstance(leader, Leading)
        theirs.close()
        follower._hub.waiting.get(timeout=30)()
        for lost in leader._attachments.lost():
            leader._worker_lost(lost)
        assert leader.left == [1]
        leader._attachments.detach(peer, finished=False)
        assert not leader._executor.peers
        follower._executor.present_shard.close()
