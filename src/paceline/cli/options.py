"""The options that run, plan and resume share, and how they become a Job."""

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from paceline.cli.amounts import seconds
from paceline.exceptions import UsageError
from paceline.plan import Job

__all__ = [
    "ARGS",
    "CERTS",
    "CHECKPOINT_EVERY",
    "CLIP_NORM",
    "COMPRESS",
    "COMPRESS_REPLIES",
    "DAMPING",
    "DEADLINE",
    "GROUPS",
    "GUARD",
    "KEEP_CHECKPOINTS",
    "LINK",
    "LIVE",
    "MAX_RESTARTS",
    "MAX_SAMPLES",
    "MAX_TIME",
    "MAX_UPDATES",
    "MODE",
    "MODULE",
    "OPTIMIZERS",
    "OUTPUT",
    "OVERLAP",
    "PERIOD",
    "PREFETCH",
    "QUIET",
    "QUORUM",
    "RECORDS_MB",
    "REPLICAS",
    "RUN",
    "RUN_DIR",
    "SCHEDULE",
    "SCRIPT",
    "SEED",
    "SERVERS",
    "SPANS",
    "STALENESS",
    "THREADS",
    "TLS",
    "TORCHRUN_ENV",
    "WORKERS",
    "command_line",
    "complain",
    "complete_run",
    "job_from",
    "note",
    "note_late_flags",
    "settings_from",
]

_PROCESSES = "Processes"
_CONSISTENCY = "Consistency"
_COMMUNICATION = "Hiding communication"
_FAULTS = "Faults and checkpoints"


def complete_run(incomplete: str) -> list[str]:
    """For shells: the ids of runs that begin so."""
    from paceline.control.rundir import list_runs

    found = [run.id for run in list_runs()]
    return [each for each in (*(["last"] if found else []), *found) if each.startswith(incomplete)]


SCRIPT = typer.Argument(
    help="The Python script to train with; or a job file (.yaml) with options, script and arguments.",
    show_default=False,
)
ARGS = typer.Argument(help="The script's own arguments, untouched.", show_default=False)
RUN = typer.Argument(
    help="A run's id, the beginning of one, its directory, or [b]last[/b].",
    show_default=False,
    autocompletion=complete_run,
)
MODULE = typer.Option(
    "--module",
    "-m",
    help="The script is a module's name, as with python -m: [b]run -m package.train --lr 0.1[/b].",
    show_default=False,
)
WORKERS = typer.Option(
    "--workers",
    "-n",
    "--nproc-per-node",
    metavar="N",
    help="Processes that compute gradients.",
    rich_help_panel=_PROCESSES,
)
SERVERS = typer.Option(
    "--servers",
    "-s",
    metavar="N",
    help="Processes that hold the parameters.",
    rich_help_panel=_PROCESSES,
)
GROUPS = typer.Option(
    "--groups",
    metavar="N",
    help="With --mode hybrid:MODE: groups of workers that all-reduce. [dim]Default: one a host.[/dim]",
    show_default=False,
    rich_help_panel=_PROCESSES,
)
THREADS = typer.Option(
    "--threads",
    metavar="N",
    help="CPU threads of each worker. [dim]Default: $OMP_NUM_THREADS, or cores / workers.[/dim]",
    show_default=False,
    rich_help_panel=_PROCESSES,
)
LINK = typer.Option(
    "--link",
    metavar="auto|shm|tcp",
    help="How gradients and parameters travel.",
    rich_help_panel=_PROCESSES,
)
TLS = typer.Option(
    "--tls",
    help="Encrypt TCP links; both sides show a certificate of this run, made for it. See [b]certs[/b].",
    show_default=False,
    rich_help_panel=_PROCESSES,
)
CERTS = typer.Option(
    "--certs",
    metavar="DIR",
    help="The same with certificates made beforehand by [b]paceline certs[/b] DIR.",
    show_default=False,
    rich_help_panel=_PROCESSES,
)
COMPRESS = typer.Option(
    "--compress",
    metavar="HOW",
    help="How gradients are written: fp16, bf16, terngrad, qsgd:B, signsgd, topk:P, dgc:P, sbc:P, "
    "powersgd:R.",
    rich_help_panel=_COMMUNICATION,
)
COMPRESS_REPLIES = typer.Option(
    "--compress-replies",
    help="Compress parameters on their way back, too.",
    show_default=False,
    rich_help_panel=_COMMUNICATION,
)
OVERLAP = typer.Option(
    "--overlap",
    help="Send gradients during backward; wait for parameters module by module.",
    show_default=False,
    rich_help_panel=_COMMUNICATION,
)
PREFETCH = typer.Option(
    "--prefetch",
    metavar="K",
    help="Await the reply to a push K steps later (modes without rounds).",
    rich_help_panel=_COMMUNICATION,
)
MODE = typer.Option(
    "--mode",
    metavar="MODE",
    help="Who waits for whom: bsp, backup:B, ssp:S, asp; downpour:P,F, easgd:T, eamsgd:T, local:H, diloco:H, "
    "hogwild, dogwild, allreduce, hybrid:MODE, sandblaster.",
    rich_help_panel=_CONSISTENCY,
)
SCHEDULE = typer.Option(
    "--schedule",
    metavar="N=MODE",
    help="Go on in MODE from the N-th update. Can be repeated.",
    show_default=False,
    rich_help_panel=_CONSISTENCY,
)
GUARD = typer.Option(
    "--guard",
    help="When the logged loss diverges and staleness explains it, go back to a good checkpoint, and on in a "
    "tighter mode.",
    show_default=False,
    rich_help_panel=_CONSISTENCY,
)
DAMPING = typer.Option(
    "--damping",
    metavar="HOW",
    help="With asp, ssp, downpour: what is done about stale gradients: momentum (unless you say otherwise), "
    "staleness, dynsgd, dc, gap, or none, the papers' plain rule.",
    show_default=False,
    rich_help_panel=_CONSISTENCY,
)
PERIOD = typer.Option(
    "--period",
    metavar="N",
    help="With bsp, backup, ssp, asp: local steps between exchanges.",
    show_default=False,
    rich_help_panel=_CONSISTENCY,
)
QUORUM = typer.Option(
    "--quorum",
    metavar="N",
    help="With asp, ssp: gradients that make one update.",
    show_default=False,
    rich_help_panel=_CONSISTENCY,
)
STALENESS = typer.Option(
    "--staleness",
    metavar="S",
    help="With --mode ssp: the same as --mode ssp:S.",
    show_default=False,
    rich_help_panel=_CONSISTENCY,
)
CLIP_NORM = typer.Option(
    "--clip-norm",
    metavar="X",
    help="Clip the averaged gradient to this norm (bsp only).",
    show_default=False,
    rich_help_panel=_CONSISTENCY,
)
NORM_BOUND = typer.Option(
    "--norm-bound",
    metavar="X",
    help="Refuse gradients over X times the usual norm; replace a worker that sends only such.",
    show_default=False,
    rich_help_panel=_FAULTS,
)
SEED = typer.Option(
    "--seed",
    metavar="N",
    help="Of the order of samples and the workers' random numbers.",
    rich_help_panel=_CONSISTENCY,
)
OPTIMIZERS = typer.Option(
    "--optimizer",
    metavar="MODULE:CLASS",
    help="Allow an optimizer that is not in torch.optim. Can be repeated.",
    show_default=False,
    rich_help_panel=_CONSISTENCY,
)
DEADLINE = typer.Option(
    "--deadline",
    metavar="SECONDS",
    help="How long anybody waits for anybody before the run fails.",
    rich_help_panel=_FAULTS,
)
MAX_RESTARTS = typer.Option(
    "--max-restarts",
    metavar="N",
    help="How many dead roles are replaced before the run fails.",
    rich_help_panel=_FAULTS,
)
MAX_TIME = typer.Option(
    "--max-time",
    metavar="DURATION",
    parser=seconds("--max-time"),
    help="End the run early and in order after this long: 90s, 30m, 2h, 1h30m.",
    show_default=False,
    rich_help_panel=_FAULTS,
)
MAX_UPDATES = typer.Option(
    "--max-updates",
    metavar="N",
    help="End the run early and in order after N updates.",
    show_default=False,
    rich_help_panel=_FAULTS,
)
MAX_SAMPLES = typer.Option(
    "--max-samples",
    metavar="N",
    help="End the run early and in order once it has trained on N samples.",
    show_default=False,
    rich_help_panel=_FAULTS,
)
REPLICAS = typer.Option(
    "--replicas",
    metavar="N",
    help="So many other servers hold a copy of every parameter, and go on when one dies.",
    rich_help_panel=_FAULTS,
)
CHECKPOINT_EVERY = typer.Option(
    "--checkpoint-every",
    metavar="N",
    help="Save every N updates; 0 saves only at the end.",
    rich_help_panel=_FAULTS,
)
KEEP_CHECKPOINTS = typer.Option(
    "--keep-checkpoints",
    metavar="N",
    help="How many checkpoints stay.",
    rich_help_panel=_FAULTS,
)
RECORDS_MB = typer.Option(
    "--records-mb",
    metavar="MB",
    help="Megabytes for the records of pushes and metrics; later ones are thinned to fit.",
    rich_help_panel=_FAULTS,
)
RUN_DIR = typer.Option(
    "--run-dir",
    metavar="DIR",
    help="Directory for this run. [dim]Default: a new one in $PACELINE_RUNS or ~/.paceline/runs.[/dim]",
    show_default=False,
)
SPANS = typer.Option(
    "--spans/--no-spans",
    help="Record what every role does, for reports and traces.",
    show_default=False,
)
TORCHRUN_ENV = typer.Option(
    "--torchrun-env/--no-torchrun-env",
    help="Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for the script, as torchrun does.",
    show_default=False,
)
LIVE = typer.Option(
    "--live",
    help="Show every worker's and server's rates, time, bytes, CPU and memory, not only progress.",
    show_default=False,
)
OUTPUT = typer.Option(
    "--output",
    metavar="worker:N|all",
    help="Whose output is shown; with [b]all[/b], whole lines with the worker's name before them.",
)
QUIET = typer.Option("--quiet", "-q", help="Show only what the script prints, errors and the outcome.")

_PYTHONS = ("python", "python3")


def job_from(params: Mapping[str, Any]) -> Job:
    """The job that a command's parameters ask for."""
    if params["script"] in _PYTHONS:
        raise UsageError(
            f"{params['script']!r} stands where the script goes; leave it out, as in "
            "`paceline run train.py`: Paceline starts Python itself"
        )
    return Job(**settings_from(params))


def settings_from(params: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a command's parameters that are settings of a job and were given."""
    names = [field.name for field in dataclasses.fields(Job)]
    # An option that can be repeated and was not given is empty, not None.
    given = {name: params[name] for name in names if params.get(name) not in (None, (), [])}
    if params.get("staleness") is not None:
        given["mode"] = _with_staleness(given.get("mode"), params["staleness"])
    for knob in ("period", "quorum", "damping"):
        if params.get(knob) is not None:
            given["mode"] = f"{given.get('mode', Job.mode)}+{knob}={params[knob]}"
    return given


def _with_staleness(mode: str | None, staleness: int) -> str:
    if mode is None or mode.strip().lower() != "ssp":
        raise UsageError(
            f"--staleness {staleness} goes with --mode ssp, got --mode {mode}. "
            f"Use --mode ssp:{staleness}, or leave --staleness out"
        )
    return f"ssp:{staleness}"


def note_late_flags(ctx: typer.Context) -> None:
    """Say so if an option of ours stands after the script, where it is the script's.

    Not for those that were also given to us: who writes both knows which is whose.
    """
    ours = {name: param.name for param in ctx.command.params for name in param.opts if name.startswith("--")}
    script, late = ctx.params["script"], []
    for arg in ctx.params["args"] or ():
        flag = arg.partition("=")[0].replace("_", "-")
        param = ours.get(flag)
        if param is not None and flag not in late and not _given(ctx, param):
            late.append(flag)
    for flag in late:
        note(
            f"{flag} stands after {script}, so it goes to the script; "
            f"if it is meant for Paceline, put it before {script}"
        )


def _given(ctx: typer.Context, param: str) -> bool:
    source = ctx.get_parameter_source(param)
    return source is not None and source.name == "COMMANDLINE"


def command_line() -> Sequence[str]:
    """What the user typed, word by word."""
    return ["paceline", *sys.argv[1:]]


def note(text: str) -> None:
    """Tell the user something that is no error."""
    typer.secho(_wrapped(f"note: {text}"), fg="yellow", err=True)


def complain(text: str) -> None:
    """Tell the user what is wrong: the first line stands out, a traceback below it does not."""
    first, _, rest = text.partition("\n")
    typer.secho(_wrapped(f"error: {first}"), fg="red", bold=True, err=True)
    if rest:
        typer.echo(rest, err=True)


def _wrapped(text: str) -> str:
    """Between words where a person reads it; in one line where a program does."""
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
