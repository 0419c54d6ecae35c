"""A worker as a server sees it, over shared memory or TCP.

Both have gradient memory that the server reads and, unless the worker reads the server's own memory in
place, a copy of the parameters that the server refreshes. Over shared memory both lie in the worker's
region; over TCP they are buffers of this process that a thread of the peer fills and sends.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Connection, Frame, Kind, Region
from paceline.exceptions import FrameError, LinkError
from paceline.params import Layout, bytes_of
from paceline.ps.shard import Gradients, Shard

__all__ = ["MAX_STATE_BYTES", "ShmPeer", "TcpPeer", "WorkerPeer"]

MAX_STATE_BYTES = 4 << 30
"""What a worker may send at once beside gradients: buffers, random state, optimizer state."""


class WorkerPeer:
    """One attached worker. `gradients` is what it pushed last; `copy` its parameters (None: in place)."""

    gradients: Gradients
    copy: list[Tensor] | None

    def __init__(self, connection: Connection, worker: int, incarnation: int) -> None:
        self.connection = connection
        self.worker = worker
        self.incarnation = incarnation
        self.settings: list[dict[str, Any]] | None = None
        """Settings of the parameter groups, as its last push that changed them said."""

    @property
    def name(self) -> str:
        return f"worker:{self.worker}"

    def start_admit(self, body: dict[str, Any]) -> None:
        """The worker may go on; its slices follow by `slice_ready`, then `end_admit`."""
        raise NotImplementedError

    def slice_ready(self, position: int) -> None:
        """The slice at this position of the shard is up to date in the worker's copy."""

    def end_admit(self) -> None:
        """All slices are ready."""

    def close(self) -> None:
        """Drop the connection and the memory."""
        self.connection.close()


class ShmPeer(WorkerPeer):
    """A worker on this host: its region holds gradients and, behind them, its copy of the parameters."""

    def __init__(
        self,
        connection: Connection,
        worker: int,
        incarnation: int,
        region: Region,
        layout: Layout,
        shard: Shard,
        *,
        in_place: bool,
    ) -> None:
        super().__init__(connection, worker, incarnation)
        self._region = region
        memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
        self.gradients = Gradients(memory[: layout.nbytes], layout, shard.slices)
        self.copy = None if in_place else shard.flats(memory[layout.nbytes :])
        self._body: dict[str, Any] = {}

    def start_admit(self, body: dict[str, Any]) -> None:
        self._body = body

    def end_admit(self) -> None:
        self.connection.send(Kind.ADMIT, self._body)

    def close(self) -> None:
        super().close()
        self._region.close()


class TcpPeer(WorkerPeer):
    """A worker elsewhere. A thread of its own reads pushes into a buffer and sends slices as they come.

    Args:
        live: the shard's own slices, sent from directly when the mode forbids writing meanwhile.
        post: hands a frame, or None when the link ended, to the server's main thread.
    """

    def __init__(
        self,
        connection: Connection,
        worker: int,
        incarnation: int,
        layout: Layout,
        shard: Shard,
        *,
        in_place: bool,
        live: Sequence[Tensor],
        post: Callable[["TcpPeer", Frame | None, str], None],
    ) -> None:
        super().__init__(connection, worker, incarnation)
        self.gradients = Gradients(torch.zeros(layout.nbytes, dtype=torch.uint8), layout, shard.slices)
        self.copy = None
        if not in_place:
            self.copy = shard.flats(torch.empty(layout.nbytes, dtype=torch.uint8))
        self._into = [bytes_of(t) for t in self.gradients.flat]
        self._out = [bytes_of(t) for t in (live if self.copy is None else self.copy)]
        self._nbytes = shard.nbytes
        self._post = post
        self._outbox: queue.SimpleQueue[dict[str, Any] | int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"link {self.name}", daemon=True)
        self._thread.start()

    def start_admit(self, body: dict[str, Any]) -> None:
        self._outbox.put(body)

    def slice_ready(self, position: int) -> None:
        self._outbox.put(position)

    def close(self) -> None:
        super().close()
        self._outbox.put(None)
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        """Request and reply take turns on a link, so one thread does both."""
        reason = "closed"
        try:
            while True:
                try:
                    frame = self.connection.receive()
                except TimeoutError:
                    continue  # a long step is no fault; who waits for it has a deadline
                if frame.kind in (Kind.PUSH, Kind.ASSIGN, Kind.PULL):
                    if frame.payload_bytes:
                        self.connection.read_into(self._into)
                    elif self._nbytes and frame.kind is not Kind.PULL and not frame.body.get("void"):
                        raise FrameError(f"a {frame.kind.name} without payload")
                    self._post(self, frame, "")
                    if not self._send_slices():
                        break
                else:
                    if frame.payload_bytes:
                        self.connection.read_blob(frame, MAX_STATE_BYTES)
                    self._post(self, frame, "")
        except LinkError as error:
            reason = str(error)
        self._post(self, None, reason)

    def _send_slices(self) -> bool:
        body = self._outbox.get()
        if not isinstance(body, dict):
            return False
        # The header promises the size; the slices follow in order, as soon as the server has them.
        self.connection.send_streamed(Kind.ADMIT, body, self._nbytes, self._in_order())
        return True

    def _in_order(self) -> Iterator[memoryview]:
        ready: set[int] = set()
        for position, view in enumerate(self._out):
            while position not in ready:
                done = self._outbox.get()
                if not isinstance(done, int):
                    return  # the server is closing this link
                ready.add(done)
            yield view
