"""How a worker's gradients are written for the way to the servers, an encoder for every slice; and how
replies are read that are written in the same way.

What encoders did not send yet is part of the worker's state: it travels in its part of a checkpoint, as
`encoder:SLICE:WHAT`. A push that the servers did not apply is taken out of it again.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.comm import Connection
from paceline.comm.compression import CompressionSpec, refuse_useless
from paceline.comm.compression.slice_codec import Decoder, Encoder, Piece
from paceline.comm.transfer import Transfer, encoded_sizes
from paceline.core.modes import ModeSpec
from paceline.exceptions import UsageError
from paceline.params import (
    HasParameters,
    Layout,
    OptimizerSpec,
    Slice,
    bytes_of,
    describe,
    dtype_named,
    flat_view,
)

__all__ = ["DifferenceReader", "Encoders", "follow_settings", "lay_out", "without_momentum"]

OVERLAPPED_SLICES = 8
"""With overlap, a server's part of a small model is cut into so many slices: one alone cannot leave early."""


class Encoders:
    """The encoders of one worker, by slice. One thread at a time.

    Args:
        seed: one for each worker and incarnation.
    """

    def __init__(self, spec: CompressionSpec, layout: Layout, seed: int) -> None:
        self.spec = spec
        self._layout = layout
        self._seed = seed
        self._momenta = [0.0] * (1 + max(s.group for s in layout.slices))
        self._encoders = [self._make(s) for s in layout.slices]
        self._seen = torch.zeros(len(layout.tensors), dtype=torch.bool)
        self._before: dict[int, tuple[list[dict[str, Tensor]], Tensor]] = {}
        """Pushes whose fate is not known, in order: where the encoders and `seen` were before each."""

    def begin_push(self, sequence: int) -> None:
        """The messages that follow belong to this push. With error feedback `settle` must say what became of
        it: until then what the encoders held before it is kept."""
        if self.spec.has_feedback:
            self._before[sequence] = [encoder.mark() for encoder in self._encoders], self._seen.clone()

    def settle(self, upto: int, unapplied: Sequence[int]) -> None:
        """Hear what became of pushes. Those that were not applied leave no trace in the next messages.

        Args:
            upto: the fates of all pushes up to this one are known.
            unapplied: pushes that were refused or dropped.
        """
        for sequence in sorted(unapplied, reverse=True):
            if sequence in self._before:
                self._undo(sequence)
        for sequence in [s for s in self._before if s <= upto]:
            del self._before[sequence]

    def _undo(self, sequence: int) -> None:
        before, seen = self._before[sequence]
        later = [s for s in self._before if s > sequence]
        if not later:
            for encoder, mark in zip(self._encoders, before, strict=True):
                encoder.back_to(mark)
            self._seen = seen
        else:
            after, _ = self._before[min(later)]
            for encoder, was, became in zip(self._encoders, before, after, strict=True):
                encoder.take_out(was, became)
            for s in later:
                marks, seen_then = self._before[s]
                self._before[s] = (
                    [_shifted(*each) for each in zip(marks, before, after, strict=True)],
                    seen_then,
                )
        del self._before[sequence]

    def encode(self, index: int, flat: Tensor) -> bytes:
        """The message for a slice."""
        return self._encoders[index].encode(flat)

    def still_missing(self, missing: Sequence[int], slices: Collection[int]) -> list[int]:
        """Those of the tensors without a gradient that servers are to skip.

        A tensor that once had one is not skipped: something of it may have been held back until now.

        Args:
            slices: indices of those that are pushed.
        """
        if not self.spec.has_feedback:
            return list(missing)
        present = torch.zeros_like(self._seen)
        present[[g.tensor for s in self._layout.slices if s.index in slices for g in s.segments]] = True
        present[list(missing)] = False
        self._seen |= present
        return [i for i in missing if not self._seen[i]]

    def use_momentum(self, momenta: Sequence[float]) -> None:
        """dgc applies the optimizer's momentum here; it may change from step to step.

        Args:
            momenta: of each parameter group.
        """
        if not self.spec.has_momentum or [*momenta] == self._momenta:
            return
        self._momenta = [*momenta]
        for i, piece in enumerate(self._layout.slices):
            before = self._encoders[i].state()
            self._encoders[i] = self._make(piece)
            self._encoders[i].load(before)

    def residual_norm(self) -> float:
        """L2 norm of all that was not sent yet."""
        return math.sqrt(math.fsum(e.residual_norm() ** 2 for e in self._encoders))

    def state(self) -> dict[str, Tensor]:
        """All that the next messages depend on, besides the gradients."""
        found = {"spec": _text(str(self.spec)), "cut": _text(self._layout.fingerprint), "seen": self._seen}
        for i, encoder in enumerate(self._encoders):
            found |= {f"{i}:{what}": value for what, value in encoder.state().items()}
        return found

    def load(self, state: dict[str, Tensor]) -> str | None:
        """Go on from `state()`. If that is of another compression or cut, says so, and begins anew."""
        if not state:
            return None
        old = bytes(state["spec"].tolist()).decode()
        if old != str(self.spec) or not torch.equal(state["cut"], _text(self._layout.fingerprint)):
            held = [v for k, v in state.items() if k.endswith(":residual")]
            norm = math.sqrt(math.fsum(float(torch.linalg.vector_norm(v.double())) ** 2 for v in held))
            return (
                f"gradient of L2 norm {norm:.3g} that compression {old} had held back is dropped: the "
                "checkpoint was made with another compression or another number of servers"
            )
        for i, encoder in enumerate(self._encoders):
            mine = f"{i}:"
            encoder.load({k.removeprefix(mine): v for k, v in state.items() if k.startswith(mine)})
        self._seen = state["seen"].clone()
        return None

    def _make(self, piece: Slice) -> Encoder:
        return Encoder(
            self.spec,
            _pieces(self._layout, piece),
            self._seed * len(self._layout.slices) + piece.index,
            dtype=dtype_named(piece.dtype),
            momentum=self._momenta[piece.group],  # 0 but for dgc
        )


def _shifted(
    mark: dict[str, Tensor], before: dict[str, Tensor], after: dict[str, Tensor]
) -> dict[str, Tensor]:
    """A later mark, without what the message between two marks left behind."""
    moved: dict[str, Tensor] = {
        k: mark[k] + (before[k] - after[k]) for k in ("residual", "velocity") if k in mark
    }
    return {**mark, **moved}


class DifferenceReader:
    """Reads replies that say how the parameters have changed. One link is read by one thread at a time.

    Args:
        shards: the slices of each server, by its rank.
    """

    def __init__(self, spec: CompressionSpec, layout: Layout, shards: Mapping[int, Sequence[Slice]]) -> None:
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        # What the servers know this worker to have; the first reply is a whole one.
        self._held = {server: [flat_view(memory, s) for s in shard] for server, shard in shards.items()}
        self._decoders = {
            server: [Decoder(spec, _pieces(layout, s), dtype=dtype_named(s.dtype)) for s in shard]
            for server, shard in shards.items()
        }

    def read(
        self, connection: Connection, server: int, sizes: Sequence[int] | None, views: Sequence[memoryview]
    ) -> Iterator[int]:
        """Read the parameters that a server sends into `views`, whatever they held; yields the position of
        each slice once it is there.

        Args:
            sizes: bytes of each compressed slice; None: they are not compressed.
        """
        held = self._held[server]
        if sizes is None:  # a whole one
            for position in connection.read_each(views):
                bytes_of(held[position])[:] = views[position]
                yield position
            return
        checked = encoded_sizes(sizes, [flat.nbytes for flat in held])
        rooms = [memoryview(bytearray(size)) for size in checked]
        for position in connection.read_each(rooms):
            change = torch.empty_like(held[position])
            self._decoders[server][position].decode(rooms[position], change)
            views[position][:] = bytes_of(held[position].add_(change))
            yield position


def _pieces(layout: Layout, piece: Slice) -> list[Piece]:
    return [Piece.whole(*extent) for extent in layout.extents(piece)]


def lay_out(
    models: HasParameters,
    optimizers: Sequence[torch.optim.Optimizer],
    spec: OptimizerSpec,
    transfer: Transfer,
    *,
    servers: int,
) -> tuple[OptimizerSpec, Layout, list[nn.Parameter]]:
    """The parameter space, cut as the optimizers and the transfer need it; and the spec that says so.

    Raises:
        UsageError: see `describe`; or compression would make nothing of this model smaller.
    """
    if transfer.compress.wants_whole_tensors:
        spec = replace(spec, whole_tensors=True)
    parts = servers * (OVERLAPPED_SLICES if transfer.leaves_early else 1)
    layout, parameters = describe(models, optimizers, servers=parts, whole_tensors=spec.whole_tensors)
    refuse_useless(transfer.compress, [t.shape for t in layout.tensors])
    return spec, layout, parameters


def without_momentum(
    spec: CompressionSpec, mode: ModeSpec, optimizer: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    """The optimizer that servers run under dgc: the script's SGD, whose momentum the encoders apply.

    Raises:
        UsageError: the script's optimizer is another one.
    """
    reason = None
    if mode.outer != "own" or mode.payload not in ("gradient", "sum"):
        reason = f"mode {mode} steps with an optimizer of its own"
    elif type(optimizer) is not torch.optim.SGD:
        reason = f"the script's is {type(optimizer).__name__}"
    elif any(group["nesterov"] or group["dampening"] for group in optimizer.param_groups):
        reason = "the script's has nesterov or dampening"
    if reason is not None:
        raise UsageError(
            f"compression {spec} takes over the momentum of a plain torch.optim.SGD, and {reason}. Use such "
            f"an optimizer, or --compress topk:{spec.fraction}, which goes with every optimizer."
        )
    served = torch.optim.SGD([{"params": group["params"]} for group in optimizer.param_groups])
    follow_settings(served, optimizer)
    return served


def follow_settings(served: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Give the servers' optimizer under dgc the script's settings, all but the momentum."""
    for outer, group in zip(served.param_groups, optimizer.param_groups, strict=True):
        outer.update({k: v for k, v in group.items() if k not in ("params", "momentum")}, momentum=0.0)


def _text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
