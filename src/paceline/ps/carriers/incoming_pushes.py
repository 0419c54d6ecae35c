"""IncomingPushes: reads the payloads of a worker's messages from its socket."""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.comm import Connection, Frame, Kind
from paceline.comm.compression.slice_codec import Decoder
from paceline.comm.frames import field
from paceline.comm.transfer import Transfer, encoded_sizes
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
        groups_of: the parameter groups that a push brings, read from its body; None: all. Raises FrameError.
        sends: indices of the slices that its pushes bring.
    """

    def __init__(
        self,
        connection: Connection,
        memory: Tensor,
        layout: Layout,
        transfer: Transfer,
        groups_of: Callable[[dict[str, Any]], Collection[int] | None],
        sends: Sequence[Any],
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

    def expect(self, sends: Sequence[Any]) -> None:
        """Pushes bring the slices of these indices from now on. FrameError if there are no such slices."""
        self._expected = self._make_expected(sends)

    def _make_expected(self, sends: Sequence[Any]) -> _Expected:
        layout = self._layout
        known = range(len(layout.slices))
        if not all(isinstance(i, int) and i in known for i in sends):
            raise FrameError(f"slices {sends!r:.80} will be sent; there are {len(known)}")
        slices = [layout.slices[i] for i in sends]
        flats = [flat_view(self._memory, s) for s in slices]
        decoders = []
        if self._transfer.compresses:
            decoders = [decoder_of(self._transfer.compress, layout, s) for s in slices]
        return _Expected(slices, flats, [bytes_of(flat) for flat in flats], decoders)

    def read_early(self, frame: Frame) -> None:
        """Read a slice that left its worker during backward. The last push was answered, so there is room."""
        views, position = self._expected.views, field(frame.body, "at", int)
        if self._expected.decoders or not 0 <= position < len(views):
            raise FrameError(f"a SLICE at {position} of {len(views)} slices")
        self._connection.read_into([views[position]])
        self._early.add(position)

    def read_payload(self, frame: Frame) -> None:
        """Read what a PUSH, ASSIGN or PULL brings."""
        early, self._early = self._early, set()
        nothing = frame.body.get("void") or frame.body.get("carries") == "nothing"
        if frame.kind is Kind.PULL or (nothing and not frame.payload_bytes):
            return
        if frame.kind is Kind.PUSH and self._expected.decoders:
            self._decode(frame)
            return
        every = self._brought(frame)
        positions = field(frame.body, "slices", list, every)
        if not all(isinstance(p, int) and p in every for p in positions):
            raise FrameError(f"a {frame.kind.name} of slices {positions!r:.80}; there are {len(every)}")
        if missing := set(every) - early.union(positions):
            raise FrameError(f"a {frame.kind.name} without payload for {len(missing)} slices")
        self._connection.read_into([self._expected.views[p] for p in positions])

    def _brought(self, frame: Frame) -> list[int]:
        """Positions of the slices that a message brings: of the optimizer that it is for."""
        groups = self._groups_of(frame.body) if frame.kind is Kind.PUSH else None
        slices = self._expected.slices
        return [p for p, piece in enumerate(slices) if groups is None or piece.group in groups]

    def _decode(self, frame: Frame) -> None:
        brought, expected = self._brought(frame), self._expected
        sizes = encoded_sizes(frame.body, [expected.views[p].nbytes for p in brought])
        if len(self._encoded) < sum(sizes):
            self._encoded = bytearray(sum(sizes))
        room, ends = memoryview(self._encoded), [0, *itertools.accumulate(sizes)]
        views = [room[a:b] for a, b in itertools.pairwise(ends)]
        for at in self._connection.read_each(views):
            expected.decoders[brought[at]].decode(views[at], expected.flats[brought[at]])
