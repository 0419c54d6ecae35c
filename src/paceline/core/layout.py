"""What lies where in the parameter space, cut into slices and dealt to servers.

Tensors are ordered by (dtype, parameter group, forward order), so that a slice has one dtype and
one set of optimizer settings. Every tensor starts on a 64-byte boundary. A large tensor is cut at
multiples of 1,024 elements counted from its own start: torch's vectorised kernels then treat every
element as they would in the whole tensor, which keeps results bitwise equal whatever the cut
(measured, see docs/decisions.md). Optimizers that look at whole tensors get a layout whose slices
never cut one.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from paceline.exceptions import FrameError

__all__ = [
    "ITEM_BYTES",
    "SLICE_BYTES",
    "Layout",
    "Segment",
    "Slice",
    "TensorInfo",
    "is_dense",
    "merge_slices",
    "partition",
]

SLICE_BYTES = 4 << 20
"""A slice is about this large at most: small to pipeline, large to amortise a message."""

_SMALLEST_SLICE_BYTES = 64 << 10
_PAGE_BYTES = 8 * 1024
_ALIGN = 64
_CUT = 1024
_MAX_BYTES = 1 << 44
_MAX_DIMENSIONS = 64
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""The dtypes that can be trained, and the size of an element."""


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
        return self.numel * ITEM_BYTES[self.dtype]


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

    @cached_property
    def tensor_bytes(self) -> int:
        """Of all tensors, without what lies between them in the space."""
        return sum(tensor.nbytes for tensor in self.tensors)

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
        pages = -(-share // _PAGE_BYTES) * _PAGE_BYTES
        limit = min(SLICE_BYTES, max(_SMALLEST_SLICE_BYTES, pages))
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

    def of_groups(self, groups: Collection[int]) -> "Layout":
        """The tensors and slices of some parameter groups, at the same places of the same space.

        It is for views into that space: slices keep their indices, tensors are counted anew.
        """
        kept = [i for i, t in enumerate(self.tensors) if t.group in groups]
        place = {i: at for at, i in enumerate(kept)}
        return replace(
            self,
            tensors=tuple(self.tensors[i] for i in kept),
            slices=tuple(
                replace(s, segments=tuple(replace(g, tensor=place[g.tensor]) for g in s.segments))
                for s in self.slices
                if s.group in groups
            ),
        )

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
        if self.aliases != other.aliases:
            return f"tied weights are {dict(other.aliases)}, expected {dict(self.aliases)}"
        return None if self == other else "the slices are cut differently"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; `from_json` is its inverse."""
        return {
            "tensors": [
                [t.name, list(t.shape), list(t.stride), t.dtype, t.group, t.offset] for t in self.tensors
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
                        name=_text(name),
                        shape=_numbers(shape),
                        stride=_numbers(stride),
                        dtype=_text(dtype),
                        group=_number(group),
                        offset=_number(offset),
                    )
                    for name, shape, stride, dtype, group, offset in data["tensors"]
                ),
                slices=tuple(
                    Slice(
                        index=i,
                        dtype=_text(dtype),
                        group=_number(group),
                        start=_number(start),
                        stop=_number(stop),
                        segments=tuple(Segment(*map(_number, (t, a, b))) for t, a, b in segments),
                    )
                    for i, (dtype, group, start, stop, segments) in enumerate(data["slices"])
                ),
                nbytes=_number(data["nbytes"]),
                whole_tensors=_flag(data["whole_tensors"]),
                aliases=tuple((_text(a), _text(b)) for a, b in data["aliases"]),
            )
            layout._check()
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"not a parameter layout: {error!r:.200}") from error
        return layout

    def _check(self) -> None:
        """Tensors and slices follow one another through the space and fill it. Raises ValueError."""
        end = 0
        for t in self.tensors:
            if t.dtype not in ITEM_BYTES or min(t.shape, default=1) < 1:
                raise ValueError(f"tensor {t.name!r} of {t.dtype} {list(t.shape)}")
            if not is_dense(t.shape, t.stride):
                raise ValueError(f"tensor {t.name!r} {list(t.shape)} with strides {list(t.stride)}")
            if t.offset != end:
                raise ValueError(f"tensor {t.name!r} at byte {t.offset}, expected {end}")
            end = _aligned(end + t.nbytes)
        if not self.tensors or end != self.nbytes or end > _MAX_BYTES:
            raise ValueError(f"a space of {self.nbytes} bytes for {end} bytes of tensors")
        # Slices walk through all tensors in order, so they neither overlap nor leave anything out.
        due = Segment(0, 0, 0)
        for s in self.slices:
            for g in s.segments:
                if (g.tensor, g.start) != (due.tensor, due.stop) or g.tensor == len(self.tensors):
                    raise ValueError(f"slice {s.index} out of order")
                t = self.tensors[g.tensor]
                if not g.start < g.stop <= t.numel or (t.dtype, t.group) != (s.dtype, s.group):
                    raise ValueError(f"slice {s.index}, tensor {t.name!r}")
                whole = g.stop == t.numel
                if not whole and (self.whole_tensors or g is not s.segments[-1]):
                    raise ValueError(f"slice {s.index} cuts tensor {t.name!r}")
                due = Segment(g.tensor + 1, 0, 0) if whole else g
            if not s.segments or (s.start, s.stop) != (
                self.byte_of(s.segments[0])[0],
                self.byte_of(s.segments[-1])[1],
            ):
                raise ValueError(f"slice {s.index} from {s.start} to {s.stop}")
        if due.tensor != len(self.tensors):
            raise ValueError("slices do not cover the space")
        if len(self.index) != len(self.tensors):
            raise ValueError("two tensors of one name")
        if any(a in self.index or b not in self.index for a, b in self.aliases):
            raise ValueError("an alias of no tensor")

    def byte_of(self, segment: Segment) -> tuple[int, int]:
        """First byte and one past the last byte of a segment in the space."""
        t = self.tensors[segment.tensor]
        size = ITEM_BYTES[t.dtype]
        return t.offset + segment.start * size, t.offset + segment.stop * size

    def extents(self, piece: Slice) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Of each segment of a slice: its first element there, its shape and its strides. A part of a tensor
        has lost its shape: it is flat."""
        found = []
        for g in piece.segments:
            t, count = self.tensors[g.tensor], g.stop - g.start
            start = (self.byte_of(g)[0] - piece.start) // ITEM_BYTES[t.dtype]
            whole = count == t.numel
            found.append((start, t.shape if whole else (count,), t.stride if whole else (1,)))
        return found


def partition(layout: Layout, servers: int) -> tuple[tuple[Slice, ...], ...]:
    """Deal slices to servers, balanced by bytes: largest first, always to the emptiest server."""
    shards: list[list[Slice]] = [[] for _ in range(servers)]
    load = [0] * servers
    for s in sorted(layout.slices, key=lambda s: (-s.nbytes, s.index)):
        emptiest = load.index(min(load))
        shards[emptiest].append(s)
        load[emptiest] += s.nbytes
    return tuple(tuple(sorted(shard, key=lambda s: s.index)) for shard in shards)


def merge_slices(slices: Sequence[Slice]) -> list[Slice]:
    """Slices that follow one another in the space as one, as far as they have one dtype and parameter group.
    A merged slice has the index of its first."""
    merged: list[Slice] = []
    before = -1
    for piece in slices:
        follows, before = piece.index == before + 1, piece.index
        last = merged[-1] if merged else piece
        if not merged or not follows or (last.dtype, last.group) != (piece.dtype, piece.group):
            merged.append(piece)
            continue
        segments = list(last.segments)
        for g in piece.segments:
            if segments[-1].tensor == g.tensor:
                segments[-1] = Segment(g.tensor, segments[-1].start, g.stop)
            else:
                segments.append(g)
        merged[-1] = replace(last, stop=piece.stop, segments=tuple(segments))
    return merged


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's elements fill its memory, each place once, in whatever order."""
    expected = 1
    for step, n in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1):
        if step != expected:
            return False
        expected *= n
    return True


def _number(value: Any) -> int:
    """A plain number that fits the largest space."""
    if type(value) is not int or not 0 <= value <= _MAX_BYTES:
        raise ValueError(f"{value!r:.40} is not a size")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > _MAX_DIMENSIONS:
        raise ValueError(f"{values!r:.40} is not a shape")
    return tuple(map(_number, values))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.40} is not true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a name")
    return value


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
        item = ITEM_BYTES[t.dtype]
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
