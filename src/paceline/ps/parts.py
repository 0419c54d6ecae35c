"""ServerParts: what a server's process has whatever its role is. A promotion builds a leader from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.comm import Connection, Frame, Hub, Listener, Region
from paceline.comm.connection import spin_for
from paceline.comm.faults import Faults
from paceline.comm.frames import Body
from paceline.comm.lasting import LastingLink
from paceline.comm.messages import ServerReport
from paceline.exceptions import LinkError
from paceline.observe.record.phase import PHASES
from paceline.observe.record.spans import Recorder, recorder_of
from paceline.params import Layout, OptimizerSpec, Placement
from paceline.ps.attachments import Attachments
from paceline.ps.config import ServerConfig
from paceline.ps.controller_line import ControllerLine
from paceline.ps.executor import Executor
from paceline.ps.expected_roles import ExpectedRoles
from paceline.ps.part_writer import PartWriter
from paceline.ps.run_store import CheckpointParts, checkpoint_parts

__all__ = ["LOG_STEPS", "ServerParts", "make_parts"]

LOG_STEPS = 4096
"""Number of the last steps of the order that servers keep where they can take each other's place."""


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """The parts that a follower and a leader own alike."""

    config: ServerConfig
    secret: bytes
    controller: ControllerLine
    hub: Hub
    """Its handler is the role that the server has now."""
    spans: Recorder
    executor: Executor
    attachments: Attachments
    part_writer: PartWriter
    checkpoint_parts: CheckpointParts
    expected: ExpectedRoles = field(default_factory=ExpectedRoles)

    def adopt(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        region: Region | None,
        placement: Placement,
        read_weights: Callable[[Sequence[Tensor]], None],
        device: str | None = None,
    ) -> None:
        """Take this layout and optimizer; see `Executor.adopt`."""
        self.executor.adopt(layout, spec, region, placement, read_weights, device)
        threads = self.config.worker_threads + self.config.servers
        self.hub.spin_s = spin_for(layout.nbytes, threads, on_device=self.executor.on_device is not None)

    def tell_report(self) -> None:
        """Tell the controller how this server does."""
        executor, spans, progress = self.executor, self.spans, self.part_writer.progress
        self.controller.tell(
            ServerReport(
                updates=executor.updates,
                update_s=round(executor.update_s, 6),
                phases={PHASES[phase]: round(s, 6) for phase, s in spans.flush().items()},
                spans_broken=None if spans.broken is None else str(spans.broken),
                saving=None if progress is None else (progress[0], progress[1]),
            )
        )

    def close(self) -> None:
        """The server ends."""
        for peer in self.executor.peers.values():
            peer.carrier.close()
        self.hub.close()
        if self.executor.shard is not None:
            self.executor.shard.close()
        self.spans.close()


class _NoRole:
    """Handles a hub until the server has its role."""

    def on_stranger(self, reason: str) -> None:
        raise LinkError(reason)

    def on_hello(self, connection: Connection, body: Body) -> None:
        raise LinkError(f"{connection.peer} came too early")

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        raise LinkError(f"{connection.peer} spoke too early")

    def on_end(self, connection: Connection, reason: str) -> None:
        pass


def make_parts(config: ServerConfig, secret: bytes, controller: LastingLink) -> ServerParts:
    """The parts of a process that starts."""
    owner = f"server-{config.rank}.{config.incarnation}"
    spans = recorder_of(config.spans_in, owner, clock_ns=config.clock_ns)
    faults = Faults.parse(config.faults)
    hub = Hub(_NoRole(), Listener(host=config.host), secret, patience_s=config.deadline_s)
    executor, expected = Executor(config, faults, spans), ExpectedRoles()
    checkpoints = checkpoint_parts(config, secret)
    return ServerParts(
        config=config,
        secret=secret,
        controller=ControllerLine(controller, hub.listener.address.to_json()),
        hub=hub,
        spans=spans,
        executor=executor,
        attachments=Attachments(executor, hub, spans, expected),
        expected=expected,
        part_writer=PartWriter(f"server-{config.rank}.safetensors", faults, spans, hub.post, checkpoints),
        checkpoint_parts=checkpoints,
    )
