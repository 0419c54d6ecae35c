"""How one worker computes a batch: as it is, or in parts, side by side (`--local`). Pure."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from paceline.exceptions import UsageError

__all__ = ["LOCAL_FORMS", "LocalSpec", "parse_local"]

LOCAL_FORMS = ("none", "threads:K", "processes:K")

_MOST = 1024


@dataclass(frozen=True)
class LocalSpec:
    """Which replicas of the model share a batch."""

    kind: Literal["none", "threads", "processes"] = "none"
    count: int = 1
    """Number of replicas, the worker's own one included."""

    def __str__(self) -> str:
        return self.kind if self.kind == "none" else f"{self.kind}:{self.count}"

    @property
    def splits(self) -> bool:
        """Whether a batch is computed in parts at all."""
        return self.count > 1

    def threads_each(self, threads: int) -> int:
        """CPU threads of one replica in a worker that has so many."""
        # A fork inherits OpenMP's pool without its threads, so processes use one each.
        return 1 if self.kind == "processes" and self.splits else max(1, threads // self.count)


def parse_local(value: Any) -> LocalSpec:
    """Read `none`, `threads:K` or `processes:K`.

    Raises:
        UsageError: it is none of these.
    """
    if value == "none":
        return LocalSpec()
    found = re.fullmatch(r"(threads|processes):(\d{1,9})", value) if isinstance(value, str) else None
    if found is None:
        raise UsageError(f"local={value!r}: give {', '.join(LOCAL_FORMS)}, as in threads:2")
    kind, count = found[1], int(found[2])
    if not 1 <= count <= _MOST:
        raise UsageError(
            f"local={kind}:{count}: a batch is split among 1 to {_MOST:,} replicas; give as many as a worker "
            "has cores, or leave local out"
        )
    return LocalSpec("threads" if kind == "threads" else "processes", count)
