"""How many bytes a worker's steps move: what the mode asks for, whatever carries it.

Through shared memory nothing travels, over TCP paddings and copies for replicas do, too; what a mode moves is
the same. docs/observing.md has the table of all modes.
"""

from paceline.comm.transfer import Transfer
from paceline.core.modes import ModeSpec
from paceline.observe.record.ledger import LedgerKeeper
from paceline.params import Layout
from paceline.worker.exchange.client import Client
from paceline.worker.steppers.stepper import Request

__all__ = ["Traffic"]


class Traffic:
    """Counts into a worker's ledger."""

    def __init__(self, ledger: LedgerKeeper, transfer: Transfer) -> None:
        self._ledger = ledger
        self._compressed_replies = transfer.replies is not None
        self._whole = 0
        self._seen = 0
        self._wire_out = self._wire_in = 0
        """Within the group."""

    def lay_out(self, layout: Layout) -> None:
        """The run's parameters are these."""
        self._whole = layout.tensor_bytes

    def exchanged(self, client: Client, mode: ModeSpec, request: Request, layout: Layout) -> None:
        """A step, or the flush after the last one, has exchanged with the servers.

        Args:
            layout: of the optimizer whose step it is.
        """
        out = back = 0
        if request.push and request.finite and request.carries == "slot":
            out = layout.tensor_bytes if client.payloads.encoders is None else client.payloads.encoded_bytes
        if self._compressed_replies:
            back = self._new_replies(client)
        elif request.fetch or (mode.inner or mode).needs_memory:  # read in place, in every step
            back = self._whole
        self._ledger.moved(out, back)

    def fetched(self, mode: ModeSpec) -> None:
        """Fresh parameters came with leases. In sandblaster that is how an epoch's update comes; elsewhere a
        worker that rested catches up, which is no part of a step."""
        if mode.by_epoch:
            self._ledger.moved(0, self._whole)

    def moved_in_group(self, out: int, back: int, *, wire: bool) -> None:
        """A step moved so many bytes within the group, over sockets (`wire`) or through memory."""
        self._ledger.moved(out, back)
        if wire:
            self._wire_out += out
            self._wire_in += back

    def look(self, client: Client) -> None:
        """Read off what links have carried so far."""
        if self._compressed_replies:
            self._ledger.moved(0, self._new_replies(client))
        ledger = self._ledger.ledger
        ledger.wire_out = client.links.bytes_sent + self._wire_out
        ledger.wire_in = client.links.bytes_received + self._wire_in

    def _new_replies(self, client: Client) -> int:
        """Compressed parameters that came since the last look: how large they are is only seen then."""
        before, self._seen = self._seen, client.links.bytes_received
        return self._seen - before
