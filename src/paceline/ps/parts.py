"""ServerParts: what a server's process has whatever its role is. A promotion builds a leader from them."""

from dataclasses import dataclass
from typing import Any

from paceline.comm import Connection, Frame, Hub, Listener
from paceline.comm.faults import Faults
from paceline.comm.lasting import LastingLink
from paceline.core.sequencer import OrderLog
from paceline.exceptions import LinkError
from paceline.observe.record.spans import Recorder, recorder_of
from paceline.ps.attachments import Attachments
from paceline.ps.config import ServerConfig
from paceline.ps.executor import Executor
from paceline.ps.part_writer import PartWriter

__all__ = ["ServerParts", "make_parts"]

_LOG_STEPS = 4096
"""Number of the last steps of the order that are kept."""


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """The parts that a follower and a leader own alike."""

    config: ServerConfig
    secret: bytes
    controller: LastingLink
    hub: Hub
    """Its handler is the role that the server has now."""
    spans: Recorder
    executor: Executor
    attachments: Attachments
    part_writer: PartWriter
    log: OrderLog
    """The steps of the order that this server has heard of."""


class _NoRole:
    """Handles a hub until the server has its role."""

    def on_stranger(self, reason: str) -> None:
        raise LinkError(reason)

    def on_hello(self, connection: Connection, body: dict[str, Any]) -> None:
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
    executor = Executor(config, faults, spans)
    return ServerParts(
        config=config,
        secret=secret,
        controller=controller,
        hub=hub,
        spans=spans,
        executor=executor,
        attachments=Attachments(executor, hub, spans),
        part_writer=PartWriter(f"server-{config.rank}.safetensors", faults, spans, hub.post),
        log=OrderLog(_LOG_STEPS if config.replicas else 0),
    )
