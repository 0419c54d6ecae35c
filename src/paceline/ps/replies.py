"""Replies that say how the parameters have changed, instead of what they are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.compression import CompressionSpec
from paceline.comm.compression.slice_codec import Decoder, Encoder, Piece
from paceline.params import Layout, Slice, dtype_named

__all__ = ["Differences", "decoder_of"]


class Differences:
    """Writes the difference between the parameters and what one worker has of them, slice by slice.

    What it leaves out is still missing from what the worker has, so it is in the next difference: that is
    all the error feedback it takes.

    Args:
        seed: one for each worker.
    """

    def __init__(self, spec: CompressionSpec, layout: Layout, slices: Sequence[Slice], seed: int) -> None:
        self._decoders = [decoder_of(spec, layout, s) for s in slices]
        self._encoders = [
            Encoder(
                spec,
                _pieces(layout, s),
                seed * len(layout.slices) + s.index,
                dtype=dtype_named(s.dtype),
                feedback=False,
            )
            for s in slices
        ]
        self._held = [torch.empty(s.nbytes, dtype=torch.uint8).view(dtype_named(s.dtype)) for s in slices]

    def remember(self, position: int, flat: Tensor) -> None:
        """The worker is sent this slice as it is."""
        self._held[position].copy_(flat)

    def write(self, position: int, flat: Tensor) -> bytes:
        """The difference for a slice; the worker will have added what can be read from it."""
        held = self._held[position]
        change = flat - held
        data = self._encoders[position].encode(change)
        self._decoders[position].decode(data, change)
        held.add_(change)
        return data


def decoder_of(spec: CompressionSpec, layout: Layout, piece: Slice) -> Decoder:
    """A decoder for one worker's messages of a slice."""
    return Decoder(spec, _pieces(layout, piece), dtype=dtype_named(piece.dtype))


def _pieces(layout: Layout, piece: Slice) -> list[Piece]:
    return [Piece.whole(*extent) for extent in layout.extents(piece)]
