"""Requests whose payloads travel while the worker computes (`frame_threads.py` carries them).

`overlap`: a slice of the gradient leaves as soon as backward is through with it (a SLICE frame; the PUSH
that follows counts it in). The slices of the reply go straight into the parameters, in forward order, and
a module that is about to use a parameter waits for its slices (`gate.py`).

`prefetch=k`: the reply to a push is awaited k steps later. Replies land beside the parameters; a step takes
over the newest there is. A push says which version it was computed from, so staleness is counted right.
"""

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from paceline.comm import Frame, Kind
from paceline.comm.message_codec import Catalogue
from paceline.comm.worker_messages import (
    ADMIT,
    LEAD_REPLY,
    AdmitReply,
    AssignMessage,
    DetachMessage,
    EarlySliceMessage,
    LeaderQuestion,
    LeadNews,
    OrderedMessage,
    PushMessage,
    StateAsked,
    ToServer,
)
from paceline.exceptions import LinkError
from paceline.observe.record.phase import Phase
from paceline.observe.record.spans import Recorder
from paceline.params import bytes_of
from paceline.worker.exchange.direct_exchange import DirectExchange
from paceline.worker.exchange.early_slices import StagedPushes, slice_of
from paceline.worker.exchange.exchange_memory import ExchangeMemory
from paceline.worker.exchange.frame_threads import FrameThreads, Outgoing
from paceline.worker.exchange.payloads import Written
from paceline.worker.exchange.server_links import ServerLink, ServerLinks

__all__ = ["PipelinedExchange"]

N = TypeVar("N", bound=LeadNews)


class ReplyBook:
    """Requests under way and their replies, by link. A request is a PUSH, a PULL or an ASSIGN.

    Used under the lock of the exchange that owns it.
    """

    def __init__(self, links: int) -> None:
        self.asked = 0
        """Number of requests."""
        self.begun = 0
        """Number of replies of which the lead has sent the beginning."""
        self.lead_at = 0.0
        """When the lead answered last."""
        self.answered = [0] * links
        """Number of replies that have come whole."""
        self.fetched = [0] * links
        """How many of them brought parameters."""
        self.taken = 0
        """How many of these are taken over."""
        self._brings: list[collections.deque[bool]] = [collections.deque() for _ in range(links)]
        self._versions: collections.deque[int] = collections.deque()
        """Versions of the parameters that have come and are not taken over."""

    @property
    def all_answered(self) -> int:
        """Number of requests that all servers have answered."""
        return min(self.answered)

    def ask(self, *, fetch: bool) -> None:
        """Another request is made."""
        self.asked += 1
        for brings in self._brings:
            brings.append(fetch)

    def begin_reply(self, at: int) -> bool:
        """A reply begins to come; whether its request asked for parameters."""
        if at == 0:
            self.begun += 1
            self.lead_at = time.monotonic()
        return self._brings[at].popleft()

    def end_reply(self, at: int, version: int, *, brought: bool) -> None:
        """A reply has come whole."""
        self.answered[at] += 1
        self.fetched[at] += brought
        if at == 0 and brought:
            self._versions.append(version)

    def take_over(self) -> int | None:
        """Take over the newest parameters that all servers have answered with: their version, if any."""
        version, newest = None, min(self.fetched)
        for _ in range(newest - self.taken):
            version = self._versions.popleft()
        self.taken = newest
        return version


class LandingPlaces:
    """Where parameters that were fetched ahead land, beside those that the model computes with."""

    def __init__(self, links: ServerLinks, memory: ExchangeMemory, places: int) -> None:
        self._memory = memory
        self._places = [torch.empty_like(memory.copy) for _ in range(places)]
        self._into = [
            [[bytes_of(slice_of(place, memory.layout, s.index)) for s in link.slices] for link in links.each]
            for place in self._places
        ]

    def into(self, at: int, fetched: int) -> list[memoryview]:
        """Where the next parameters from a link go, which has brought some `fetched` times."""
        return self._into[fetched % len(self._into)][at]

    def repeat(self, link: ServerLink, fetched: int) -> None:
        """A link's next parameters are those that it brought last."""
        layout, place = self._memory.layout, fetched % len(self._places)
        before = self._places[place - 1] if fetched else self._memory.copy
        for piece in link.slices:
            slice_of(self._places[place], layout, piece.index).copy_(slice_of(before, layout, piece.index))

    def take_over(self, taken: int) -> None:
        """Let the model have the parameters of this fetch."""
        self._memory.copy.copy_(self._places[(taken - 1) % len(self._places)])


class PipelinedExchange:
    """As DirectExchange, but requests return before they are answered.

    Its methods are for the worker's own thread. The placement of the slices does not change in such a run.

    Args:
        direct: with which the worker has joined; from here on only the threads use its links.
        prefetch: number of steps that a reply is awaited later.
    """

    def __init__(self, direct: DirectExchange, spans: Recorder, prefetch: int) -> None:
        links, payloads, memory = direct.links, direct.payloads, direct.memory
        assert isinstance(memory, ExchangeMemory), "nothing travels from a device"
        self.arrives_late = not prefetch
        """Whether parameters arrive after `exchange` has returned."""
        self._direct = direct
        self._links = links
        self._payloads = payloads
        self._news = direct.news
        self._layout = memory.layout
        self._prefetch = prefetch
        self._home = {s.index: (link, at) for link in links.each for at, s in enumerate(link.slices)}
        self._staged: StagedPushes | None = None
        if payloads.encoders is None:
            self._staged = StagedPushes(links, memory, payloads.slices_of, prefetch + 1)
        self._landing = LandingPlaces(links, memory, prefetch + 1) if prefetch else None
        # Shared with the threads, under `_changed`.
        self._changed = threading.Condition()
        self._book = ReplyBook(len(links.each))
        self._blamed: AdmitReply | None = None
        """What the lead said last about the worker that it waited for."""
        self._fates: collections.deque[AdmitReply] = collections.deque()
        """Replies that say what became of pushes, which the encoders have not been told."""
        self._missing: set[int] = set()
        """Slices that have not arrived yet, without prefetch."""
        # The worker's own.
        self._pending: set[int] = set()
        """Slices that may be missing: the worker has not looked since they were asked for."""
        self._upload: Callable[[int], None] | None = None
        self._spans = spans
        self._threads = FrameThreads(links, spans, self._changed, admitted=self._admitted, heard=self._heard)

    def watch(self, slot: Tensor) -> Callable[[int], None]:
        """Let slices leave during backward. Returns the function to call with each tensor that got its
        gradient.

        Args:
            slot: the gradient memory on the model's device.
        """
        assert self._staged is not None
        return self._staged.watch(slot, lambda index: self._send_early(slot, index))

    def upload_with(self, upload: Callable[[int], None]) -> None:
        """Call this with each slice that has arrived, before the model uses it."""
        self._upload = upload

    def close(self) -> None:
        """Send what is left to send, close all links, end all threads."""
        self._threads.close(self._links)

    # --- requests ---------------------------------------------------------------------------------

    def exchange(self, request: OrderedMessage, *, fetch: bool = True) -> None:
        """Send a request and go on: later ones wait for its reply, and so do `need` and `settle`."""
        prefetch, book = self._prefetch, self._book
        assigns = isinstance(request, AssignMessage)
        if not prefetch or assigns:
            self.settle()
        self._direct.numbers.complete(request, fetch=fetch, version=self._news.version)
        written = self._write(request)
        with self._changed:
            book.ask(fetch=fetch)
            if fetch and not prefetch:
                self._pending = {s.index for s in self._layout.slices}
                self._missing = set(self._pending)
        # The lead comes last: what it has seen is everywhere (docs/decisions.md).
        for link, (message, views) in zip(reversed(self._links.each), reversed(written), strict=True):
            number = book.asked if link is self._links.lead else 0
            self._threads.put(Outgoing(link, message, views, number))
        if assigns:
            self.settle()  # it is sent from the gradients' memory
        elif prefetch:
            due = book.asked - prefetch
            self._wait(lambda: book.all_answered >= due)
            if fetch:
                self._take_over()

    def settle(self) -> None:
        """Wait until everything that was asked for is here."""
        book = self._book
        self._wait(lambda: book.all_answered >= book.asked)
        self._settle_fates()
        self._take_over()
        self.need(frozenset(self._pending))

    @property
    def answered(self) -> int:
        """Number of requests that all servers have answered."""
        return self._book.all_answered

    def await_replies(self) -> None:
        """Wait until all replies have come, and leave them where they have landed."""
        self._wait(lambda: self._book.all_answered >= self._book.asked)

    def need(self, slices: frozenset[int]) -> None:
        """Wait until these slices of the parameters are here."""
        if not self._pending or not (due := slices & self._pending):
            return
        self._wait(lambda: self._missing.isdisjoint(due))
        if self._upload is not None:
            for index in sorted(due):
                self._upload(index)
        self._pending -= due

    def save_due(self) -> bool:
        """As DirectExchange. In rounds the part must be of this very round: waits for the reply to begin."""
        if self._news.mode.by_round:
            self._wait(lambda: self._book.begun >= self._book.asked)
        return self._news.take_save()

    def get_ready(self) -> int:
        """As DirectExchange: the placement never changes."""
        return 0

    def ask_lead(self, question: LeaderQuestion, answer: Catalogue[N]) -> N:
        """Ask the lead a question."""
        self.send(self._links.lead, question)
        (kind,) = answer.kinds
        frame = self.receive(self._links.lead, kind)
        return answer.read(frame.kind, frame.body)

    def ask_state(self) -> list[bytes]:
        """Parameters and optimizer state of every server, as it sends them."""
        parts = []
        for link in self._links.each:
            self.send(link, StateAsked())
            frame = self.receive(link, Kind.STATE)
            parts.append(link.connection.read_blob(frame, frame.payload_bytes))
        return parts

    def send(self, link: ServerLink, message: ToServer, payload: Sequence[memoryview] = ()) -> None:
        """Send a message to one server."""
        if isinstance(message, DetachMessage):
            self._threads.expect_end()
        self._threads.put(Outgoing(link, message, payload))

    def receive(self, link: ServerLink, kind: Kind) -> Frame:
        """The next frame from a server, other than ADMIT."""
        inbox = self._threads.inbox(link, kind)
        self._wait(lambda: bool(inbox), link)
        frame = inbox.popleft()
        if frame.kind is not kind:
            raise LinkError(f"{link.connection.peer} answered {frame.kind.name}, expected {kind.name}")
        return frame

    def _take_over(self) -> None:
        """Have the newest parameters that all servers have answered with."""
        with self._changed:
            version = self._book.take_over()
        if version is not None:
            self._news.version = version
            if self._landing is not None:
                self._landing.take_over(self._book.taken)

    def _write(self, message: OrderedMessage) -> Written:
        self._settle_fates()
        left = set() if self._staged is None else self._staged.begin()
        if not isinstance(message, PushMessage) or self._staged is None or message.void:
            return self._payloads.write(message)
        return self._staged.write(message, left)

    def _send_early(self, slot: Tensor, index: int) -> bool:
        """Send a slice of the push in the making; False if its stage is still being sent from."""
        if self._threads.sent < self._book.asked - self._prefetch:
            return False
        assert self._staged is not None
        staged = self._staged.stage(slot, index)
        ready = None
        if slot.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        link, at = self._home[index]
        self._threads.put(Outgoing(link, EarlySliceMessage(at), [bytes_of(staged)], 0, ready))
        return True

    # --- waiting ----------------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], link: ServerLink | None = None) -> None:
        """Block until `done`. Raises what a thread died of, or DeadlineError with the name of a late server.

        Args:
            link: to the server that is waited for; None: all that have not answered all requests.
        """
        started = time.monotonic()
        with self._changed:
            if done():
                return
            lane = self._links.lane
            phase = lane.enter(Phase.WAIT)
            while not done():
                if self._threads.failure is not None:
                    raise self._threads.failure
                self._changed.wait(self._time_left(started, link))
        self._links.wait_s += time.monotonic() - started
        blamed, self._blamed = self._blamed, None
        if blamed is not None:
            self._direct.blame(blamed)
        lane.enter(phase)

    def _time_left(self, started: float, awaited: ServerLink | None) -> float:
        """Seconds until a server is late; raises DeadlineError if one is."""
        links, book, settings = self._links, self._book, self._links.settings
        now, left = time.monotonic(), settings.deadline_s
        for link, answered in zip(links.each, book.answered, strict=True):
            # The lead notices first which process is missing and names it: it is waited for as a last resort.
            patience = settings.patience_s if link is links.lead else settings.deadline_s
            since = started
            if awaited is not None:
                owes = link is awaited
            elif link is links.lead:
                owes = answered < book.asked
            else:  # it answers what the lead has answered: until then it is not late
                owes, since = answered < book.answered[0], max(started, book.lead_at)
            if owes:
                left = min(left, since + patience - now)
            if left <= 0:
                raise links.late(link)
        return left

    # --- in the threads ---------------------------------------------------------------------------

    def _admitted(self, at: int, frame: Frame) -> None:
        book, link = self._book, self._links.each[at]
        reply = ADMIT.read(frame.kind, frame.body)
        with self._changed:
            brings = book.begin_reply(at)
            if at == 0:
                self._blamed = self._news.last_admit = reply
                if reply.settled is not None:
                    self._fates.append(reply)
                self._hear(reply)
                self._changed.notify_all()
        if brings:
            lane = self._spans.lane(f"receiver {at}")
            lane.enter(Phase.PULL, at)
            lane.carried(frame.payload_bytes)
            self._land(at, reply, frame.payload_bytes)
            lane.enter(Phase.IDLE)
        elif frame.payload_bytes:  # a server that had not read the request yet could not know
            link.connection.read_blob(frame, frame.payload_bytes)
        with self._changed:
            book.end_reply(at, reply.version, brought=brings)
            self._changed.notify_all()

    def _land(self, at: int, reply: AdmitReply, nbytes: int) -> None:
        """Read the parameters of a reply: to where the model has them, or to where replies land."""
        link, landing, fetched = self._links.each[at], self._landing, self._book.fetched[at]
        if not nbytes:  # the slices stay as they were
            if landing is not None:
                landing.repeat(link, fetched)
            self._arrived(*(piece.index for piece in link.slices))
            return
        views = None if landing is None else landing.into(at, fetched)
        for position in link.carrier.read(reply, views):
            self._arrived(link.slices[position].index)

    def _arrived(self, *slices: int) -> None:
        if self._missing:
            with self._changed:
                self._missing.difference_update(slices)
                self._changed.notify_all()

    def _heard(self, frame: Frame) -> None:
        """A reply other than ADMIT."""
        if frame.kind in LEAD_REPLY.kinds:
            self._hear(LEAD_REPLY.read(frame.kind, frame.body))
            frame.body.pop("save", None)

    def _hear(self, reply: LeadNews) -> None:
        """What the lead says beside the answer itself."""
        self._news.hear_save(reply)
        self._news.hear_mode(reply)

    def _settle_fates(self) -> None:
        """Let the encoders, which belong to the script's thread, hear what became of pushes."""
        while self._fates:
            self._payloads.hear_fates(self._fates.popleft())
