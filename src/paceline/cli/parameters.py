"""The parameters of commands: the options of a job, as plan declares them, and how they become a Job."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from paceline.cli.printing import note
from paceline.exceptions import UsageError
from paceline.plan import Job
from paceline.plan.job import JOB_OPTIONS
from paceline.plan.job_settings import command_options
from paceline.plan.option import Command, Option

__all__ = [
    "ARGS",
    "LIVE",
    "OUTPUT",
    "QUIET",
    "RUN",
    "SCRIPT",
    "TRUST",
    "command_line",
    "complete_run",
    "job_from",
    "note_late_flags",
    "settings_from",
    "takes_job_options",
]


def complete_run(incomplete: str) -> list[str]:
    """For shells: the ids of runs that begin so."""
    from paceline.api.runs import run_ids

    found = run_ids()
    ids = (*(["last"] if found else []), *found)
    return [each for each in ids if each.startswith(incomplete) and each.isprintable()]


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
TRUST = typer.Option(
    "--trust",
    help="Use the run though it is another user's, who chose what it says and what it starts.",
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


def takes_job_options(command: Command) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a job that it takes. It finds their values in its context.

    In `--help` they stand between the function's own parameters before its `*` and those behind it.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function).parameters.values())
        before = [each for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
        behind = [each for each in own if each.kind is each.KEYWORD_ONLY]
        declared = [_parameter(option, command) for option in command_options(command)]
        everything = [*before, *declared, *behind]
        function.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
        function.__annotations__ = {each.name: each.annotation for each in everything}
        return function

    return decorate


def _parameter(option: Option, command: Command) -> inspect.Parameter:
    """A command's parameter as typer reads it. What `resume` is not given stays as it was."""
    default = None if command == "resume" or option.many else option.default
    kind: Any = list[str] if option.many else option.kind
    declared = typer.Option(
        *option.flags,
        metavar=option.metavar,
        help=option.help,
        show_default=option.shows_default,
        rich_help_panel=option.panel,
        parser=option.parse,
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, declared],
    )


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
    names = [option.name for option in JOB_OPTIONS]
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
