"""What a user asks for: a program, its resources, a mode.

Every setting is declared here once, with all that follows from it (`option.py`): the flag and its help, the
check, the default, the commands and roles that get it. The command line, job files, `paceline.fit` and
`run.json` all make the same Job, so a setting is checked in one place and its message is the same
everywhere. What only a machine can refuse (a script that is not there) is the plan's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from paceline.comm.compression import COMPRESSION_FORMS, parse_compression
from paceline.comm.transfer import Transfer
from paceline.core.local_spec import LOCAL_FORMS, parse_local
from paceline.core.modes import parse_mode, parse_schedule
from paceline.core.modes.presets import HINTS
from paceline.core.pipeline_spec import PIPELINE_SCHEDULES, PipelineSpec, parse_pipeline
from paceline.exceptions import UsageError
from paceline.plan.amounts import seconds
from paceline.plan.checks import (
    all_of_form,
    host_and_port,
    in_one_form,
    one_of,
    path,
    positive,
    strings,
    true_or_false,
    whole_number,
)
from paceline.plan.devices import SERVER_DEVICES, check_device
from paceline.plan.host_settings import PLACEMENTS
from paceline.plan.job_name import name_of
from paceline.plan.option import (
    COMMUNICATION,
    CONSISTENCY,
    EVERY_COMMAND,
    FAULTS,
    NEW_RUNS,
    ONE_NEW_RUN,
    ONE_RUN,
    PROCESSES,
    Option,
    ends_early,
    for_servers,
    in_worker,
    option,
    options_of,
    over_hosts,
)
from paceline.plan.rules import check_job

__all__ = ["JOB_OPTIONS", "LINKS", "Job"]

LINKS = ("auto", "shm", "tcp")
_BUDGET = "use the budget"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job. Checked when it is made; immutable; `dataclasses.replace` checks again.

    Raises:
        UsageError: naming the setting, its value and what to do, for the first setting that is
            wrong by itself.
    """

    script: str | None = option(None, check=path, not_in_grid="name one script")
    """Path of the script to train with; None when `paceline.fit` started the run."""

    module: bool = option(
        False,
        check=true_or_false,
        flags=("-m",),
        help="The script is a module's name, as with python -m: [b]run -m package.train --lr 0.1[/b].",
        commands=NEW_RUNS,
        roles=("worker",),
        not_in_grid="name one script",
    )
    """`script` is the name of a module, to be run as `python -m` does."""

    args: tuple[str, ...] = option((), check=strings, not_in_grid="use arg:NAME=…", roles=("worker",))
    """The script's own arguments, as in `sys.argv[1:]`."""

    workers: int = option(
        2,
        check=whole_number(1, "a run needs somebody to compute gradients"),
        flags=("-n", "--nproc-per-node"),
        metavar="N",
        help="Processes that compute gradients.",
        panel=PROCESSES,
        commands=EVERY_COMMAND,
    )
    """How many processes compute gradients."""

    servers: int = option(
        1,
        check=whole_number(1, "a run needs somebody to hold the parameters"),
        flags=("-s",),
        metavar="N",
        help="Processes that hold the parameters.",
        panel=PROCESSES,
        commands=EVERY_COMMAND,
    )
    """How many processes hold the parameters. On one machine one is enough: it uses every core."""

    hosts: int = over_hosts(
        1,
        check=whole_number(1, "1 is this host alone"),
        flags=("--hosts", "--nnodes"),
        metavar="N",
        help="Run on N hosts: this one, and others that join with [b]paceline agent[/b].",
    )
    """Number of hosts: this one, and others on which `paceline agent` is started (docs/hosts.md)."""

    listen: str | None = over_hosts(
        None,
        check=host_and_port,
        metavar="HOST:PORT",
        help="With --hosts: where the others join.",
    )
    """Address of this host, and port, at which the other hosts join."""

    placement: str = over_hosts(
        "round-robin",
        check=one_of(PLACEMENTS),
        metavar="|".join(PLACEMENTS),
        help="With --hosts: ranks are dealt out to the hosts in turn, or each host gets ranks in a row.",
    )
    """How servers and workers are dealt out to the hosts: `round-robin` (rank 0 here, rank 1 on the next, …)
    or `blocks` (the first ranks here, the next ones on the next host, …)."""

    groups: int | None = option(
        None,
        check=whole_number(1, "leave it out for one group a host"),
        metavar="N",
        help="With --mode hybrid:MODE: groups of workers that all-reduce. [dim]Default: one a host.[/dim]",
        panel=PROCESSES,
        commands=EVERY_COMMAND,
    )
    """Mode `hybrid:…`: into how many groups of consecutive ranks the workers are dealt, as evenly as can be.
    None makes one group a host."""

    threads: int | None = option(
        None,
        check=whole_number(1, "leave it out to share the cores out evenly"),
        metavar="N",
        help="CPU threads of each worker. [dim]Default: $OMP_NUM_THREADS, or cores / workers.[/dim]",
        panel=PROCESSES,
        commands=EVERY_COMMAND,
    )
    """CPU threads of each worker; None takes OMP_NUM_THREADS if it is set, and shares the cores out evenly
    otherwise."""

    pin: bool = in_worker(
        False,
        check=true_or_false,
        help="Keep each worker on CPU cores of its own, as many as it has threads.",
    )
    """Keep each worker on CPU cores of its own, as many as it has threads (Linux). The kernel then cannot
    move two workers to one core. Turn it on when workers have the machine to themselves and step times
    vary."""

    local: str = in_worker(
        "none",
        check=in_one_form(parse_local),
        metavar="|".join(LOCAL_FORMS),
        help="Compute each batch in K parts, side by side, inside every worker.",
    )
    """How a worker computes a batch: as it is, or in K parts, each on a replica of the model in a thread or a
    process of its own. Loss and gradients are those of the whole batch (docs/parallelism.md)."""

    pipeline: int = in_worker(
        1,
        check=whole_number(1, "number of stages; 1 leaves models in one piece"),
        metavar="K",
        help="Cut models into K stages, each in a process of its own, inside every worker.",
    )
    """Number of stages that a worker cuts its models into, each a process (docs/parallelism.md)."""

    microbatches: int | None = in_worker(
        None,
        check=whole_number(1, "leave it out for 4 for each stage"),
        metavar="M",
        help="With --pipeline: cut a batch into M micro-batches. [dim]Default: 4 for each stage.[/dim]",
    )
    """Number of micro-batches of a batch, as equal as can be; a batch with fewer samples has one for each.
    Raise it while stages wait for each other, (K - 1) / (M + K - 1) of the time. None: 4 for each stage."""

    pipeline_schedule: str = in_worker(
        "auto",
        check=one_of(PIPELINE_SCHEDULES),
        metavar="|".join(PIPELINE_SCHEDULES),
        help="With --pipeline: all forward passes first, or one forward, one backward.",
    )
    """`gpipe` computes all forward passes of a batch first; `1f1b` goes backward as soon as it can, so it
    holds K micro-batches, not M, and needs `paceline.loss_of`. `auto`: 1f1b where the script calls that."""

    split_at: tuple[str, ...] = in_worker(
        (),
        check=strings,
        metavar="MODULE",
        help="With --pipeline: begin the next stage with this module (layer2.0). Can be repeated. "
        "[dim]Default: cut by measured cost.[/dim]",
    )
    """The modules that stages begin with, from the second stage on, in the order of the model's calls. Empty:
    the model is measured, and cut so that its slowest stage is as fast as it can be."""

    device: str | None = option(
        None,
        check=check_device,
        metavar="cpu|cuda",
        help="Put models, and batches of prepared loaders, there. [dim]Default: where the script puts "
        "them.[/dim]",
        panel=PROCESSES,
        commands=EVERY_COMMAND,
        roles=("server", "worker"),
    )
    """Where prepare() puts models, and prepared loaders put their batches: `cpu`, `cuda` or `cuda:N`. `cuda`
    deals the host's GPUs out to the workers, one each in turn. None leaves both where the script has them."""

    server_device: str = option(
        "auto",
        check=one_of(SERVER_DEVICES),
        metavar="|".join(SERVER_DEVICES),
        help="Where servers keep the parameters: on the models' GPU if that can be, or in host memory.",
        panel=PROCESSES,
        commands=EVERY_COMMAND,
        roles=("server",),
    )
    """Where servers keep the parameters: `auto` is the GPU that the models are on, if mode, options and
    memory allow it; `cpu` is host memory; `cuda` refuses to run elsewhere than on the GPU."""

    mps: bool = option(
        True,
        check=true_or_false,
        flags=("--mps/--no-mps",),
        help="With --device cuda: let the processes of the run share each GPU by NVIDIA MPS, if it is there.",
        panel=PROCESSES,
        commands=EVERY_COMMAND,
    )
    """With `device=cuda`: start NVIDIA's Multi-Process Service for the run, if this host has it, and stop it
    with the run. Processes then use a GPU at the same time instead of in turn. Turn it off where one worker's
    illegal access to GPU memory must not end the others."""

    link: str = in_worker(
        "auto",
        check=one_of(LINKS),
        metavar="|".join(LINKS),
        help="How gradients and parameters travel.",
    )
    """How gradients and parameters travel: `shm` (shared memory), `tcp`, or `auto`, which is shared
    memory on one host and TCP otherwise."""

    tls: bool = option(
        False,
        check=true_or_false,
        help="Encrypt TCP links; both sides show a certificate of this run, made for it. See [b]certs[/b].",
        panel=PROCESSES,
        commands=EVERY_COMMAND,
    )
    """Encrypt TCP links between roles, and have both sides show a certificate of this run and of their role
    (TLS 1.3). Roles on one host meet on unix sockets, which need none; `link=tcp` makes them use TCP."""

    certs: str | None = option(
        None,
        check=path,
        metavar="DIR",
        help="The same with certificates made beforehand by [b]paceline certs[/b] DIR.",
        panel=PROCESSES,
        commands=EVERY_COMMAND,
    )
    """Directory of certificates made by `paceline certs`; implies `tls`. None makes new ones for the run."""

    mode: str = option(
        "bsp",
        check=in_one_form(parse_mode),
        metavar="MODE",
        help=f"Who waits for whom: {', '.join(HINTS[:4])}; {', '.join(HINTS[4:])}.",
        panel=CONSISTENCY,
        commands=EVERY_COMMAND,
    )
    """Who waits for whom: `bsp`, `backup:B`, `ssp:S`, `asp`, … (docs/modes.md). Kept in this form, so `"-1"`
    (asp in Angel and Hetu) reads back as `"asp"`."""

    schedule: tuple[str, ...] = option(
        (),
        check=strings,
        metavar="N=MODE",
        help="Go on in MODE from the N-th update. Can be repeated.",
        panel=CONSISTENCY,
        commands=NEW_RUNS,
        roles=("server",),
    )
    """Modes that the run goes through by itself: `500=ssp:4` goes on in ssp:4 from the 500th update."""

    guard: bool = option(
        False,
        check=true_or_false,
        help="When the logged loss diverges and staleness explains it, go back to a good checkpoint, and on "
        "in a tighter mode.",
        panel=CONSISTENCY,
        commands=NEW_RUNS,
    )
    """When the loss that the script logs diverges and staleness explains it, go back to a good checkpoint,
    and on in a tighter mode."""

    compress: str = option(
        "none",
        check=in_one_form(parse_compression),
        metavar="HOW",
        help=f"How gradients are written: {', '.join(COMPRESSION_FORMS)}.",
        panel=COMMUNICATION,
        commands=EVERY_COMMAND,
        roles=("worker",),
    )
    """How gradients are written for the way to the servers (`COMPRESSION_FORMS`). For slow networks; on one
    host it only costs time."""

    compress_replies: bool = option(
        False,
        check=true_or_false,
        help="Compress parameters on their way back, too.",
        panel=COMMUNICATION,
        commands=NEW_RUNS,
        roles=("worker",),
    )
    """Compress parameters on their way back in the same way, as differences to what the worker has."""

    overlap: bool = option(
        False,
        check=true_or_false,
        help="Send gradients during backward; wait for parameters module by module.",
        panel=COMMUNICATION,
        commands=NEW_RUNS,
        roles=("worker",),
    )
    """Send gradients during backward, and let each module wait for its own parameters in the next forward.
    The results are the same. For links that take long enough to be worth hiding."""

    prefetch: int = option(
        0,
        check=whole_number(0, "0 waits for every reply"),
        metavar="K",
        help="Await the reply to a push K steps later (modes without rounds).",
        panel=COMMUNICATION,
        commands=EVERY_COMMAND,
        roles=("worker",),
    )
    """Await the reply to a push this number of steps later (modes without rounds). Raise it until the
    reported idleness is low; it adds about as much staleness."""

    clip_norm: float | None = option(
        None,
        check=positive("leave it out to clip nothing"),
        metavar="X",
        help="Clip the averaged gradient to this norm (bsp only).",
        panel=CONSISTENCY,
        commands=EVERY_COMMAND,
        roles=("server",),
    )
    """Scale the averaged gradient down to this norm before each update. Only in bsp, where one
    update is one average; in other modes clip in the script, which clips each worker's own."""

    norm_bound: float | None = option(
        None,
        check=positive(
            "how many times the usual norm is refused",
            least=10,
            too_small="ordinary gradients differ that much. Give at least 10; 1000 lets every loss spike "
            "through",
        ),
        metavar="X",
        help="Refuse gradients over X times the usual norm; replace a worker that sends only such.",
        panel=FAULTS,
        commands=EVERY_COMMAND,
        roles=("server",),
    )
    """Refuse a push whose norm is more than this many times the median of the run's last hundred, and replace
    a worker that sends such ones only. None refuses only what is not finite. Take 1,000: a loss spike is a
    factor of ten or so, a broken batch or device one of millions. Off unless asked for, because where a
    model has fitted its data to the last digit, one hard sample may well be a thousand times the rest."""

    seed: int = option(
        0,
        check=whole_number(0, "any whole number from 0 to 2**63 - 1 will do", below=2**63, limit="2**63"),
        metavar="N",
        help="Of the order of samples and the workers' random numbers.",
        panel=CONSISTENCY,
        commands=NEW_RUNS,
        roles=("worker",),
        not_in_grid="use seeds",
    )
    """Of the order of the samples in each epoch."""

    optimizers: tuple[str, ...] = option(
        (),
        check=all_of_form(
            r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*",
            "module:Class, as in my_package.optim:Lamb. torch.optim's own need not be named",
        ),
        flags=("--optimizer",),
        metavar="MODULE:CLASS",
        help="Allow an optimizer that is not in torch.optim. Can be repeated.",
        panel=CONSISTENCY,
        commands=EVERY_COMMAND,
        roles=("server", "worker"),
    )
    """Optimizers beyond torch.optim that the script may use, as `module:Class`."""

    deadline_s: float = option(
        300.0,
        check=positive("seconds to wait before giving up"),
        flags=("--deadline",),
        metavar="SECONDS",
        help="How long anybody waits for anybody before the run fails.",
        panel=FAULTS,
        commands=EVERY_COMMAND,
        roles=("server", "worker"),
    )
    """How long a role waits for another one before the run fails with the name of the missing role.
    Raise it when a message says that a role did not answer and that role was only slow."""

    eval_every: int | None = option(
        None,
        check=whole_number(0, "0 for no evaluation; leave it out for the script's own interval"),
        metavar="N",
        help="Evaluate every N updates with the script's @paceline.evaluation, in a process beside the "
        "workers. 0: do not.",
        panel=FAULTS,
        commands=EVERY_COMMAND,
        roles=("worker",),
    )
    """Updates between two evaluations, in place of the interval in the script. None: the script's."""

    max_time_s: float | None = option(
        None,
        check=positive("seconds until the run ends early"),
        flags=("--max-time",),
        metavar="DURATION",
        parse=seconds("--max-time"),
        help="End the run early and in order after this long: 90s, 30m, 2h, 1h30m.",
        panel=FAULTS,
        commands=ONE_RUN,
        not_in_grid=_BUDGET,
    )
    """End the run early, in order, this many seconds after its start (a resumed run starts anew): workers
    make their last step, scripts go on behind their loops, the last checkpoint is written. None: no limit."""

    max_updates: int | None = ends_early(
        None,
        check=whole_number(1, "leave it out for no limit"),
        metavar="N",
        help="End the run early and in order after N updates.",
    )
    """End the run early, in order, after this many updates of the model, those before a resume included."""

    max_samples: int | None = ends_early(
        None,
        check=whole_number(1, "leave it out for no limit"),
        metavar="N",
        help="End the run early and in order once it has trained on N samples.",
    )
    """End the run early, in order, with the update that makes it this many samples, resumed ones included."""

    max_restarts: int = option(
        3,
        check=whole_number(0, "0 fails at the first dead worker"),
        metavar="N",
        help="How many dead roles are replaced before the run fails.",
        panel=FAULTS,
        commands=EVERY_COMMAND,
    )
    """How many dead roles are replaced in a run before it fails."""

    replicas: int = for_servers(
        0,
        check=whole_number(0, "0 keeps no copies"),
        metavar="N",
        help="So many other servers hold a copy of every parameter, and go on when one dies.",
    )
    """Number of other servers that hold a copy of every parameter. When a server dies, one that holds copies
    goes on in its place; without replicas the run goes back to its last checkpoint."""

    checkpoint_every: int = for_servers(
        0,
        check=whole_number(0, "0 saves only at the end"),
        metavar="N",
        help="Save every N updates; 0 saves only at the end.",
    )
    """Write a checkpoint after every this many updates; 0 writes only the one at the end."""

    keep_checkpoints: int = for_servers(
        3,
        check=whole_number(1, "the last one always stays"),
        metavar="N",
        help="How many checkpoints stay.",
    )
    """How many checkpoints stay; older ones are deleted. At least 2 leave one to fall back on."""

    records_mb: int = option(
        500,
        check=whole_number(1, "pushes and metrics are thinned to fit"),
        metavar="MB",
        help="Megabytes for the records of pushes and metrics; later ones are thinned to fit.",
        panel=FAULTS,
        commands=NEW_RUNS,
        roles=("server",),
    )
    """Megabytes that the records of pushes and metrics may take in the run directory, beside checkpoints and
    logs. What is over that is thinned: of later pushes every 8th is recorded, then every 64th, and so on."""

    run_dir: str | None = option(
        None,
        check=path,
        metavar="DIR",
        help="Directory for this run. [dim]Default: a new one in $PACELINE_RUNS or ~/.paceline/runs.[/dim]",
        commands=ONE_NEW_RUN,
        not_in_grid="a study chooses it",
    )
    """Directory for this run; None makes one in $PACELINE_RUNS or ~/.paceline/runs."""

    spans: bool = option(
        True,
        check=true_or_false,
        flags=("--spans/--no-spans",),
        help="Record what every role does, for reports and traces.",
        commands=NEW_RUNS,
    )
    """Record what every role does, from when to when (`paceline report`, `paceline trace`)."""

    torchrun_env: bool = option(
        True,
        check=true_or_false,
        flags=("--torchrun-env/--no-torchrun-env",),
        help="Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for the script, as torchrun "
        "does.",
        commands=NEW_RUNS,
    )
    """Set the variables that torchrun sets for every worker (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT, …). Turn it off for a script that goes into a branch for DDP where it sees them."""

    def __post_init__(self) -> None:
        for each in JOB_OPTIONS:
            self._set(each.name, each.checked(getattr(self, each.name)))
        turns = parse_schedule(parse_mode(self.mode), self.schedule).turns
        self._set("schedule", tuple(f"{version}={turn}" for version, turn in turns))
        self._set("tls", self.tls or self.certs is not None or self.hosts > 1)
        _ = self.transfer, self.stages  # they check themselves
        check_job(self)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """A short name for people: the script without its directory and ending, or `fit`."""
        return name_of(self.script, module=self.module)

    @property
    def transfer(self) -> Transfer:
        """How payloads travel."""
        return Transfer(
            compress=parse_compression(self.compress),
            compress_replies=self.compress_replies,
            overlap=self.overlap,
            prefetch=self.prefetch,
        )

    @property
    def stages(self) -> PipelineSpec:
        """How a worker cuts models and batches."""
        return parse_pipeline(self.pipeline, self.microbatches, self.pipeline_schedule, self.split_at)

    def to_json(self) -> dict[str, Any]:
        """As plain data, which `from_json` reads back."""
        return {each.name: _plain(getattr(self, each.name)) for each in JOB_OPTIONS}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """A job from plain data; settings that are missing have their defaults."""
        known = [each.name for each in JOB_OPTIONS]
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise UsageError(
                f"a job has no setting {', '.join(map(repr, unknown))}. Known: {', '.join(known)}"
            )
        return cls(**data)


JOB_OPTIONS: tuple[Option, ...] = options_of(Job)
"""The declarations of all settings, in the order of `--help`."""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
