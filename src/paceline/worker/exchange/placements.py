"""Which server holds which slices, as a worker knows it: now, and in the placement announced next."""

from collections.abc import Mapping

from paceline.comm import Address
from paceline.comm.worker_messages import AttachedReply, LeadNews, SendsMessage
from paceline.core.json_types import Json, JsonObject
from paceline.exceptions import FrameError
from paceline.params import Layout, Placement
from paceline.worker.exchange.server_links import ServerLink, ServerLinks

__all__ = ["Placements"]


class Placements:
    """Arranges a worker's links by the placements that the lead announces."""

    def __init__(self, links: ServerLinks, layout: Layout, placement: Placement) -> None:
        self._links = links
        self._layout = layout
        self._placement = placement
        self.announced: Placement | None = None
        """A placement to come."""
        self._addresses: dict[int, Address] = {}
        """Where servers are that this worker may have no link to."""
        self._unlinked = False
        """Whether the present placement has servers that this worker has no link to: they came while it
        joined."""
        self._ready = 0
        """Its number, once this worker is ready for it."""
        self._absent: set[int] = set()
        """Servers that this worker found gone, and that are still in the placement."""
        self.arrange()

    @property
    def ready(self) -> int:
        """Number of the announced placement if this worker is ready for it, else 0."""
        return self._ready if self.announced is not None else 0

    @property
    def incomplete(self) -> bool:
        """Whether there may be servers to connect to before the next request."""
        return self.announced is not None or self._unlinked

    def answers(self, link: ServerLink) -> bool:
        """Whether a server answers requests: one that is new answers from its first placement on."""
        links = self._links
        return link in links.each and link not in links.lost and link.server in self._placement.servers

    def arrange(self) -> None:
        """Give every link the slices that are sent over it, by the present placement and the next one."""
        now, then = self._placement, self.announced
        changed: list[tuple[ServerLink, SendsMessage]] = []
        for link in self._links.each:
            held = {*now.held(link.server)}
            if then is not None:
                held.update(then.held(link.server))
            link.slices = [self._layout.slices[i] for i in sorted(held)]
            told = link.carrier.arrange(link.slices, now.owned(link.server))
            if told is not None:
                changed.append((link, told))
        for link, told in changed:
            with self._links.tolerate_loss(link):
                self._links.send(link, told)

    def hear(self, link: ServerLink, reply: LeadNews | AttachedReply) -> None:
        """A reply may name a new placement, which only the lead does, or announce the next one."""
        if isinstance(reply, AttachedReply):
            self._learn(reply.servers or {})
        if reply.placement is not None:
            self._adopt(link, Placement.from_json(reply.placement))
        if reply.next is not None:
            placement, addresses = _read_next(reply.next)
            self._learn(addresses)
            self.announced = Placement.from_json(placement)

    def _learn(self, addresses: Mapping[int, JsonObject] | Mapping[str, JsonObject]) -> None:
        self._addresses |= {int(rank): Address.from_json(where) for rank, where in addresses.items()}

    def _adopt(self, lead: ServerLink, placement: Placement) -> None:
        links = self._links
        self._placement = placement
        if self.announced is not None and self.announced.number <= placement.number:
            self.announced = None
        links.follow(lead)
        gone = [link for link in links.each if link.server not in placement.servers]
        links.lost = [link for link in links.lost if link not in gone]
        self._absent &= placement.servers
        links.drop(gone)
        self.arrange()
        self._unlinked = bool(self.missing_links())

    def lose(self) -> list[int]:
        """Drop the lost links. Returns all servers that are gone and still in the placement."""
        links = self._links
        self._absent.update(link.server for link in links.lost)
        links.drop(links.lost)
        links.lost = []
        return sorted(self._absent)

    def missing_links(self) -> dict[int, Address]:
        """Servers of the present and of the next placement that this worker has no link to. Empty once it is
        ready."""
        wanted = set(self._placement.servers)
        if self.announced is not None and self._ready != self.announced.number:
            wanted |= self.announced.servers
        wanted -= {link.server for link in self._links.each} | self._absent
        return {rank: where for rank, where in self._addresses.items() if rank in wanted}

    def become_ready(self) -> None:
        """All new servers are reached: from now on this worker sends what the next placement needs."""
        if self.announced is not None and self._ready != self.announced.number:
            self.arrange()
            self._ready = self.announced.number
        elif self._unlinked:
            self.arrange()
        self._unlinked = bool(self.missing_links())


def _read_next(announced: Json) -> tuple[Json, dict[str, JsonObject]]:
    """An announced placement as JSON, and the addresses of its new servers. Raises FrameError."""
    if isinstance(announced, list) and len(announced) == 2 and isinstance(announced[1], dict):
        addresses = {rank: each for rank, each in announced[1].items() if isinstance(each, dict)}
        if len(addresses) == len(announced[1]) and all(map(str.isdecimal, addresses)):
            return announced[0], addresses
    raise FrameError(f"{announced!r:.80} is not the announcement of a placement")
