"""The command itself: its subcommands, and what every error looks like."""

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline import __version__
from paceline.cli.agent_command import agent
from paceline.cli.bench_command import bench
from paceline.cli.certs_command import certs
from paceline.cli.compare_command import compare
from paceline.cli.completion_command import COMPLETE_VARIABLE, completion, prepare_completion
from paceline.cli.eval_command import evaluate
from paceline.cli.export_command import export
from paceline.cli.job_file import TakesJobFile
from paceline.cli.logs_command import logs
from paceline.cli.metrics_command import metrics
from paceline.cli.nodes_command import nodes
from paceline.cli.plan_command import plan
from paceline.cli.printing import complain, say
from paceline.cli.remove_command import prune, rm
from paceline.cli.report_command import report
from paceline.cli.resume_command import resume
from paceline.cli.run_command import run
from paceline.cli.runs_command import runs
from paceline.cli.scale_command import scale
from paceline.cli.stop_command import stop
from paceline.cli.study_command import study
from paceline.cli.switch_command import switch
from paceline.cli.top_command import top
from paceline.cli.trace_command import trace
from paceline.exceptions import PacelineError, PlanError, UsageError

__all__ = ["app", "main"]

INTERRUPTED = 130
"""The shell's exit code for a command that Ctrl-C ended."""


class Commands(TyperGroup):
    """Turns our errors into one clear message and an exit code: 2 for what the user can put right
    in the command, 1 for what failed."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            ctx.color = False
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            complain(str(error))
            raise typer.Exit(2 if isinstance(error, UsageError | PlanError) else 1) from None
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(INTERRUPTED) from None


def spelled(word: str) -> str:
    """--max_restarts is --max-restarts: torchrun's documentation has used both. -w was scale's -n."""
    return "n" if word == "w" else word.replace("_", "-")


SPELLING = {"token_normalize_func": spelled}
# What stands after the script is the script's.
BEFORE_SCRIPT = {**SPELLING, "allow_interspersed_args": False}

app = typer.Typer(
    name="paceline",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=TakesJobFile, context_settings=BEFORE_SCRIPT)(run)
app.command(cls=TakesJobFile, context_settings=BEFORE_SCRIPT)(plan)
app.command(cls=TakesJobFile, context_settings=BEFORE_SCRIPT)(study)
app.command(context_settings=SPELLING)(runs)
app.command(context_settings=SPELLING)(logs)
app.command(context_settings=SPELLING)(resume)
app.command(context_settings=SPELLING)(stop)
app.command(context_settings=SPELLING)(switch)
app.command(context_settings=SPELLING)(scale)
app.command(context_settings=SPELLING)(rm)
app.command(context_settings=SPELLING)(prune)
app.command(context_settings=SPELLING)(certs)
app.command(context_settings=SPELLING)(export)
app.command("eval", context_settings=SPELLING)(evaluate)
app.command(context_settings=SPELLING)(agent)
app.command(context_settings=SPELLING)(nodes)
app.command(context_settings=SPELLING)(top)
app.command(context_settings=SPELLING)(report)
app.command(context_settings=SPELLING)(compare)
app.command(context_settings=SPELLING)(trace)
app.command(context_settings=SPELLING)(metrics)
app.command(context_settings=SPELLING)(bench)
app.command(context_settings=SPELLING)(completion)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def paceline(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train any PyTorch model at the consistency you choose.

    [dim]paceline run --workers 4 --servers 2 --mode ssp:3 train.py --lr 0.1[/dim]
    """


def main() -> None:
    """Run the command line; does not return."""
    for stream in (sys.stdout, sys.stderr):
        # Where only ASCII can be written, × and é are written as \xd7 and \xe9, and nothing fails.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    prepare_completion()
    app(prog_name="paceline", complete_var=COMPLETE_VARIABLE)
