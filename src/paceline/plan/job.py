"""What a user asks for: a program, its resources, a mode.

The command line, `paceline.fit` and `run.json` all make the same Job, so a setting is checked in
one place and its message is the same everywhere. What only a machine can refuse (a script that is
not there) is the plan's business.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from paceline.comm.compression import parse_compression
from paceline.comm.transfer import Transfer
from paceline.core.modes import parse_mode, parse_schedule
from paceline.exceptions import UsageError
from paceline.storage.names import check_name

__all__ = ["LINKS", "Job"]

LINKS = ("auto", "shm", "tcp")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job. Checked when it is made; immutable; `dataclasses.replace` checks again.

    Raises:
        UsageError: naming the setting, its value and what to do, for the first setting that is
            wrong by itself.
    """

    script: str | None = None
    """Path of the script to train with; None when `paceline.fit` started the run."""

    module: bool = False
    """`script` is the name of a module, to be run as `python -m` does."""

    args: tuple[str, ...] = ()
    """The script's own arguments, as in `sys.argv[1:]`."""

    workers: int = 2
    """How many processes compute gradients."""

    servers: int = 1
    """How many processes hold the parameters. On one machine one is enough: it uses every core."""

    replicas: int = 0
    """So many other servers hold a copy of every parameter. When a server dies, one that holds copies goes on
    in its place; without replicas the run goes back to its last checkpoint."""

    groups: int | None = None
    """Mode `hybrid:…`: into how many groups of consecutive ranks the workers are dealt, as evenly as can be.
    None makes one group a host."""

    mode: str = "bsp"
    """Who waits for whom: `bsp`, `backup:B`, `ssp:S`, `asp`, … (docs/modes.md). Kept in this form, so `"-1"`
    (asp in Angel and Hetu) reads back as `"asp"`."""

    schedule: tuple[str, ...] = ()
    """Modes that the run goes through by itself: `500=ssp:4` goes on in ssp:4 from the 500th update."""

    guard: bool = False
    """When the loss that the script logs diverges and staleness explains it, go back to a good checkpoint,
    and on in a tighter mode."""

    link: str = "auto"
    """How gradients and parameters travel: `shm` (shared memory), `tcp`, or `auto`, which is shared
    memory on one host and TCP otherwise."""

    tls: bool = False
    """Encrypt TCP links between roles, and have both sides show a certificate of this run and of their role
    (TLS 1.3). Roles on one host meet on unix sockets, which need none; `link=tcp` makes them use TCP."""

    certs: str | None = None
    """Directory of certificates made by `paceline certs`; implies `tls`. None makes new ones for the run."""

    compress: str = "none"
    """How gradients are written for the way to the servers: `fp16`, `bf16`, `terngrad`, `qsgd:B`, `signsgd`,
    `topk:P`, `dgc:P`, `sbc:P` or `powersgd:R`. For slow networks; on one host it only costs time."""

    compress_replies: bool = False
    """Compress parameters on their way back in the same way, as differences to what the worker has."""

    overlap: bool = False
    """Send gradients during backward, and let each module wait for its own parameters in the next forward.
    The results are the same. For links that take long enough to be worth hiding."""

    prefetch: int = 0
    """Await the reply to a push so many steps later (modes without rounds). Raise it until the reported
    idleness is low; it adds about as much staleness."""

    seed: int = 0
    """Of the order of the samples in each epoch."""

    deadline_s: float = 300.0
    """How long anybody waits for anybody before the run fails with the name of who is missing.
    Raise it when a message says that somebody did not answer and that role was only slow."""

    checkpoint_every: int = 0
    """Write a checkpoint every so many updates; 0 writes only the one at the end."""

    keep_checkpoints: int = 3
    """How many checkpoints stay; older ones are deleted. At least 2 leave one to fall back on."""

    max_time_s: float | None = None
    """End the run early, in order, this many seconds after its start (a resumed run starts anew): workers
    make their last step, scripts go on behind their loops, the last checkpoint is written. None: no limit."""

    max_updates: int | None = None
    """End the run early, in order, after this many updates of the model, those before a resume included."""

    max_samples: int | None = None
    """End the run early, in order, with the update that makes it this many samples, those before a resume
    included."""

    records_mb: int = 500
    """Megabytes that the records of pushes and metrics may take in the run directory. What is over that is
    thinned: of later pushes only every 8th is recorded, then every 64th, and so on. Checkpoints and logs are
    not counted."""

    max_restarts: int = 3
    """How many dead roles are replaced in a run before it fails."""

    clip_norm: float | None = None
    """Scale the averaged gradient down to this norm before each update. Only in bsp, where one
    update is one average; in other modes clip in the script, which clips each worker's own."""

    norm_bound: float | None = None
    """Refuse a push whose norm is more than so many times the median of the run's last hundred, and replace
    a worker that sends such ones only. None refuses only what is not finite. Take 1,000: a loss spike is a
    factor of ten or so, a broken batch or device one of millions. Off unless asked for, because where a
    model has fitted its data to the last digit, one hard sample may well be a thousand times the rest."""

    optimizers: tuple[str, ...] = ()
    """Optimizers beyond torch.optim that the script may use, as `module:Class`."""

    run_dir: str | None = None
    """Directory for this run; None makes one in $PACELINE_RUNS or ~/.paceline/runs."""

    spans: bool = True
    """Record what every role does, from when to when (`paceline report`, `paceline trace`)."""

    torchrun_env: bool = True
    """Set the variables that torchrun sets for every worker (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT, …). Turn it off for a script that goes into a branch for DDP where it sees them."""

    threads: int | None = None
    """CPU threads of each worker; None takes OMP_NUM_THREADS if it is set, and shares the cores out evenly
    otherwise."""

    def __post_init__(self) -> None:
        # Lists come from JSON, YAML and typer.
        object.__setattr__(self, "args", _strings("args", self.args))
        object.__setattr__(self, "optimizers", _strings("optimizers", self.optimizers))
        object.__setattr__(self, "schedule", _strings("schedule", self.schedule))
        _check_text("script", self.script)
        _check_text("run_dir", self.run_dir)
        _check_text("certs", self.certs)
        _check_count("workers", self.workers, 1, "a run needs somebody to compute gradients")
        _check_count("servers", self.servers, 1, "a run needs somebody to hold the parameters")
        _check_count("replicas", self.replicas, 0, "0 keeps no copies")
        if self.replicas >= self.servers:
            raise UsageError(
                f"replicas={self.replicas} with servers={self.servers}: a copy is of use on another server "
                f"only, so give at least servers={self.replicas + 1}, or fewer replicas"
            )
        if self.groups is not None:
            _check_count("groups", self.groups, 1, "leave it out for one group a host")
        _check_count("seed", self.seed, 0, "any whole number from 0 to 2**63 - 1 will do")
        if self.seed >= 2**63:
            raise UsageError(f"seed={self.seed} is too large: give a number below 2**63")
        _check_count("checkpoint_every", self.checkpoint_every, 0, "0 saves only at the end")
        _check_count("records_mb", self.records_mb, 1, "pushes and metrics are thinned to fit")
        _check_count("keep_checkpoints", self.keep_checkpoints, 1, "the last one always stays")
        if self.max_time_s is not None:
            _check_positive("max_time_s", self.max_time_s, "seconds until the run ends early")
        if self.max_updates is not None:
            _check_count("max_updates", self.max_updates, 1, "leave it out for no limit")
        if self.max_samples is not None:
            _check_count("max_samples", self.max_samples, 1, "leave it out for no limit")
        _check_count("max_restarts", self.max_restarts, 0, "0 fails at the first dead worker")
        if self.threads is not None:
            _check_count("threads", self.threads, 1, "leave it out to share the cores out evenly")
        _check_positive("deadline_s", self.deadline_s, "seconds to wait before giving up")
        if self.clip_norm is not None:
            _check_positive("clip_norm", self.clip_norm, "leave it out to clip nothing")
        if self.norm_bound is not None:
            _check_positive("norm_bound", self.norm_bound, "how many times the usual norm is refused")
            if self.norm_bound < 10:
                raise UsageError(
                    f"norm_bound={self.norm_bound:g} is too small: ordinary gradients differ that much. Give "
                    "at least 10; 1000 lets every loss spike through"
                )
        mode = parse_mode(self.mode)
        object.__setattr__(self, "mode", str(mode))
        turns = parse_schedule(mode, self.schedule).turns
        object.__setattr__(self, "schedule", tuple(f"{version}={turn}" for version, turn in turns))
        if not isinstance(self.guard, bool):
            raise UsageError(f"guard={self.guard!r} is neither True nor False")
        object.__setattr__(self, "compress", str(parse_compression(self.compress)))
        for name in ("module", "tls", "compress_replies", "overlap", "spans", "torchrun_env"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r} is neither True nor False")
        object.__setattr__(self, "tls", self.tls or self.certs is not None)
        _check_count("prefetch", self.prefetch, 0, "0 waits for every reply")
        _ = self.transfer
        if self.link not in LINKS:
            raise UsageError(f"link={self.link!r}: there is no such link. Valid: {', '.join(LINKS)}")
        for name in self.optimizers:
            if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
                raise UsageError(
                    f"optimizers: {name!r} is not of the form module:Class, as in "
                    "my_package.optim:Lamb. torch.optim's own need not be named"
                )

    @property
    def name(self) -> str:
        """A short name for people: the script without its directory and ending, or `fit`."""
        if self.script is None:
            return "fit"
        if self.module:
            return self.script.removesuffix(".__main__").rpartition(".")[2]
        return re.split(r"[/\\]", self.script)[-1].removesuffix(".py") or "script"

    @property
    def transfer(self) -> Transfer:
        """How payloads travel."""
        return Transfer(
            compress=parse_compression(self.compress),
            compress_replies=self.compress_replies,
            overlap=self.overlap,
            prefetch=self.prefetch,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data, which `from_json` reads back."""
        data = dataclasses.asdict(self)
        return data | {name: list(data[name]) for name in ("args", "optimizers", "schedule")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """A job from plain data; settings that are missing have their defaults."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise UsageError(
                f"a job has no setting {', '.join(map(repr, unknown))}. Known: {', '.join(known)}"
            )
        return cls(**data)


def _check_count(name: str, value: object, least: int, advice: str) -> None:
    # True is an int to Python, but "workers: yes" in a YAML file is a mistake.
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{name}={value!r} is not a whole number; {advice}")
    if value < least:
        raise UsageError(f"{name}={value} is too small: give at least {least} ({advice})")


def _check_positive(name: str, value: object, meaning: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UsageError(f"{name}={value!r} is not a number ({meaning})")
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{name}={value:g} is not a finite number above 0 ({meaning})")


def _check_text(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise UsageError(f"{name}={value!r} is not a path")
    if isinstance(value, str):
        check_name(name, value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise UsageError(f"{name}={value!r} is not a list of strings")
    for each in value:
        check_name(name, each)
    return tuple(value)
