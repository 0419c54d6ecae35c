"""Requests to all servers, each of which blocks until the servers have answered."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from paceline.comm import Kind
from paceline.comm.message_codec import Catalogue
from paceline.comm.worker_messages import (
    ADMIT,
    ATTACHED,
    AdmitReply,
    AttachedReply,
    AttachMessage,
    LeaderQuestion,
    LeadNews,
    OrderedMessage,
    PushMessage,
    StateAsked,
    ToServer,
)
from paceline.core.json_types import JsonObject
from paceline.exceptions import FrameError, LinkError
from paceline.observe.record.phase import Phase
from paceline.worker.exchange.device_memory import DeviceMemory
from paceline.worker.exchange.exchange_memory import ExchangeMemory
from paceline.worker.exchange.payloads import Payloads
from paceline.worker.exchange.placements import Placements
from paceline.worker.exchange.run_news import RequestNumbers, RunNews, new_pull
from paceline.worker.exchange.server_links import ServerLink, ServerLinks

__all__ = ["DirectExchange"]

N = TypeVar("N", bound=LeadNews)
P = TypeVar("P", AdmitReply, AttachedReply)


class DirectExchange:
    """Push, pull and assign, answered before they return. One thread at a time.

    Args:
        listens: where this worker, the root of a group, listens for its members; None: it is no root.
        spin_s: seconds to look for the lead's answer without sleeping.
        rest: called before this worker waits for servers.
    """

    arrives_late = False
    """Whether parameters arrive after `exchange` has returned."""

    def __init__(
        self,
        links: ServerLinks,
        memory: ExchangeMemory | DeviceMemory,
        placements: Placements,
        payloads: Payloads,
        news: RunNews,
        numbers: RequestNumbers,
        *,
        listens: JsonObject | None,
        spin_s: float,
        rest: Callable[[], object],
    ) -> None:
        self.links = links
        self.payloads = payloads
        self.news = news
        self.numbers = numbers
        self.memory = memory
        self._placements = placements
        self._listens = listens
        self._spin_s = spin_s
        self._rest = rest
        self._unread: set[ServerLink] = set()
        """Links with an answer to a notice that this worker has not waited for."""

    # --- attaching --------------------------------------------------------------------------------

    def attach_all(self) -> None:
        """Attach to every server. The lead comes last: it opens the gate when all workers are everywhere."""
        links, welcome = self.links, None
        for link in reversed([*links.each]):
            if link not in links.each:
                continue  # it led, and is gone: another server has said that it leads now
            self._attach(link)
            if link is not links.lead:
                answer = self._take_parameters(link, ATTACHED)
                welcome = answer if link is links.lead else welcome
        self.news.welcomed(welcome or self._take_parameters(links.lead, ATTACHED))
        self.get_ready()  # servers may have come since this worker was told which there are

    def _attach(self, link: ServerLink) -> None:
        message = AttachMessage(
            fingerprint=self.memory.layout.fingerprint,
            incarnation=self.links.settings.incarnation,
            pid=os.getpid(),
            keeps=self.links.resumes,
            carrier="",
            listens=self._listens,
        )
        descriptors = link.carrier.offer(message)
        self.links.send(link, message, descriptors=descriptors)
        if self.links.resumes:
            link.connection.keep()

    # --- requests ---------------------------------------------------------------------------------

    def exchange(self, message: OrderedMessage, *, fetch: bool = True) -> None:
        """Push what lies in the gradient memory, wait until admitted, have fresh parameters.

        Args:
            message: see `new_push`, `new_pull`, `new_assign`.
            fetch: False leaves the parameters as they are.
        """
        links, lane = self.links, self.links.lane
        phase = lane.enter(Phase.PUSH)
        ready = 0
        if self._unread or self._placements.incomplete:
            ready = self.get_ready()
        self.numbers.complete(message, fetch=fetch, version=self.news.version, ready=ready)
        written = self.payloads.write(message)
        waits = not isinstance(message, PushMessage) or not self.news.mode.needs_memory
        before = time.perf_counter()
        if waits:
            self._rest()
        # The lead comes last: what it has seen is everywhere (docs/decisions.md).
        for at in reversed(range(len(links.each))):
            link = links.each[at]
            message, views = written[at]
            if views:
                lane.enter(Phase.PUSH, link.server)
                lane.carried(sum(view.nbytes for view in views))
            if links.replicated:
                with links.tolerate_loss(link):
                    links.send(link, message, views)
            else:
                links.send(link, message, views)
        if waits:
            lane.enter(Phase.WAIT)
            if self._spin_s:
                links.lead.connection.spin(self._spin_s)
            self._take_admits(fetch=fetch)
            if links.lost:
                self._regroup(fetch=fetch)
        else:
            self._unread.update(links.each)  # a notice: the parameters are in the shared memory already
        links.wait_s += time.perf_counter() - before
        lane.enter(phase)

    def settle(self) -> None:
        """Wait until everything that was asked for is here."""
        for link in tuple(self.links.each) if self._unread else ():
            self._unread.discard(link)
            self._take_admit(link, fetch=False)

    def need(self, slices: frozenset[int]) -> None:
        """Wait until these slices of the parameters are here: they always are."""

    def save_due(self) -> bool:
        """Whether the run wants this worker's part of a checkpoint; True once for each request."""
        return self.news.take_save()

    def get_ready(self) -> int:
        """Before a request: settle, and get ready for the placement that is announced. Connects to servers
        that came while this worker joined.

        Returns:
            Its number, which the lead waits for; 0 if none is announced.
        """
        if self._unread:
            self.settle()
        if not self._placements.incomplete:
            return 0
        links = self.links
        for server, address in self._placements.missing_links().items():
            try:
                link = links.reach(server, address)
            except LinkError:  # gone again, which the lead sees, too
                continue
            try:
                self._attach(link)
                self._take_parameters(link, ATTACHED)
            except LinkError:
                links.drop([link])
        self._placements.become_ready()
        return self._placements.ready

    def ask_lead(self, question: LeaderQuestion, answer: Catalogue[N]) -> N:
        """Ask the lead a question; if it is gone, ask the next one."""
        while True:
            lead = self.links.lead
            with self.links.tolerate_loss(lead):
                self.links.send(lead, question)
                frame = self.links.receive(lead, *answer.kinds)
                reply = answer.read(frame.kind, frame.body)
                self._placements.hear(lead, reply)
                return reply
            self._regroup(fetch=False)  # between two exchanges all parameters are whole

    def ask_state(self) -> list[bytes]:
        """Parameters and optimizer state of every server, as it sends them."""
        self.settle()
        while True:
            parts = []
            for link in self.links.each:
                with self.links.tolerate_loss(link):
                    self.links.send(link, StateAsked())
                    frame = self.links.receive(link, Kind.STATE)
                    parts.append(link.connection.read_blob(frame, frame.payload_bytes))
            if not self.links.lost:
                return parts
            self._regroup(fetch=False)

    def send(self, link: ServerLink, message: ToServer, payload: Sequence[memoryview] = ()) -> None:
        """Send a message that one server does not answer."""
        with self.links.tolerate_loss(link):
            self.links.send(link, message, payload)

    def close(self) -> None:
        """Close all links."""
        self.links.close()

    # --- answers ----------------------------------------------------------------------------------

    def _take_admits(self, *, fetch: bool) -> None:
        links = self.links
        if not links.replicated and not self._placements.incomplete:
            for link in tuple(links.each):
                self._take_admit(link, fetch=fetch)
            return
        for link in tuple(links.each):
            # The lead's answer, which comes first, may say that others are gone.
            if self._placements.answers(link):
                with links.tolerate_loss(link):
                    self._take_admit(link, fetch=fetch)

    def _take_admit(self, link: ServerLink, *, fetch: bool) -> None:
        reply = self._take_parameters(link, ADMIT)
        if link is self.links.lead:
            self.payloads.hear_fates(reply)
            self.news.admitted(reply, fetched=fetch)

    def _regroup(self, *, fetch: bool) -> None:
        """Servers are gone: have the others agree on a placement and on a lead.

        Args:
            fetch: have fresh parameters, too: the answer of a server that is gone may have come in part.
        """
        links = self.links
        while links.lost:
            message = new_pull(without=tuple(self._placements.lose()))
            self.numbers.complete(
                message, fetch=fetch, version=self.news.version, ready=self._placements.ready
            )
            for link in reversed(links.each):
                with links.tolerate_loss(link):
                    links.send(link, message)
            self._take_admits(fetch=fetch)

    def _take_parameters(self, link: ServerLink, expected: Catalogue[P]) -> P:
        """Receive a reply, and read its parameters to where the model has them."""
        links, lane = self.links, self.links.lane
        frame = links.receive(link, *expected.kinds)
        reply = expected.read(frame.kind, frame.body)
        if isinstance(reply, AdmitReply):
            self.blame(reply)
        self._placements.hear(link, reply)
        link.carrier.hear(reply)
        if frame.payload_bytes:
            phase = lane.enter(Phase.PULL, link.server)
            lane.carried(frame.payload_bytes)
            try:
                for _ in link.carrier.read(reply):
                    pass
            except LinkError as broken:
                if not link.connection.keeps or isinstance(broken, FrameError):
                    raise
                links.resume(link, broken)  # it comes again, whole
                return self._take_parameters(link, expected)
            finally:
                lane.enter(phase)
        return reply

    def blame(self, reply: LeadNews) -> None:
        """The lead says which worker it had to wait for, and how long."""
        if reply.on is not None and reply.held is not None:
            self.links.lane.blame(reply.on, reply.held)
