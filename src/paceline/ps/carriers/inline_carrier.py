"""InlineCarrier: gradients and parameters travel over the link's own socket."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm import Connection
from paceline.comm.fence import Fence
from paceline.comm.worker_messages import AdmitReply, AssignMessage, AttachedReply, PushMessage
from paceline.ps.carriers.carrier import Attaching
from paceline.ps.carriers.incoming_pushes import IncomingPushes
from paceline.ps.carriers.link_thread import LinkThread, OutgoingSlices
from paceline.ps.contributions import Copy, Gradients
from paceline.ps.replies import Differences
from paceline.ps.shard import Shard

__all__ = ["InlineCarrier"]


class InlineCarrier:
    """For a worker that is on another host, compresses, or hides its exchanges. A thread (`LinkThread`) reads
    pushes into a buffer of this process, and sends the slices of a reply as they get ready."""

    checked = False
    streams = True
    has_thread = True

    def __init__(self, attaching: Attaching) -> None:
        layout, shard, transfer = attaching.layout, attaching.shard, attaching.transfer
        self._layout = layout
        self._received = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._shard = shard
        self._in_place = attaching.sent_in_place
        self.gradients = Gradients(self._received, layout, shard.slices)
        self.copy: Copy | None = None
        self._out = self._fit()
        self._reply = AdmitReply(version=0)
        self._sends_slices = False
        """Whether the present reply brings slices."""
        sends = attaching.message.sends
        pushes = IncomingPushes(
            attaching.connection,
            self._received,
            layout,
            transfer,
            attaching.groups_of,
            [s.index for s in shard.slices] if sends is None else sends,
        )
        worker, differences = attaching.worker, None
        if transfer.replies is not None:
            differences = Differences(transfer.replies, layout, shard.slices, seed=worker)
        lane = attaching.spans.lane(f"worker:{worker}")
        attaching.release(attaching.connection)
        self.link = LinkThread(attaching.connection, worker, pushes, differences, attaching.post, lane)

    def refit(self, shard: Shard) -> None:
        """See Carrier."""
        self._shard = shard
        self.gradients = Gradients(self._received, self._layout, shard.slices)
        self._out = self._fit()

    def read_in_place(self, in_place: bool) -> None:
        """See Carrier. Sending from a copy is right in every mode: a carrier that has one keeps it."""
        if self._in_place and not in_place:
            self._in_place = False
            self._out = self._fit()

    def _fit(self) -> OutgoingSlices:
        """Memory that replies are sent from."""
        shard = self._shard
        if self._in_place:
            return OutgoingSlices(shard.parameters, shard.owned)
        copy = shard.flats(torch.empty(self._layout.nbytes, dtype=torch.uint8))
        owned = set(shard.owned)
        self.copy = [flat if i in owned else None for i, flat in enumerate(copy)]
        return OutgoingSlices(copy, shard.owned)

    def ready(self, message: PushMessage | AssignMessage) -> Fence | None:
        """See Carrier."""
        return None

    def pushed_parameters(self) -> Sequence[Tensor]:
        """See Carrier."""
        return self.gradients.flat

    def welcome(self, reply: AttachedReply, owned: Sequence[int]) -> None:
        """See Carrier."""
        reply.owned = tuple(owned)
        self.link.welcome(reply, self._out)

    def begin_reply(self, reply: AdmitReply, *, fetch: bool) -> Sequence[Copy]:
        """See Carrier."""
        self._reply = reply
        self._sends_slices = fetch and bool(self._out.owned)
        if self._sends_slices:
            # With the memory that it is to be sent from: the next order may change that.
            self.link.reply(reply, self._out)
        return (self.copy,) if fetch and self.copy is not None else ()

    def slice_ready(self, position: int) -> None:
        """See Carrier."""
        if position != self._out.owned[-1]:
            self.link.slice_ready(position)

    def end_reply(self) -> None:
        """See Carrier. With the last slice the worker goes on, and writes over its gradients."""
        if self._sends_slices:
            self.link.slice_ready(self._out.owned[-1])
        else:
            self.link.reply(self._reply, None)

    def skip(self) -> None:
        """See Carrier."""
        self.link.skip()

    def resume(self, connection: Connection, received: int) -> None:
        """See Carrier."""
        self.link.resume(connection, received)

    def release(self) -> None:
        """See Carrier."""

    def close(self) -> None:
        """See Carrier."""
        self.link.close()
