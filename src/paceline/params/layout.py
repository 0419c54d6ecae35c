"""What lies where in the parameter space, cut into slices and dealt to servers.

Tensors are ordered by (dtype, parameter group, forward order), so that a slice has one dtype and one
set of optimizer settings. Every tensor starts on a 64-byte boundary. A large tensor is cut at multiples
of 1,024 elements counted from its own start: torch's vectorised kernels then treat every element as they
would in the whole tensor, which keeps results bitwise equal whatever the cut (measured, see
docs/decisions.md). Optimizers that look at whole tensors get a layout whose slices never cut one.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from paceline.exceptions import FrameError

__all__ = ["SLICE_BYTES", "Layout", "Segment", "Slice", "TensorInfo", "partition"]

SLICE_BYTES = 4 << 20
"""A slice is about this large at most: small enough to pipeline, large enough to amortise a message."""

_SMALLEST_SLICE_BYTES = 64 << 10
_ALIGN = 64
_CUT = 1024
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One trainable tensor."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    group: int
    """Index of its parameter group in the optimizer."""
    offset: int = 0
    """First byte in the parameter space."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Segment:
    """The part of one tensor that lies in one slice: elements start to stop of tensor `tensor`."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The unit of exchange: a contiguous piece of the space, of one dtype and one parameter group."""

    index: int
    dtype: str
    group: int
    start: int
    """First byte."""
    stop: int
    """One past the last byte."""
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where every tensor lies, and the slices. Equal layouts have equal fingerprints."""

    tensors: tuple[TensorInfo, ...]
    slices: tuple[Slice, ...]
    nbytes: int
    whole_tensors: bool
    aliases: tuple[tuple[str, str], ...] = field(default=())
    """state_dict keys that name a tensor of the space under another name (tied weights)."""

    @classmethod
    def build(
        cls,
        tensors: Iterable[TensorInfo],
        *,
        servers: int = 1,
        whole_tensors: bool = False,
        aliases: Iterable[tuple[str, str]] = (),
    ) -> "Layout":
        """Lay out tensors given in forward order.

        Args:
            servers: a model too small to give each server a full slice is cut finer.
            whole_tensors: never cut inside a tensor.
        """
        forward = list(tensors)
        order = sorted(range(len(forward)), key=lambda i: (forward[i].dtype, forward[i].group, i))
        placed: list[TensorInfo] = []
        end = 0
        for i in order:
            placed.append(replace(forward[i], offset=end))
            end = _aligned(end + forward[i].nbytes)
        share = -(-end // max(1, servers))
        limit = min(SLICE_BYTES, max(_SMALLEST_SLICE_BYTES, share))
        return cls(
            tensors=tuple(placed),
            slices=tuple(_cut(placed, limit, whole_tensors)),
            nbytes=end,
            whole_tensors=whole_tensors,
            aliases=tuple(sorted(aliases)),
        )

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that every message of a run carries or was agreed on."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def index(self) -> dict[str, int]:
        """Tensor name to its place in `tensors`."""
        return {t.name: i for i, t in enumerate(self.tensors)}

    @property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)

    def first_difference(self, other: "Layout") -> str | None:
        """The first thing in which `other` differs from this layout, in words; None if nothing."""
        theirs = {t.name: t for t in other.tensors}
        for mine in self.tensors:
            twin = theirs.pop(mine.name, None)
            if twin is None:
                return f"parameter {mine.name!r} {list(mine.shape)} is missing"
            for what in ("shape", "dtype", "group", "stride"):
                a, b = getattr(mine, what), getattr(twin, what)
                if a != b:
                    return f"parameter {mine.name!r} has {what} {b}, expected {a}"
        for name, extra in theirs.items():
            return f"parameter {name!r} {list(extra.shape)} is not in the model of the run"
        return None if self == other else "the slices are cut differently"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; `from_json` is its inverse."""
        return {
            "tensors": [
                [t.name, list(t.shape), list(t.stride), t.dtype, t.group, t.offset]
                for t in self.tensors
            ],
            "slices": [
                [s.dtype, s.group, s.start, s.stop, [[g.tensor, g.start, g.stop] for g in s.segments]]
                for s in self.slices
            ],
            "nbytes": self.nbytes,
            "whole_tensors": self.whole_tensors,
            "aliases": [list(a) for a in self.aliases],
        }

    @classmethod
    def from_json(cls, data: Any) -> "Layout":
        """Read and check a layout from the wire or a checkpoint; anything odd is a FrameError."""
        try:
            layout = cls(
                tensors=tuple(
                    TensorInfo(
                        name=str(n),
                        shape=tuple(map(int, shape)),
                        stride=tuple(map(int, stride)),
                        dtype=str(dtype),
                        group=int(group),
                        offset=int(offset),
                    )
                    for n, shape, stride, dtype, group, offset in data["tensors"]
                ),
                slices=tuple(
                    Slice(
                        index=i,
                        dtype=str(dtype),
                        group=int(group),
                        start=int(start),
                        stop=int(stop),
                        segments=tuple(Segment(int(t), int(a), int(b)) for t, a, b in segments),
                    )
                    for i, (dtype, group, start, stop, segments) in enumerate(data["slices"])
                ),
                nbytes=int(data["nbytes"]),
                whole_tensors=bool(data["whole_tensors"]),
                aliases=tuple((str(a), str(b)) for a, b in data["aliases"]),
            )
            layout._check()
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise FrameError(f"not a parameter layout: {error!r}") from error
        return layout

    def _check(self) -> None:
        """Everything lies inside the space and the slices cover every tensor exactly once."""
        if not 0 < self.nbytes < 1 << 44 or not self.tensors:
            raise ValueError(f"a space of {self.nbytes} bytes")
        covered = [0] * len(self.tensors)
        end = 0
        for t in self.tensors:
            if t.dtype not in _ITEM_BYTES or t.group < 0 or min(t.shape, default=1) < 1:
                raise ValueError(f"tensor {t.name!r}")
            if t.offset < end or t.offset % _ALIGN or t.offset + t.nbytes > self.nbytes:
                raise ValueError(f"tensor {t.name!r} at byte {t.offset}")
            reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=True))
            if min(t.stride, default=0) < 0 or reach > t.numel:
                raise ValueError(f"tensor {t.name!r} with strides {t.stride}")
            end = t.offset + t.nbytes
        for s in self.slices:
            if not s.segments or s.segments[0].tensor < 0:
                raise ValueError(f"slice {s.index} without segments")
            first, last = s.segments[0], s.segments[-1]
            if (s.start, s.stop) != (self.byte_of(first)[0], self.byte_of(last)[1]):
                raise ValueError(f"slice {s.index} from {s.start} to {s.stop}")
            for g in s.segments:
                t = self.tensors[g.tensor]
                if g.start != covered[g.tensor] or not g.start < g.stop <= t.numel:
                    raise ValueError(f"slice {s.index}, tensor {t.name!r}")
                if (t.dtype, t.group) != (s.dtype, s.group):
                    raise ValueError(f"slice {s.index} mixes dtypes or groups")
                covered[g.tensor] = g.stop
        if any(c != t.numel for c, t in zip(covered, self.tensors, strict=True)):
            raise ValueError("slices do not cover the space")

    def byte_of(self, segment: Segment) -> tuple[int, int]:
        """First byte and one past the last byte of a segment in the space."""
        t = self.tensors[segment.tensor]
        size = _ITEM_BYTES[t.dtype]
        return t.offset + segment.start * size, t.offset + segment.stop * size


def partition(layout: Layout, servers: int) -> tuple[tuple[Slice, ...], ...]:
    """Deal slices to servers, balanced by bytes: largest first, always to the emptiest server."""
    shards: list[list[Slice]] = [[] for _ in range(servers)]
    load = [0] * servers
    for s in sorted(layout.slices, key=lambda s: (-s.nbytes, s.index)):
        emptiest = load.index(min(load))
        shards[emptiest].append(s)
        load[emptiest] += s.nbytes
    return tuple(tuple(sorted(shard, key=lambda s: s.index)) for shard in shards)


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def _cut(tensors: Sequence[TensorInfo], limit: int, whole: bool) -> Iterable[Slice]:
    """Cut the space into slices: small tensors share one, large ones are split."""
    count = 0
    segments: list[Segment] = []
    start = stop = 0

    def close() -> Iterable[Slice]:
        nonlocal count, segments
        if segments:
            t = tensors[segments[0].tensor]
            yield Slice(
                index=count, dtype=t.dtype, group=t.group, start=start, stop=stop, segments=tuple(segments)
            )
            count += 1
            segments = []

    for i, t in enumerate(tensors):
        item = _ITEM_BYTES[t.dtype]
        fits = segments and t.offset + t.nbytes - start <= limit
        if segments:
            first = tensors[segments[0].tensor]
            if not fits or (first.dtype, first.group) != (t.dtype, t.group):
                yield from close()
        piece = t.numel if whole else max(_CUT, limit // item // _CUT * _CUT)
        for a in range(0, t.numel, piece):
            b = min(a + piece, t.numel)
            if a:
                yield from close()
            if not segments:
                start = t.offset + a * item
            segments.append(Segment(i, a, b))
            stop = t.offset + b * item
    yield from close()
