"""paceline agent: lend this host to a run that waits on another one."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.printing import say

__all__ = ["agent"]


def agent(
    where: Annotated[
        str,
        typer.Option(
            "--join", metavar="HOST:PORT", help="Where the run listens (--listen).", show_default=False
        ),
    ],
    token: Annotated[
        Path,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Copy of the run's file join-token, readable by you only.",
            show_default=False,
        ),
    ],
    work_dir: Annotated[
        Path | None,
        typer.Option(
            "--work-dir",
            metavar="DIR",
            help="Where roles read and write here. [dim]Default: the directory for temporary files.[/dim]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Join a run with this host, and run servers and workers of it until the run ends.

    [b]paceline run --hosts N --listen HOST:PORT[/b] prints the line to type. The script comes from there;
    data does not. Ctrl-C takes the host out of the run.

    [dim]paceline agent --join 10.0.0.1:7711 --token-file join-token[/dim]
    """
    from paceline.api.host_runs import run_agent

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    say(run_agent(where, token, work_dir=work_dir, tell=lambda text: say(text, err=True)), err=True)
