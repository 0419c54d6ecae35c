"""Threads that send and receive a worker's frames while it computes.

One thread sends. Each link has a thread that receives, and no other thread reads it. The worker's own thread
puts frames into the outbox, and finds what the receivers have put down:

    worker ──► outbox ──► sender ──────► servers
      ▲                                     │
      └── parameters, inbox ◄── receivers ◄─┘
"""

import collections
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.comm import Frame, Kind
from paceline.comm.errors import error_of
from paceline.comm.worker_messages import EarlySliceMessage, ToServer
from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import Recorder
from paceline.worker.exchange.server_links import ServerLink, ServerLinks

__all__ = ["FrameThreads", "Outgoing"]

_ASIDE = (Kind.VERDICT, Kind.ANSWER)
"""Answers that do not come in turn with leases that were asked for ahead."""


@dataclass(slots=True)
class Outgoing:
    """A frame for the sender."""

    link: ServerLink
    message: ToServer | EarlySliceMessage
    payload: Sequence[memoryview] = ()
    request: int = 0
    """The number of the request whose last part it is."""
    ready: "torch.cuda.Event | None" = None
    """When a GPU has written the payload."""


class FrameThreads:
    """Sends and receives over all links, from now until `close`. The links must not change meanwhile.

    Args:
        changed: notified after every change; held around changes of what is public here.
        admitted: called in a receiver with a link's position and its ADMIT frame, whose payload it reads.
        heard: called in a receiver, under `changed`, with every other frame.
    """

    def __init__(
        self,
        links: ServerLinks,
        spans: Recorder,
        changed: threading.Condition,
        *,
        admitted: Callable[[int, Frame], None],
        heard: Callable[[Frame], None],
    ) -> None:
        self.sent = 0
        """Number of the last request that has left."""
        self.failure: BaseException | None = None
        """What a thread died of."""
        self._links = tuple(links.each)
        self._spans = spans
        self._changed = changed
        self._admitted = admitted
        self._heard = heard
        self._closing = False
        self._outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._inbox: list[collections.deque[Frame]] = [collections.deque() for _ in self._links]
        self._aside: collections.deque[Frame] = collections.deque()
        self._sender = threading.Thread(target=self._send_all, name="sender", daemon=True)
        self._receivers = [
            threading.Thread(
                target=self._receive_all, args=(at,), name=f"link {link.connection.peer}", daemon=True
            )
            for at, link in enumerate(self._links)
        ]
        for thread in (self._sender, *self._receivers):
            thread.start()

    def put(self, outgoing: Outgoing) -> None:
        """Send a frame."""
        self._outbox.put(outgoing)

    def inbox(self, link: ServerLink, kind: Kind) -> collections.deque[Frame]:
        """Where frames of this kind from this server are put down."""
        return self._aside if kind in _ASIDE else self._inbox[self._links.index(link)]

    def expect_end(self) -> None:
        """Links that break from now on are no failure."""
        self._closing = True

    def close(self, links: ServerLinks) -> None:
        """Send what is left to send, close all links, end all threads."""
        self._closing = True
        self._outbox.put(None)
        self._sender.join()
        links.close()
        for receiver in self._receivers:
            receiver.join()

    def _send_all(self) -> None:
        lane = self._spans.lane("sender")
        while (item := self._outbox.get()) is not None:
            try:
                if item.ready is not None:
                    item.ready.synchronize()
                if item.payload:
                    message, at, piece = item.message, self._links.index(item.link), -1
                    if isinstance(message, EarlySliceMessage):
                        piece = item.link.slices[message.at].index
                    lane.enter(Phase.PUSH, at, piece)
                    lane.carried(sum(view.nbytes for view in item.payload))
                item.link.connection.tell(item.message, item.payload)
                lane.enter(Phase.IDLE)
            except BaseException as error:
                # A server that refused what it read last has closed the link: its reason comes first.
                self._receivers[self._links.index(item.link)].join(1)
                self._fail(error)
                return
            if item.request:
                with self._changed:
                    self.sent = item.request

    def _receive_all(self, at: int) -> None:
        connection = self._links[at].connection
        try:
            while True:
                try:
                    frame = connection.receive()
                except TimeoutError:
                    continue  # the thread that waits for it knows how long
                if frame.kind is Kind.ERROR:
                    raise error_of(frame.body)
                if frame.kind is Kind.ADMIT:
                    self._admitted(at, frame)
                    continue
                if frame.payload_bytes:
                    connection.read_blob(frame, frame.payload_bytes)
                with self._changed:
                    self._heard(frame)
                    # Leases that were asked for ahead may come before it, and are read later.
                    self.inbox(self._links[at], frame.kind).append(frame)
                    self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self.failure is None and not self._closing:
                self.failure = error
            self._changed.notify_all()
