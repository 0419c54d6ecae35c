"""What a worker writes behind its messages: slices as they lie in memory, compressed, or nothing."""

import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.comm.worker_messages import AdmitReply, OrderedMessage, PushMessage
from paceline.observe.record.phase import Phase
from paceline.params import flat_view
from paceline.worker.exchange.device_memory import DeviceMemory
from paceline.worker.exchange.encoders import Encoders
from paceline.worker.exchange.exchange_memory import ExchangeMemory
from paceline.worker.exchange.server_links import ServerLinks

__all__ = ["Payloads", "Written"]

Written = list[tuple[OrderedMessage, Sequence[memoryview]]]
"""For each link: a message and the payload behind it."""

RESIDUAL_S = 0.5
"""Time between two measurements of what the encoders hold back: each is a pass over all of it."""


class Payloads:
    """Writes the payloads of one worker's requests.

    Args:
        slices_of: the indices of each optimizer's slices.
        encoders: compress gradients; None sends them as they are.
    """

    def __init__(
        self,
        links: ServerLinks,
        memory: ExchangeMemory | DeviceMemory,
        slices_of: Sequence[frozenset[int]],
        encoders: Encoders | None,
    ) -> None:
        self.slices_of = slices_of
        self.encoders = encoders
        self.encoded_bytes = 0
        """Size of the last compressed push, every slice counted once."""
        self._links = links
        self._memory = memory
        self._residual_told = -RESIDUAL_S

    def write(self, message: OrderedMessage) -> Written:
        """What each server gets: a message and what travels behind it."""
        due = None
        if isinstance(message, PushMessage):
            if self.encoders is not None and message.carries == "slot" and not message.void:
                return self._encode(self.encoders, message)
            if len(self.slices_of) > 1:
                due = self.slices_of[message.optimizer]
        return [link.carrier.write(message, due) for link in self._links.each]

    def _encode(self, encoders: Encoders, message: PushMessage) -> Written:
        lane, links = self._links.lane, self._links.each
        phase = lane.enter(Phase.COMPRESS)
        encoders.begin_push(message.sequence)
        due = self.slices_of[message.optimizer]
        message.missing = tuple(encoders.still_missing(message.missing, due))
        encoded: dict[int, memoryview] = {}  # once, for all servers that hold a slice
        for piece in (piece for link in links for piece in link.slices if piece.index in due):
            if piece.index not in encoded:
                data = encoders.encode(piece.index, flat_view(self._memory.gradients, piece))
                encoded[piece.index] = memoryview(data)
        self.encoded_bytes = sum(view.nbytes for view in encoded.values())
        parts = [[encoded[s.index] for s in link.slices if s.index in due] for link in links]
        if time.monotonic() - self._residual_told > RESIDUAL_S:
            self._residual_told = time.monotonic()
            message.residual = encoders.residual_norm()
        lane.enter(phase)
        return [(replace(message, sizes=tuple(view.nbytes for view in part)), part) for part in parts]

    def hear_fates(self, reply: AdmitReply) -> None:
        """The lead says which pushes are settled, and which of them were not applied."""
        if self.encoders is not None and reply.settled is not None:
            self.encoders.settle(reply.settled, reply.unapplied)
