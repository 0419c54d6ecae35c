"""ServerConfig: what a server is told when it starts, and the decider that follows from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.comm.frames import field
from paceline.core.decider import Decider
from paceline.core.descent import Descent
from paceline.core.json_types import JsonObject
from paceline.core.leases import LeaseBook
from paceline.core.modes import parse_mode, parse_schedule
from paceline.core.server.lead_settings import LeadSettings
from paceline.exceptions import PlanError
from paceline.params import OptimizerSpec
from paceline.storage.checkpoint import Checkpoint

__all__ = ["ServerConfig", "begin", "book_of", "lead_settings", "new_decider"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a server must know before anybody connects."""

    rank: int
    incarnation: int = 0
    servers: int
    lead: int = 0
    """The server that leads."""
    workers: int
    mode: str
    run_dir: str
    deadline_s: float
    replicas: int = 0
    """Number of other servers that hold a copy of every slice."""
    checkpoint_every: int = 0
    keep_checkpoints: int = 3
    max_updates: int | None = None
    """The run ends early after this many updates."""
    max_samples: int | None = None
    """The run ends early after this many samples."""
    records_mb: int = 500
    """Megabytes that a run's records may have; pushes.csv has half of them."""
    resume: str | None = None
    """Path of the checkpoint to go on from."""
    clip_norm: float | None = None
    norm_bound: float | None = None
    schedule: tuple[str, ...] = ()
    """Modes that the run goes through by itself, as `500=ssp:4`."""
    groups: tuple[Sequence[int], ...] = ()
    """Ranks of the workers that all-reduce among themselves, in the modes that have groups."""
    optimizers: tuple[str, ...] = ()
    """Optimizers beyond torch.optim that workers may ask for."""
    import_from: str | None = None
    """The script's directory, where those optimizers may be, as they are for the script."""
    spans_in: str | None = None
    """Directory for its spans; None records none."""
    clock_ns: int = 0
    """From this host's monotonic clock to the run's time."""
    faults: str = ""
    """On purpose, for tests."""
    host: str = "127.0.0.1"
    """Address to listen at."""
    store: JsonObject | None = None
    """Address of the store that has the run's checkpoints; None: they are in `run_dir`."""
    device: str | None = None
    """Where models are put; `module:function` takes a GPU's place, for tests."""
    server_device: str = "auto"
    """Where parameters are: "auto" (where the models are, if that can be), "cpu" or "cuda"."""
    threads: int = 1
    worker_threads: int = 1
    """Of all workers together."""


def lead_settings(config: ServerConfig) -> LeadSettings:
    """What a leader's decisions depend on."""
    return LeadSettings(
        rank=config.rank,
        workers=config.workers,
        servers=config.servers,
        deadline_s=config.deadline_s,
        replicas=config.replicas,
        clip_norm=config.clip_norm,
        bounds_norms=bool(config.norm_bound),
        checkpoint_every=config.checkpoint_every,
    )


def new_decider(config: ServerConfig) -> Decider:
    """The decider of a run that has no model yet."""
    mode = parse_mode(config.mode)
    schedule = parse_schedule(mode, config.schedule)
    return Decider(
        mode,
        clip_norm=config.clip_norm,
        norm_bound=config.norm_bound,
        schedule=schedule,
        groups=config.groups,
        max_updates=config.max_updates,
        max_samples=config.max_samples,
    )


def begin(
    decider: Decider,
    config: ServerConfig,
    data: JsonObject | None,
    spec: OptimizerSpec,
    checkpoint: Checkpoint | None,
) -> None:
    """The run has a model, and begins, or goes on from a checkpoint.

    Args:
        data: what the model's offer says about the loader; None if there is none.
        spec: the script's optimizers.
    """
    descent = Descent.of(spec.groups[0]) if decider.mode.by_epoch else None
    decider.begin(book_of(config, data), len(spec.groups_of), descent)
    if checkpoint is not None:
        decider.restore(checkpoint.meta["lead"])


def book_of(config: ServerConfig, data: JsonObject | None) -> LeaseBook | None:
    """The leases of a run; None if it has no loader, or one without an end."""
    if data is None or "samples" not in data:
        return None
    mode, samples = parse_mode(config.mode), field(data, "samples", int)
    if samples < config.workers:
        raise PlanError(
            f"{config.workers} workers but only {samples} samples: every worker needs at least one. "
            "Use fewer --workers or more data."
        )
    return LeaseBook(
        samples=samples,
        batch_size=field(data, "batch_size", int),
        drop_last=field(data, "drop_last", bool),
        by_round=mode.by_round,
        copies=mode.copies,
    )
