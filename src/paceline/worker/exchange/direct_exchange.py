"""Requests to all servers, each of which blocks until the servers have answered."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.comm import Kind
from paceline.comm.frames import field
from paceline.exceptions import FrameError, LinkError
from paceline.observe.record.phase import Phase
from paceline.worker.exchange.device_memory import DeviceMemory
from paceline.worker.exchange.exchange_memory import ExchangeMemory
from paceline.worker.exchange.payloads import Payloads
from paceline.worker.exchange.placements import Placements
from paceline.worker.exchange.run_news import RequestNumbers, RunNews
from paceline.worker.exchange.server_links import Body, ServerLink, ServerLinks

__all__ = ["DirectExchange"]


class DirectExchange:
    """Push, pull and assign, answered before they return. One thread at a time.

    Args:
        greeting: more to say to the servers when attaching.
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
        greeting: Body,
        spin_s: float,
        rest: Callable[[], object],
    ) -> None:
        self.links = links
        self.payloads = payloads
        self.news = news
        self.numbers = numbers
        self.memory = memory
        self._placements = placements
        self._greeting = greeting
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
                answer = self._take_parameters(link, Kind.ATTACHED)
                welcome = answer if link is links.lead else welcome
        self.news.welcomed(welcome or self._take_parameters(links.lead, Kind.ATTACHED))
        self.get_ready()  # servers may have come since this worker was told which there are

    def _attach(self, link: ServerLink) -> None:
        offered, descriptors = link.carrier.offer()
        body: Body = {
            "fingerprint": self.memory.layout.fingerprint,
            "incarnation": self.links.settings.incarnation,
            "pid": os.getpid(),
            "keeps": self.links.resumes,
            **offered,
            **self._greeting,
        }
        self.links.send(link, Kind.ATTACH, body, descriptors=descriptors)
        if self.links.resumes:
            link.connection.keep()

    # --- requests ---------------------------------------------------------------------------------

    def exchange(self, kind: Kind = Kind.PUSH, *, fetch: bool = True, **body: Any) -> None:
        """Push what lies in the gradient memory, wait until admitted, have fresh parameters.

        Args:
            fetch: False leaves the parameters as they are.
        """
        links, lane = self.links, self.links.lane
        phase = lane.enter(Phase.PUSH)
        ready = 0
        if self._unread or self._placements.incomplete:
            ready = self.get_ready()
        message = self.numbers.message(kind, body, fetch=fetch, version=self.news.version, ready=ready)
        written = self.payloads.write(kind, message)
        waits = kind is not Kind.PUSH or not self.news.mode.needs_memory
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
                    links.send(link, kind, message, views)
            else:
                links.send(link, kind, message, views)
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
                self._take_parameters(link, Kind.ATTACHED)
            except LinkError:
                links.drop([link])
        self._placements.become_ready()
        return self._placements.ready

    def ask_lead(self, kind: Kind, body: Body, answer: Kind) -> Body:
        """Ask the lead a question; if it is gone, ask the next one."""
        while True:
            lead = self.links.lead
            with self.links.tolerate_loss(lead):
                self.links.send(lead, kind, body)
                reply = self.links.receive(lead, answer).body
                self._placements.hear(lead, reply)
                return reply
            self._regroup(fetch=False)  # between two exchanges all parameters are whole

    def ask_all(self, kind: Kind, body: Body) -> list[bytes]:
        """The payloads of all servers' answers, which are of the same kind as the question."""
        self.settle()
        while True:
            parts = []
            for link in self.links.each:
                with self.links.tolerate_loss(link):
                    self.links.send(link, kind, body)
                    frame = self.links.receive(link, kind)
                    parts.append(link.connection.read_blob(frame, frame.payload_bytes))
            if not self.links.lost:
                return parts
            self._regroup(fetch=False)

    def send(self, link: ServerLink, kind: Kind, body: Body, payload: Sequence[memoryview] = ()) -> None:
        """Send a frame that one server does not answer."""
        with self.links.tolerate_loss(link):
            self.links.send(link, kind, body, payload)

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
        reply = self._take_parameters(link, Kind.ADMIT)
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
            body = {"without": self._placements.lose()}
            message = self.numbers.message(
                Kind.PULL, body, fetch=fetch, version=self.news.version, ready=self._placements.ready
            )
            for link in reversed(links.each):
                with links.tolerate_loss(link):
                    links.send(link, Kind.PULL, message)
            self._take_admits(fetch=fetch)

    def _take_parameters(self, link: ServerLink, kind: Kind) -> Body:
        """Receive a reply, and read its parameters to where the model has them."""
        links, lane = self.links, self.links.lane
        frame = links.receive(link, kind)
        self.blame(frame.body)
        self._placements.hear(link, frame.body)
        link.carrier.hear(kind, frame.body)
        if frame.payload_bytes:
            phase = lane.enter(Phase.PULL, link.server)
            lane.carried(frame.payload_bytes)
            try:
                for _ in link.carrier.read(frame):
                    pass
            except LinkError as broken:
                if not link.connection.keeps or isinstance(broken, FrameError):
                    raise
                links.resume(link, broken)  # it comes again, whole
                return self._take_parameters(link, kind)
            finally:
                lane.enter(phase)
        return frame.body

    def blame(self, body: Body) -> None:
        """The lead says which worker it had to wait for, and how long."""
        if "on" in body:
            self.links.lane.blame(field(body, "on", int), field(body, "held", float))
