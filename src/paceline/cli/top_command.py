"""paceline top: watch a run from another terminal."""

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import note, say

if TYPE_CHECKING:
    from paceline.observe import RunStatus

__all__ = ["top"]

POLL_S = 0.5
OLD_MESSAGES = 3
"""What is shown of those that were there before."""
_ENDINGS = {"succeeded": "succeeded", "failed": "failed", "stopped": "was stopped"}


def top(
    run: Annotated[str, parameters.RUN],
    once: Annotated[bool, typer.Option("--once", help="Show one picture and stop.")] = False,
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Watch a run: every worker's and server's progress, time, bytes, CPU and memory.

    It only looks: Ctrl-C ends it and leaves the run alone.

    [dim]paceline top last[/dim]
    """
    from paceline.api.runs import find_run, run_status
    from paceline.observe import Progress

    found = find_run(run, trust=trust)
    status = run_status(found)
    if once:
        _print(status)
    else:
        old = max(0, len(status.messages) - OLD_MESSAGES)
        with Progress(live=True, stream=sys.stdout) as progress:
            try:
                while True:
                    progress.show(replace(status, messages=status.messages[old:]))
                    if status.ended or status.state == "crashed":
                        break
                    time.sleep(POLL_S)
                    status = run_status(found, status)
            except KeyboardInterrupt:
                progress.close()
                say(f"Run {found.id} goes on.")
                return
    if status.state == "crashed":
        note(
            f"run {found.id} crashed: its controller is gone, and this is what it wrote last. "
            f"`paceline logs {found.id}` shows the logs, `paceline resume {found.id}` goes on from its last "
            "checkpoint"
        )
    elif status.ended:
        say(f"Run {found.id} has ended: it {_ENDINGS[status.state]}.")


def _print(status: "RunStatus") -> None:
    from rich.console import Console

    from paceline.observe.analyse.window import Window
    from paceline.observe.show.display import picture

    console = Console(highlight=False)
    window = Window(1.0)
    window.see(status)
    # Lines scroll, so that all roles are shown.
    height = 100 + len(status.workers) + 4 * len(status.servers)
    console.print(picture(status, window, width=console.width, height=height, full=True))
