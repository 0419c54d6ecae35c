"""How payloads travel between a worker and the servers, and which modes that goes with."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.comm.compression import CompressionSpec
from paceline.core.modes import ModeSpec
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
    def leaves_early(self) -> bool:
        """Whether slices leave during backward. Compressed ones do not: a slice that changes afterwards would
        have to be taken back from its encoder."""
        return self.overlap and not self.compresses

    @property
    def inline(self) -> bool:
        """Whether payloads travel on the socket also where memory could be shared."""
        return self.compresses or self.pipelined

    def check(self, mode: ModeSpec) -> None:
        """Raise UsageError if this makes no sense in a mode."""
        for setting, reason in (
            (f"compress={self.compress}", self._no_compression(mode) if self.compresses else None),
            ("overlap", self._no_overlap(mode) if self.overlap else None),
            (f"prefetch={self.prefetch}", self._no_prefetch(mode) if self.prefetch else None),
        ):
            if reason is not None:
                raise UsageError(f"{setting} in mode {mode}: {reason}")

    def _no_compression(self, mode: ModeSpec) -> str | None:
        if mode.payload == "none":
            return "its workers send no gradients, so there is nothing to compress; leave compress out"
        if mode.payload == "elastic":
            return (
                "its workers send parameters, and parameters are not gradients: what compression leaves out "
                "would be missing from the model; leave compress out, or use a mode that sends gradients"
            )
        if mode.name == "sandblaster":
            return "L-BFGS compares exact gradients; leave compress out"
        if self.compress_replies and mode.damping in ("dc", "gap"):
            return (
                f"damping={mode.damping} compares with the parameters that a worker was sent, and with "
                "compress_replies it has others; leave compress_replies out"
            )
        if self.compress.has_momentum and (mode.outer != "own" or mode.payload == "delta"):
            return (
                "dgc applies the momentum of the script's SGD, and here the servers step with another "
                f"optimizer; use topk:{self.compress.fraction}"
            )
        return None

    def _no_overlap(self, mode: ModeSpec) -> str | None:
        if mode.payload != "gradient":
            return "its workers send nothing that is ready during backward; leave overlap out"
        if mode.inner is not None:
            return "groups reduce the gradient before it is sent; leave overlap out"
        if mode.name == "sandblaster":
            return "the servers step when the batch is evaluated; leave overlap out"
        return None

    def _no_prefetch(self, mode: ModeSpec) -> str | None:
        if mode.spare is not None:
            return (
                "it goes in rounds, whose next gradient is computed from the last reply, so a reply cannot "
                "be awaited later; use ssp:S or asp, or overlap, which hides a part of the wait in rounds too"
            )
        if mode.payload not in ("gradient", "sum"):
            return (
                "its workers go on from what they exchanged, so a reply cannot be awaited later; leave "
                "prefetch out, or make its period longer"
            )
        if mode.inner is not None:
            return "a group goes on from one reply; leave prefetch out"
        if mode.by_epoch:
            return "a push of it fetches nothing, so there is no reply to hide; leave prefetch out"
        if mode.damping in ("dc", "gap"):
            return (
                f"damping={mode.damping} compares with the parameters that a worker was sent last, and with "
                "prefetch it computes from older ones; use damping=staleness or dynsgd"
            )
        return None


def encoded_sizes(body: dict[str, Any], plain: Sequence[int]) -> list[int]:
    """The sizes of encoded slices that a frame announces. FrameError if they are not plausible.

    Args:
        plain: the sizes of the slices as they lie in memory.
    """
    sizes = body.get("sizes")
    if (
        not isinstance(sizes, list)
        or len(sizes) != len(plain)
        # No compression makes a slice much larger: there are a few bytes and positions beside the elements.
        or not all(type(n) is int and 0 < n <= 2 * m + 1024 for n, m in zip(sizes, plain, strict=True))
    ):
        raise FrameError(f"compressed slices of {sizes!r:.80} bytes for {len(plain)} slices")
    return sizes
