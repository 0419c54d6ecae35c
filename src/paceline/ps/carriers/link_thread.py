"""LinkThread: the thread that reads a worker's requests from its socket, and sends the replies."""

import collections
import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.comm import Connection, Frame, Kind
from paceline.comm.hub import refuse
from paceline.comm.message_codec import body_of
from paceline.comm.worker_messages import SENDS, AdmitReply, AttachedReply, LinkResumed
from paceline.exceptions import FrameError, LinkError
from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import Lane
from paceline.params import bytes_of
from paceline.ps.carriers.incoming_pushes import IncomingPushes
from paceline.ps.replies import Differences

__all__ = ["MAX_STATE_BYTES", "LinkThread", "OutgoingSlices"]

MAX_STATE_BYTES = 1 << 44
"""What a worker may send at once beside gradients: buffers, frozen parameters, random state, optimizer state.
As much as a model may have (`params/layout.py`). Memory is taken as it arrives, not when it is announced."""


class OutgoingSlices:
    """Memory that replies are sent from, and the positions of the slices that are sent."""

    def __init__(self, flats: Sequence[Tensor], owned: Sequence[int]) -> None:
        self.flats = flats
        self.views = [bytes_of(flat) for flat in flats]
        self.owned = owned


_Reply = tuple[AdmitReply, OutgoingSlices | None]
"""A message, and the parameters behind it if the worker wants them."""


@dataclass(frozen=True)
class _Resume:
    """A socket over which a link goes on, and how many frames have come at its other end."""

    connection: Connection
    received: int


class LinkThread:
    """Request and reply take turns on a link, so one thread does both.

    A worker that prefetches sends more pushes meanwhile. They wait in the socket until the one before is
    answered: so the main thread has one push of a worker at a time, and nothing is written over it.

    Args:
        pushes: reads the payloads.
        differences: writes compressed replies; None: parameters are sent as they are.
        post: called with this link and a frame, or None and a reason when the link ended. In the thread.
        lane: of the thread.
    """

    def __init__(
        self,
        connection: Connection,
        worker: int,
        pushes: IncomingPushes,
        differences: Differences | None,
        post: Callable[["LinkThread", Frame | None, str], None],
        lane: Lane,
    ) -> None:
        self.connection = connection
        self.worker = worker
        self._pushes = pushes
        self._differences = differences
        self._post = post
        self._lane = lane
        self._outbox: queue.SimpleQueue[_Reply | _Resume | int | str | None] = queue.SimpleQueue()
        self._later: collections.deque[_Reply | int | str] = collections.deque()
        """What came out of it while there was no socket: an answer may be here before the request."""
        self._resume_next: _Resume | None = None
        self.given = self.used = 0
        """Number of further sockets that the main thread has given to the link, and this thread has used."""
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"link worker:{worker}", daemon=True)
        self._thread.start()

    # --- for the main thread ----------------------------------------------------------------------

    def reply(self, reply: AdmitReply, out: OutgoingSlices | None) -> None:
        """Answer the last request; with `out`, its slices follow by `slice_ready`."""
        self._outbox.put((reply, out))

    def slice_ready(self, position: int) -> None:
        """A slice of the reply can be sent. From any thread."""
        self._outbox.put(position)

    def welcome(self, reply: AttachedReply, out: OutgoingSlices) -> None:
        """Send the parameters to a worker that has just attached."""
        self.connection.tell(reply, [*self._whole(out, out.owned)])

    def skip(self) -> None:
        """The last request gets no answer."""
        self._outbox.put("skip")

    def resume(self, connection: Connection, received: int) -> None:
        """Resume the link over another connection, from frame number `received`."""
        self.given += 1
        old = self.connection.sock
        self._outbox.put(_Resume(connection, received))
        with contextlib.suppress(OSError):  # wakes the thread, if it has not noticed yet
            old.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the link, and end the thread."""
        self._closing = True
        self.connection.close()
        self._outbox.put(None)
        self._thread.join(timeout=5)

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            reason = self._serve_socket()
            self._post(self, None, reason)
            if not self.connection.keeps or self._closing:
                return  # what says so in the outbox may have been read already
            self.connection.close()  # so that the worker sees it, too
            while self._resume_next is None:
                found = self._outbox.get()
                if found is None:
                    return
                if isinstance(found, _Resume):
                    self._resume_next = found
                else:
                    self._later.append(found)
            self._go_on(self._resume_next)

    def _go_on(self, resume: _Resume) -> None:
        """Between two frames: here it is known how many have come."""
        self._resume_next = None
        self.used += 1
        with contextlib.suppress(LinkError):  # it broke again, which is seen at the next frame
            resume.connection.tell(LinkResumed(self.connection.received))
            self.connection.go_on(resume.connection, resume.received)

    def _serve_socket(self) -> str:
        """Until the link breaks; says why."""
        reason = "closed"
        try:
            while not self._closing:
                if self._resume_next is not None:
                    self._go_on(self._resume_next)
                try:
                    frame = self.connection.receive()
                except TimeoutError:
                    continue  # a long step is no fault; who waits for it has a deadline
                self._handle(frame)
        except FrameError as error:
            if not self.connection.keeps:
                refuse(self.connection, error)
            reason = f"refused what it sent: {error}"
        except LinkError as error:
            reason = str(error)
        return reason

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.SLICE:
            self._pushes.read_early(frame)
        elif frame.kind is Kind.PROBE:
            self.connection.send(Kind.PROBE)
        elif frame.kind is Kind.SENDS:
            self._pushes.expect(SENDS.read(frame.kind, frame.body).slices)
        elif frame.kind in (Kind.PUSH, Kind.ASSIGN, Kind.PULL):
            self._lane.enter(Phase.PUSH, self.worker)
            self._lane.carried(frame.payload_bytes)
            self._pushes.read_payload(frame)
            self._lane.enter(Phase.IDLE)
            self._post(self, frame, "")
            self._answer(whole=frame.kind is not Kind.PUSH)
        else:
            if frame.payload_bytes:
                self.connection.read_blob(frame, MAX_STATE_BYTES)
            self._post(self, frame, "")

    # --- replies ----------------------------------------------------------------------------------

    def _next(self) -> _Reply | _Resume | int | str | None:
        """What the main thread wants done next."""
        return self._later.popleft() if self._later else self._outbox.get()

    def _answer(self, *, whole: bool) -> None:
        """Send the reply when the server has it; `whole`: as it is also where differences would do.

        A worker that died may have sent more pushes before. They are on all servers or on none, so they
        are still read, each in its turn; only answers are sent no more.
        """
        while isinstance(found := self._next(), _Resume):
            self._go_on(found)
        if not isinstance(found, tuple):
            return  # the server is closing this link, or has nothing to say
        reply, out = found
        self._lane.enter(Phase.PULL, self.worker)
        before = self.connection.payload_sent
        positions = self._in_order(out) if out is not None else iter(())
        try:
            if out is None:
                self.connection.tell(reply)
            elif self._differences is not None and not whole:
                parts = [memoryview(self._differences.write(p, out.flats[p])) for p in positions]
                reply.sizes = tuple(part.nbytes for part in parts)
                self.connection.tell(reply, parts)
            else:
                # The header promises the size; the slices follow in order, as soon as the server has them.
                views = [out.views[i] for i in out.owned]
                self.connection.send_streamed(*body_of(reply), self._whole(out, positions), views)
        except LinkError:  # seen at the next frame; what is kept may be sent again when it is ready
            for _ in self._whole(out, positions) if out is not None else ():
                pass
        self._lane.carried(self.connection.payload_sent - before)
        self._lane.enter(Phase.IDLE)

    def _in_order(self, out: OutgoingSlices) -> Iterator[int]:
        """Positions of slices, each when it is up to date."""
        ready: set[int] = set()
        for position in out.owned:
            while position not in ready:
                done = self._next()
                if isinstance(done, _Resume):
                    self._resume_next = done  # when this frame is through, or given up
                    continue
                if not isinstance(done, int):
                    return  # the server is closing this link
                ready.add(done)
            yield position

    def _whole(self, out: OutgoingSlices, positions: Iterable[int]) -> Iterator[memoryview]:
        for position in positions:
            if self._differences is not None:
                self._differences.remember(position, out.flats[position])
            yield out.views[position]
