"""How payloads travel between a worker and the servers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.comm.compression import CompressionSpec
from paceline.exceptions import FrameError, UsageError

__all__ = ["Transfer", "encoded_sizes"]

_NONE = CompressionSpec(name="none")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What is done to payloads and when they are waited for."""

    compress: CompressionSpec = field(default=_NONE)
    """How gradients are written."""
    compress_replies: bool = False
    """Parameters come as compressed differences to what the worker has."""
    overlap: bool = False
    """Slices leave during backward, and the next forward waits for them module by module."""
    prefetch: int = 0
    """A reply is awaited so many steps later."""

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise UsageError(
                f"prefetch={self.prefetch} is too small: give at least 0 (steps to go on without)"
            )
        if self.compress_replies and not self.compresses:
            raise UsageError(
                "compress_replies compresses replies in the same way as gradients: say how with compress, as "
                "in compress='qsgd:8'"
            )

    @property
    def compresses(self) -> bool:
        """Whether gradients are written in another way than they lie in memory."""
        return self.compress.name != "none"

    @property
    def replies(self) -> CompressionSpec | None:
        """How parameters are written on their way back, as differences; None: as they are."""
        if not self.compress_replies:
            return None
        # A difference of parameters has no momentum.
        return replace(self.compress, name="topk") if self.compress.has_momentum else self.compress

    @property
    def pipelined(self) -> bool:
        """Whether threads of the worker carry payloads while it computes."""
        return self.overlap or self.prefetch > 0

    @property
    def only_overlaps(self) -> bool:
        """Whether slices travel as they are while the worker computes, and the next step waits for them."""
        return self.overlap and not self.compresses and not self.prefetch

    @property
    def leaves_early(self) -> bool:
        """Whether slices leave during backward. Compressed ones do not: a slice that changes afterwards would
        have to be taken back from its encoder."""
        return self.overlap and not self.compresses

    @property
    def inline(self) -> bool:
        """Whether payloads travel on the socket also where memory could be shared."""
        return self.compresses or self.pipelined


def encoded_sizes(sizes: Sequence[int] | None, plain: Sequence[int]) -> Sequence[int]:
    """The sizes of encoded slices that a message announces. FrameError if they are not plausible.

    Args:
        sizes: None: it announces none.
        plain: the sizes of the slices as they lie in memory.
    """
    if (
        sizes is None
        or len(sizes) != len(plain)
        # No compression makes a slice much larger: there are a few bytes and positions beside the elements.
        or not all(0 < n <= 2 * m + 1024 for n, m in zip(sizes, plain, strict=True))
    ):
        raise FrameError(f"compressed slices of {sizes!r:.80} bytes for {len(plain)} slices")
    return sizes
