"""A worker as a server sees it, over shared memory or inline on a socket.

Both have gradient memory that the server reads and, unless the worker reads the server's own memory in
place, a copy of the parameters that the server refreshes. Over shared memory both lie in the worker's
region; inline they are buffers of this process that a thread of the peer fills and sends.
"""

import collections
import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Connection, Frame, Kind, Region
from paceline.comm.compression.slice_codec import Decoder
from paceline.comm.frames import field
from paceline.comm.hub import refuse
from paceline.comm.transfer import Transfer, encoded_sizes
from paceline.exceptions import FrameError, LinkError
from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import NO_SPANS, Lane
from paceline.params import Layout, bytes_of, flat_view
from paceline.ps.replies import Differences, decoder_of
from paceline.ps.shard import Copy, Gradients, Shard

__all__ = ["MAX_STATE_BYTES", "InlinePeer", "ShmPeer", "WorkerPeer"]

MAX_STATE_BYTES = 1 << 44
"""What a worker may send at once beside gradients: buffers, frozen parameters, random state, optimizer state.
As much as a model may have (`params/layout.py`). Memory is taken as it arrives, not when it is announced."""


class WorkerPeer:
    """One attached worker. `gradients` is what it pushed last; `copy` its parameters (None: in place)."""

    gradients: Gradients
    copy: Copy | None

    def __init__(self, connection: Connection, worker: int, incarnation: int) -> None:
        self.connection = connection
        self.worker = worker
        self.incarnation = incarnation
        self.settings: list[dict[str, Any]] | None = None
        """Settings of the parameter groups, as its last push that changed them said."""
        self.fetches = True
        """Whether it gets fresh parameters with the present answer."""
        self.needs_fates = False
        """Whether it must be told which of its pushes were applied: its encoders have error feedback."""
        self.residual = 0.0
        """L2 norm of the gradient that its encoders hold back, as it said last."""
        self.backup: list[Tensor] | None = None
        """The parameters that it read last, where the damping needs them."""
        self.asked: tuple[Kind, dict[str, Any]] | None = None
        """Its request that is not answered, where servers may take each other's place."""
        self.pid = 0
        """Of its process, where that is on this host."""
        self.broken_since: float | None = None
        """When its link broke: it may go on over another socket."""
        self.told = 0
        """The number of the placement that it knows of us."""

    @property
    def name(self) -> str:
        return f"worker:{self.worker}"

    def start_admit(self, body: dict[str, Any]) -> None:
        """The worker may go on; its slices follow by `slice_ready`, then `end_admit`."""
        raise NotImplementedError

    def read_in_place(self, in_place: bool) -> None:
        """From its next reply on the worker reads the server's own memory, or a copy of its own again."""
        raise NotImplementedError

    def fit(self, shard: Shard) -> None:
        """The shard has other slices than before, or answers for others."""
        raise NotImplementedError

    def skip(self) -> None:
        """Its last request gets no answer from us."""

    def resume(self, connection: Connection, received: int) -> None:
        """Its link goes on over another socket; it has received so many frames."""
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
    ) -> None:
        super().__init__(connection, worker, incarnation)
        self.may_share = False
        """Whether it is able to read the server's memory: not if its model is on a GPU."""
        self._region = region
        self._layout = layout
        self._body: dict[str, Any] = {}
        self.copy = ()
        self.fit(shard)

    def fit(self, shard: Shard) -> None:
        memory = torch.frombuffer(self._region.buffer, dtype=torch.uint8)
        self.gradients = Gradients(memory[: self._layout.nbytes], self._layout, shard.slices)
        self._own_copy = shard.copy_in(memory[self._layout.nbytes :])
        if self.copy is not None:
            self.copy = self._own_copy

    def read_in_place(self, in_place: bool) -> None:
        self.copy = None if in_place and self.may_share else self._own_copy

    def start_admit(self, body: dict[str, Any]) -> None:
        self._body = body

    def end_admit(self) -> None:
        self.connection.send(Kind.ADMIT, self._body)

    def resume(self, connection: Connection, received: int) -> None:
        connection.send(Kind.RESUMED, {"received": self.connection.received})
        self.connection.go_on(connection, received)

    def close(self) -> None:
        super().close()
        self._region.close()


class _Slices:
    """Memory that replies are sent from, and the positions of the slices that are sent."""

    def __init__(self, flats: Sequence[Tensor], owned: Sequence[int]) -> None:
        self.flats = flats
        self.views = [bytes_of(flat) for flat in flats]
        self.owned = owned


_Reply = tuple[dict[str, Any], _Slices | None]
"""A message, and the parameters behind it if the worker wants them."""


@dataclass(frozen=True)
class _Resume:
    """A socket over which a link goes on, and how many frames have come at its other end."""

    connection: Connection
    received: int


class InlinePeer(WorkerPeer):
    """A worker whose gradients and parameters travel over its socket: it is elsewhere, or compresses, or
    hides the way they take. A thread of its own reads pushes into a buffer and sends slices as they come.

    Args:
        transfer: how it writes gradients, and how it wants replies.
        sends: indices of the slices that its pushes bring; None: all of the shard.
        in_place: replies are sent from the shard's own slices: the mode forbids writing meanwhile.
        groups_of: the parameter groups that a push brings, read from its body; None: all. Raises FrameError.
        post: hands a frame, or None when the link ended, to the server's main thread.
        lane: of the thread.
    """

    def __init__(
        self,
        connection: Connection,
        worker: int,
        incarnation: int,
        layout: Layout,
        shard: Shard,
        *,
        transfer: Transfer,
        in_place: bool,
        sends: Sequence[Any] | None = None,
        groups_of: Callable[[dict[str, Any]], Collection[int] | None] = lambda body: None,
        post: Callable[["InlinePeer", Frame | None, str], None],
        lane: Lane = NO_SPANS.main,
    ) -> None:
        super().__init__(connection, worker, incarnation)
        self._layout = layout
        self._transfer = transfer
        self.needs_fates = transfer.compress.has_feedback
        self._groups_of = groups_of
        self._received = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._in_place = in_place
        self.copy = None
        self.fit(shard)
        self._body: dict[str, Any] = {}
        self._early: set[int] = set()
        self._decoders: list[Decoder] = []
        self._encoded = bytearray()
        self._expect([s.index for s in shard.slices] if sends is None else sends)
        self._differences: Differences | None = None
        if transfer.replies is not None:
            self._differences = Differences(transfer.replies, layout, shard.slices, seed=worker)
        self._post = post
        self._lane = lane
        self._outbox: queue.SimpleQueue[_Reply | _Resume | int | str | None] = queue.SimpleQueue()
        self._later: collections.deque[_Reply | int | str] = collections.deque()
        """What came out of it while there was no socket: an answer may be here before the request."""
        self._resume_next: _Resume | None = None
        self.given = self.used = 0
        """How many sockets more the main thread has given to the link, and its own thread has used."""
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"link {self.name}", daemon=True)
        self._thread.start()

    def read_in_place(self, in_place: bool) -> None:
        # Sending from a copy is right in every mode: whoever has one keeps it.
        if self._in_place and not in_place:
            self._in_place = False
            self.fit(self._shard)

    def fit(self, shard: Shard) -> None:
        self._shard = shard
        self.gradients = Gradients(self._received, self._layout, shard.slices)
        if self._in_place:
            self._out = _Slices(shard.parameters, shard.owned)
            return
        copy = shard.flats(torch.empty(self._layout.nbytes, dtype=torch.uint8))
        owned = set(shard.owned)
        self.copy = [flat if i in owned else None for i, flat in enumerate(copy)]
        self._out = _Slices(copy, shard.owned)

    def _expect(self, sends: Sequence[Any]) -> None:
        """Pushes bring the slices of these indices from now on."""
        known = range(len(self._layout.slices))
        if not all(isinstance(i, int) and i in known for i in sends):
            raise FrameError(f"slices {sends!r:.80} will be sent; there are {len(known)}")
        slices = self._sent_slices = [self._layout.slices[i] for i in sends]
        self._flats = [flat_view(self._received, s) for s in slices]
        self._into = [bytes_of(flat) for flat in self._flats]
        if self._transfer.compresses:
            self._decoders = [decoder_of(self._transfer.compress, self._layout, s) for s in slices]

    def start_admit(self, body: dict[str, Any]) -> None:
        self._body = body
        if self._streams:
            # With the memory that it is to be sent from: the next order may change that.
            self._outbox.put((body, self._out))

    def slice_ready(self, position: int) -> None:
        if position != self._out.owned[-1]:
            self._outbox.put(position)

    def end_admit(self) -> None:
        # Not before all work is done: with this the worker goes on, and writes over its gradients.
        self._outbox.put(self._out.owned[-1] if self._streams else (self._body, None))

    @property
    def _streams(self) -> bool:
        """Whether the present answer brings slices."""
        return self.fetches and bool(self._out.owned)

    def skip(self) -> None:
        self._outbox.put("skip")

    def close(self) -> None:
        self._closing = True
        super().close()
        self._outbox.put(None)
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        """Request and reply take turns on a link, so one thread does both.

        A worker that prefetches sends more pushes meanwhile. They wait in the socket until the one before
        is answered: so the main thread has one push of a worker at a time, and nobody writes over it.
        """
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

    def resume(self, connection: Connection, received: int) -> None:
        self.given += 1
        old = self.connection.sock
        self._outbox.put(_Resume(connection, received))
        with contextlib.suppress(OSError):  # wakes the thread, if it has not noticed yet
            old.shutdown(socket.SHUT_RDWR)

    def _go_on(self, resume: _Resume) -> None:
        """Between two frames: here it is known how many have come."""
        self._resume_next = None
        self.used += 1
        with contextlib.suppress(LinkError):  # it broke again, which is seen at the next frame
            resume.connection.send(Kind.RESUMED, {"received": self.connection.received})
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
                if frame.kind is Kind.SLICE:
                    self._read_early(frame)
                elif frame.kind is Kind.PROBE:
                    self.connection.send(Kind.PROBE)
                elif frame.kind is Kind.SENDS:
                    self._expect(field(frame.body, "slices", list))
                elif frame.kind in (Kind.PUSH, Kind.ASSIGN, Kind.PULL):
                    self._lane.enter(Phase.PUSH, self.worker)
                    self._lane.carried(frame.payload_bytes)
                    self._read_payload(frame)
                    self._lane.enter(Phase.IDLE)
                    self._post(self, frame, "")
                    self._answer(whole=frame.kind is not Kind.PUSH)
                else:
                    if frame.payload_bytes:
                        self.connection.read_blob(frame, MAX_STATE_BYTES)
                    self._post(self, frame, "")
        except FrameError as error:
            if not self.connection.keeps:
                refuse(self.connection, error)
            reason = f"refused what it sent: {error}"
        except LinkError as error:
            reason = str(error)
        return reason

    # --- what comes -------------------------------------------------------------------------------

    def _read_early(self, frame: Frame) -> None:
        """A slice that left its worker during backward. The last push was answered, so there is room."""
        position = field(frame.body, "at", int)
        if self._decoders or not 0 <= position < len(self._into):
            raise FrameError(f"a SLICE at {position} of {len(self._into)} slices")
        self.connection.read_into([self._into[position]])
        self._early.add(position)

    def _read_payload(self, frame: Frame) -> None:
        early, self._early = self._early, set()
        nothing = frame.body.get("void") or frame.body.get("carries") == "nothing"
        if frame.kind is Kind.PULL or (nothing and not frame.payload_bytes):
            return
        if frame.kind is Kind.PUSH and self._decoders:
            self._decode(frame)
            return
        every = self._brought(frame)
        positions = field(frame.body, "slices", list, every)
        if not all(isinstance(p, int) and p in every for p in positions):
            raise FrameError(f"a {frame.kind.name} of slices {positions!r:.80}; there are {len(every)}")
        if missing := set(every) - early.union(positions):
            raise FrameError(f"a {frame.kind.name} without payload for {len(missing)} slices")
        self.connection.read_into([self._into[p] for p in positions])

    def _brought(self, frame: Frame) -> list[int]:
        """Positions of the slices that a message brings: of the optimizer that it is for."""
        groups = self._groups_of(frame.body) if frame.kind is Kind.PUSH else None
        return [p for p, piece in enumerate(self._sent_slices) if groups is None or piece.group in groups]

    def _decode(self, frame: Frame) -> None:
        brought = self._brought(frame)
        sizes = encoded_sizes(frame.body, [self._into[p].nbytes for p in brought])
        if len(self._encoded) < sum(sizes):
            self._encoded = bytearray(sum(sizes))
        room, ends = memoryview(self._encoded), [0, *itertools.accumulate(sizes)]
        views = [room[a:b] for a, b in itertools.pairwise(ends)]
        for at in self.connection.read_each(views):
            self._decoders[brought[at]].decode(views[at], self._flats[brought[at]])

    # --- what goes --------------------------------------------------------------------------------

    def _next(self) -> _Reply | _Resume | int | str | None:
        """What the main thread wants done next."""
        return self._later.popleft() if self._later else self._outbox.get()

    def welcome(self, body: dict[str, Any]) -> None:
        """Send the parameters to a worker that has just attached."""
        self.connection.send(Kind.ATTACHED, body, [*self._whole(self._out, self._out.owned)])

    def _answer(self, *, whole: bool) -> None:
        """Send the reply when the server has it; `whole`: as it is also where differences would do.

        A worker that died may have sent more pushes before. They are on all servers or on none, so they
        are still read, each in its turn; only answers are sent no more.
        """
        while isinstance(reply := self._next(), _Resume):
            self._go_on(reply)
        if not isinstance(reply, tuple):
            return  # the server is closing this link, or has nothing to say
        body, out = reply
        self._lane.enter(Phase.PULL, self.worker)
        before = self.connection.payload_sent
        positions = self._in_order(out) if out is not None else iter(())
        try:
            if out is None:
                self.connection.send(Kind.ADMIT, body)
            elif self._differences is not None and not whole:
                parts = [memoryview(self._differences.write(p, out.flats[p])) for p in positions]
                self.connection.send(Kind.ADMIT, {**body, "sizes": [part.nbytes for part in parts]}, parts)
            else:
                # The header promises the size; the slices follow in order, as soon as the server has them.
                views = [out.views[i] for i in out.owned]
                self.connection.send_streamed(Kind.ADMIT, body, self._whole(out, positions), views)
        except LinkError:  # seen at the next frame; what is kept may be sent again when it is ready
            for _ in self._whole(out, positions) if out is not None else ():
                pass
        self._lane.carried(self.connection.payload_sent - before)
        self._lane.enter(Phase.IDLE)

    def _in_order(self, out: _Slices) -> Iterator[int]:
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

    def _whole(self, out: _Slices, positions: Iterable[int]) -> Iterator[memoryview]:
        for position in positions:
            if self._differences is not None:
                self._differences.remember(position, out.flats[position])
            yield out.views[position]
