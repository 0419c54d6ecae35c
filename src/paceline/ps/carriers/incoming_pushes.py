"""IncomingPushes: reads the payloads of a worker's messages from its socket."""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.comm import Connection, Frame
from paceline.comm.compression.slice_codec import Decoder
from paceline.comm.transfer import Transfer, encoded_sizes
from paceline.comm.worker_messages import EARLY_SLICE, ORDERED, PullMessage, PushMessage
from paceline.exceptions import FrameError
from paceline.params import Layout, Slice, bytes_of, flat_view
from paceline.ps.replies import decoder_of

__all__ = ["IncomingPushes"]


@dataclass(frozen=True)
class _Expected:
    """The slices that a worker's pushes bring, and where they go."""

    slices: Sequence[Slice]
    flats: Sequence[Tensor]
    views: Sequence[memoryview]
    decoders: Sequence[Decoder]
    """Of compressed pushes."""


class IncomingPushes:
    """What one worker pushes. Only the thread that reads its link calls it.

    Args:
        memory: the bytes of a whole parameter space, which pushes are read into.
        transfer: how the worker writes gradients.
        groups_of: the parameter groups of an optimizer, which its pushes bring; None: all. Raises FrameError.
        sends: indices of the slices that its pushes bring.
    """

    def __init__(
        self,
        connection: Connection,
        memory: Tensor,
        layout: Layout,
        transfer: Transfer,
        groups_of: Callable[[int], Collection[int] | None],
        sends: Sequence[int],
    ) -> None:
        self._connection = connection
        self._memory = memory
        self._layout = layout
        self._transfer = transfer
        self._groups_of = groups_of
        self._early: set[int] = set()
        """Positions of slices that came ahead of their push."""
        self._encoded = bytearray()
        self._expected = self._make_expected(sends)

    def expect(self, sends: Sequence[int]) -> None:
        """Pushes bring the slices of these indices from now on. FrameError if there are no such slices."""
        self._expected = self._make_expected(sends)

    def _make_expected(self, sends: Sequence[int]) -> _Expected:
        layout = self._layout
        known = range(len(layout.slices))
        if not all(i in known for i in sends):
            raise FrameError(f"slices {sends!r:.80} will be sent; there are {len(known)}")
        slices = [layout.slices[i] for i in sends]
        flats = [flat_view(self._memory, s) for s in slices]
        decoders = []
        if self._transfer.compresses:
            decoders = [decoder_of(self._transfer.compress, layout, s) for s in slices]
        return _Expected(slices, flats, [bytes_of(flat) for flat in flats], decoders)

    def read_early(self, frame: Frame) -> None:
        """Read a slice that left its worker during backward. The last push was answered, so there is room."""
        views, position = self._expected.views, EARLY_SLICE.read(frame.kind, frame.body).at
        if self._expected.decoders or not 0 <= position < len(views):
            raise FrameError(f"a SLICE at {position} of {len(views)} slices")
        self._connection.read_into([views[position]])
        self._early.add(position)

    def read_payload(self, frame: Frame) -> None:
        """Read what a PUSH, ASSIGN or PULL brings."""
        early, self._early = self._early, set()
        message = ORDERED.read(frame.kind, frame.body)
        if isinstance(message, PullMessage):
            return
        pushed = message if isinstance(message, PushMessage) else None
        if pushed is not None and not frame.payload_bytes and (pushed.void or pushed.carries == "nothing"):
            return
        if pushed is not None and self._expected.decoders:
            self._decode(pushed)
            return
        every = self._brought(pushed)
        positions = every if pushed is None or pushed.slices is None else pushed.slices
        if not all(p in every for p in positions):
            raise FrameError(f"a {frame.kind.name} of slices {positions!r:.80}; there are {len(every)}")
        if missing := set(every) - early.union(positions):
            raise FrameError(f"a {frame.kind.name} without payload for {len(missing)} slices")
        self._connection.read_into([self._expected.views[p] for p in positions])

    def _brought(self, pushed: PushMessage | None) -> list[int]:
        """Positions of the slices that a message brings: a push, those of its optimizer; an assign, all."""
        groups = None if pushed is None else self._groups_of(pushed.optimizer)
        slices = self._expected.slices
        return [p for p, piece in enumerate(slices) if groups is None or piece.group in groups]

    def _decode(self, pushed: PushMessage) -> None:
        brought, expected = self._brought(pushed), self._expected
        sizes = encoded_sizes(pushed.sizes, [expected.views[p].nbytes for p in brought])
        if len(self._encoded) < sum(sizes):
            self._encoded = bytearray(sum(sizes))
        room, ends = memoryview(self._encoded), [0, *itertools.accumulate(sizes)]
        views = [room[a:b] for a, b in itertools.pairwise(ends)]
        for at in self._connection.read_each(views):
            expected.decoders[brought[at]].decode(views[at], expected.flats[brought[at]])
