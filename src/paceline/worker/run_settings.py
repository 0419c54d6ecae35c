"""What a worker knows about its run before its script begins."""

from dataclasses import dataclass, field

from paceline.comm.faults import Faults
from paceline.comm.transfer import Transfer
from paceline.core.local_spec import LocalSpec
from paceline.core.pipeline_spec import PipelineSpec

__all__ = ["RunSettings"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of the run, and this worker's place in it."""

    rank: int
    local_rank: int = 0
    """Its number among the workers of its host, which decides which GPU it gets."""
    world_size: int
    """Number of workers that the run was planned with."""
    servers: int
    mode: str
    """The mode that the run began with."""
    seed: int
    local: LocalSpec = field(default_factory=LocalSpec)
    """How it computes a batch."""
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    """How it cuts models and batches."""
    deadline_s: float = 300.0
    """How long it waits for processes of its own."""
    device: str | None = None
    """Where prepare() puts models; None: they stay where the script put them."""
    optimizers: tuple[str, ...] = ()
    """Optimizers of other packages that servers may run."""
    transfer: Transfer = field(default_factory=Transfer)
    tells_norms: bool = False
    """The run has a bound on the gradient's norm, which goes with every push."""
    eval_every: int | None = None
    """Updates between two evaluations (0: none), in place of the interval that the script names."""
    faults: Faults = field(default_factory=Faults)
    """Injected faults, for tests."""
