"""LeadSettings: what the leader's decisions depend on, beside the mode."""

from dataclasses import dataclass

__all__ = ["LeadSettings"]


@dataclass(frozen=True, kw_only=True)
class LeadSettings:
    """Settings of a run, as its leader needs them."""

    rank: int
    """Rank of the server."""
    workers: int
    """Number of workers that the run begins with."""
    servers: int
    """Number of servers that the run begins with."""
    deadline_s: float
    """Maximum time that a worker may wait for another process."""
    replicas: int = 0
    """Number of other servers that hold a copy of every slice."""
    clip_norm: float | None = None
    bounds_norms: bool = False
    """Whether pushes with an absurd norm are refused (--norm-bound)."""
    checkpoint_every: int = 0
    """Number of updates between periodic checkpoints; 0: there are none."""

    @property
    def name(self) -> str:
        return f"server:{self.rank}"

    @property
    def replicates(self) -> bool:
        """Whether followers hear of every event, so that they can lead."""
        return self.replicas > 0
