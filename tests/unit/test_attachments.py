"""Workers' links, as a server keeps them whatever its role is."""

import queue
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paceline.comm import Kind
from paceline.comm.faults import Faults
from paceline.comm.server_messages import ModelMessage
from paceline.core.decider import Decider
from paceline.core.server.standby import Standby
from paceline.observe.record.spans import NO_SPANS
from paceline.params import Numerics, OptimizerSpec, Placement, describe
from paceline.ps.attachments import Attachments
from paceline.ps.config import ServerConfig
from paceline.ps.controller_line import ControllerLine
from paceline.ps.executor import Executor
from paceline.ps.follower import Follower
from paceline.ps.leader import Leader
from paceline.ps.part_writer import PartWriter
from paceline.ps.parts import ServerParts
from paceline.ps.run_store import LocalParts
from tests.links import linked


class Posts:
    """A hub: what threads post waits here for the main thread."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.post = self.waiting.put

    def release(self, connection: Any) -> None:
        pass


def following(directory: Path) -> Follower:
    """Server 1, which follows server 0, with a model."""
    config = ServerConfig(
        rank=1, servers=2, workers=2, mode="asp", run_dir=str(directory), deadline_s=1.0, replicas=1
    )
    hub: Any = Posts()
    link: Any = SimpleNamespace(tell=lambda message: None, send=lambda *frame: None)
    executor = Executor(config, Faults.parse(""), NO_SPANS)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout, _ = describe(model, optimizer)
    spec, placement = OptimizerSpec.of(optimizer), Placement.over(layout, [0, 1], 1)
    executor.adopt(layout, spec, None, placement, lambda slices: None)
    follower = Follower(
        ServerParts(
            config=config,
            secret=b"",
            controller=ControllerLine(link, {}),
            hub=hub,
            spans=NO_SPANS,
            executor=executor,
            attachments=Attachments(executor, hub, NO_SPANS),
            part_writer=PartWriter(
                "server-1.safetensors", Faults.parse(""), NO_SPANS, hub.post, LocalParts()
            ),
            checkpoint_parts=LocalParts(),
        )
    )
    decider = Decider(executor.mode)
    decider.begin(None, 1, None)
    decider.join(1, 0)
    follower.machine.adopt(layout, placement, 1, Standby(decider), takes_part=True)
    follower.heir.model = ModelMessage(
        layout=layout.to_json(),
        optimizer=spec.to_json(),
        data=None,
        state_keys=(),
        numerics=Numerics.here().to_json(),
        checkpoint=None,
        placement=placement,
        takes_part=True,
        extras_bytes=0,
    )
    return follower


def ended_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_link_that_breaks_after_a_promotion_is_seen_by_the_new_leader(tmp_path: Path) -> None:
    """Its thread was started when this server was a follower."""
    with linked() as (mine, theirs):
        follower = following(tmp_path)
        parts, layout = follower.parts, follower.parts.executor.layout
        assert layout is not None
        mine.peer = "worker:1"
        body = {"incarnation": 0, "fingerprint": layout.fingerprint, "carrier": "inline", "keeps": True}
        frame: Any = SimpleNamespace(kind=Kind.ATTACH, body=body, descriptors=[])
        follower.on_frame(mine, frame)
        assert theirs.receive().kind is Kind.ATTACHED
        parts.executor.peers[1].pid = ended_process()
        standby = follower.machine.standby
        assert standby is not None and standby.decider.machine.members == {1}
        leader = Leader.succeeding(follower)
        assert standby.decider.machine.members == {1}
        theirs.close()
        hub: Any = parts.hub
        hub.waiting.get(timeout=30)()
        for peer in parts.attachments.lost():
            leader.worker_lost(peer)
        assert not parts.executor.peers and standby.decider.machine.members == set()
        leader.close()
        parts.executor.present_shard.close()
