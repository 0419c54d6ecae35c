"""Replicator: the leader's links to the other servers, for the order and for slices that change hands."""

import contextlib
from collections.abc import Mapping

from safetensors.torch import save
from torch import Tensor

from paceline.comm import Connection, Frame
from paceline.comm.frames import Body
from paceline.comm.message_codec import body_of
from paceline.comm.server_messages import CaughtUp, OrderEntered, OrderMessage, SlicesMessage
from paceline.core.decider_state import decider_state_to_json
from paceline.core.json_types import JsonObject
from paceline.core.server.lead_actions import Order, TakeIn
from paceline.core.server.run_order import RunOrder
from paceline.core.server.standby import records_to_json
from paceline.exceptions import LinkError
from paceline.params import bytes_of
from paceline.ps.adoption import Adoption
from paceline.ps.executor import Executor
from paceline.ps.peers import MAX_STATE_BYTES

__all__ = ["Replicator", "server_rank"]


class Replicator:
    """The other servers, by rank. The main thread only. A link that breaks is noticed by the hub.

    Args:
        rank: of this server.
        replicates: whether followers hear of every event, so that they can lead.
    """

    def __init__(self, rank: int, *, replicates: bool) -> None:
        self.addresses: dict[int, JsonObject] = {}
        """Where workers reach the other servers."""
        self._rank = rank
        self._replicates = replicates
        self._followers: dict[int, Connection] = {}
        """Sorted by rank: the server that is next in line to lead hears of everything first."""
        self._newcomers: dict[int, Connection] = {}
        """Servers that are not in the order yet."""
        self._early: dict[int, tuple[Connection, Body]] = {}
        """Servers that came by scaling before there was a model, and their greetings."""
        self._left_behind: dict[int, Connection] = {}
        """Servers that hold nothing any more; they end when the controller says so."""

    @property
    def followers(self) -> dict[int, Connection]:
        """Servers that execute the order."""
        return self._followers

    def add_follower(self, server: int, link: Connection) -> None:
        """A server is in the order from here on."""
        self._followers[server] = link
        self._followers = dict(sorted(self._followers.items()))

    def add_newcomer(self, server: int, link: Connection) -> None:
        """A server came to a run that goes on."""
        self._newcomers[server] = link

    def add_early(self, server: int, link: Connection, greeting: Body) -> None:
        """A server came before there is a model that it could be handed."""
        self._early[server] = (link, greeting)

    def take_early(self) -> list[tuple[Connection, Body]]:
        """Servers that came before there was a model, and their greetings, to be greeted again."""
        early, self._early = self._early, {}
        return [*early.values()]

    def remove(self, link: Connection) -> bool:
        """A link ended. Returns whether it was one of ours."""
        self._early = {server: each for server, each in self._early.items() if each[0] is not link}
        for known in (self._followers, self._newcomers, self._left_behind):
            for server in [server for server, each in known.items() if each is link]:
                del known[server]
                return True
        return False

    def close(self) -> None:
        """Close the links to followers."""
        for link in self._followers.values():
            link.close()

    # --- the order --------------------------------------------------------------------------------

    def replicate(self, order: Order) -> None:
        """Send followers the next steps, what they follow from, and steps that wait."""
        steps, events, held = order
        if not self._followers or not (steps or events or (held and self._replicates)):
            return
        message = OrderMessage(steps, events, held) if self._replicates else OrderMessage(steps)
        kind, body = body_of(message)
        for link in self._followers.values():
            with contextlib.suppress(LinkError):
                link.send(kind, body)

    def take_in(self, newcomer: TakeIn) -> None:
        """Let a new server follow from here on."""
        link = self._newcomers.pop(newcomer.server)
        message = OrderEntered(
            newcomer.position, newcomer.answered, newcomer.placement, newcomer.incarnations
        )
        if newcomer.decider is not None:
            records = records_to_json(newcomer.records)
            message = message._replace(decider=newcomer.decider, records=records)
        with contextlib.suppress(LinkError):
            link.tell(message)
        self.add_follower(newcomer.server, link)

    def leave_behind(self, server: int) -> None:
        """A server holds nothing any more."""
        self._left_behind[server] = self._followers.pop(server)

    def catch_up(self, link: Connection, position: int, order: RunOrder) -> None:
        """A follower of the leader before has come. It lacks steps that only this server has heard of, and
        the events that this leader has decided on meanwhile: it is sent the decider's state as it is now.

        Args:
            position: how far it is in the order.

        Raises:
            LinkError: the steps that it lacks are not kept any more.
        """
        steps = order.log.since(position)
        if steps is None:
            raise LinkError(f"{link.peer} is at step {position} of the order, and we at {order.log.position}")
        state, records = decider_state_to_json(order.decider.state()), records_to_json(order.unwritten)
        link.send_aside()
        link.tell(CaughtUp(steps, order.sequencer.held, state, records))

    # --- the model and its slices -----------------------------------------------------------------

    def hand_over(
        self,
        server: int,
        adoption: Adoption,
        executor: Executor,
        checkpoint: str | None,
        *,
        takes_part: bool,
    ) -> None:
        """Tell another server what the run trains, and send it its slices.

        Args:
            checkpoint: path of the one that the run goes on from.
            takes_part: whether it executes the order from its beginning on. A server that comes later waits
                for its place in the order, even if the placement still has the process that it replaces.
        """
        link = self._followers.get(server) or self._newcomers[server]
        model, placement = adoption.model, executor.placement
        assert model is not None and executor.base is not None and executor.region is not None
        extras = save(adoption.extras) if self._replicates else b""
        message = model.message(checkpoint, placement, len(extras), takes_part=takes_part)
        slices = [model.layout.slices[i] for i in placement.held(server)]
        pieces = [] if link.local else [bytes_of(executor.base[s.start : s.stop]) for s in slices]
        payload = [*pieces, memoryview(extras)] if extras else pieces
        link.tell(message, payload, [executor.region.fd] if link.local else ())

    def give(self, server: int, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Send a follower slices that it holds from the placement of this number on."""
        if (link := self._followers.get(server)) is not None:
            with contextlib.suppress(LinkError):
                link.tell(SlicesMessage(server, number), [memoryview(save(dict(tensors)))])

    def relay(self, giver: Connection, frame: Frame, message: SlicesMessage) -> bytes | None:
        """Pass slices on from one server to another. Returns them if they are for this server."""
        blob = giver.read_blob(frame, MAX_STATE_BYTES)
        if message.to == self._rank:
            return blob
        if (link := self._followers.get(message.to)) is not None:
            with contextlib.suppress(LinkError):
                link.tell(message, [memoryview(blob)])
        return None


def server_rank(connection: Connection) -> int:
    """The rank of the server at the other end."""
    return int(connection.peer.partition(":")[2])
