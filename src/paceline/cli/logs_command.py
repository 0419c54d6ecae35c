"""paceline logs: what a run's roles wrote."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import parameters
from paceline.exceptions import UsageError
from paceline.observe.output import label

if TYPE_CHECKING:
    from paceline.control.rundir import RunDirectory

__all__ = ["logs"]

POLL_S = 0.2
COLOURS = ("cyan", "green", "magenta", "blue", "yellow")


def logs(
    run: Annotated[str, parameters.RUN],
    role: Annotated[
        str | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="Only this one: controller, server:0, worker:1, or worker for all workers.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
) -> None:
    """Show the logs of a run's roles: what scripts wrote, and what Paceline says of them.

    Of a progress bar, only its last state.

    [dim]paceline logs last --role worker:1 --follow[/dim]
    """
    from paceline.control.rundir import find_run
    from paceline.control.tail import Tail
    from paceline.observe.output import Screen, Stream

    found = find_run(run)
    tails: dict[str, Tail] = {}
    screens: dict[tuple[str, Stream], Screen] = {}
    while True:
        # Asked first: what was written before the run ended is then read below.
        alive = follow and found.alive()
        paths = _chosen(found, role, must=not alive)
        for name, path in paths.items():
            alone = role is not None and len(paths) == 1
            tail = tails.setdefault(name, Tail(path))
            while pieces := tail.read():
                for stream, data in pieces:
                    screen = screens.setdefault((name, stream), Screen())
                    for line in [*screen.feed(data), *screen.settled()]:
                        _print(name, line, alone=alone)
            for screen in [screens[each] for each in screens if each[0] == name and not alive]:
                for line in screen.end():
                    _print(name, line, alone=alone)
        if not alive:
            return
        time.sleep(POLL_S)


def _chosen(run: "RunDirectory", role: str | None, *, must: bool) -> dict[str, Path]:
    there = run.log_paths()
    if role is None:
        return there
    match = re.fullmatch(r"(controller|server|worker)(?:[:-](\d+))?", role.strip().lower())
    if match is None:
        raise UsageError(
            f"--role {role}: there is no such role. Valid: controller, server:N, worker:N, "
            "or server and worker for all of them"
        )
    kind, rank = match.groups()
    wanted = kind if rank is None else f"{kind}:{int(rank)}"
    chosen = {
        name: path
        for name, path in there.items()
        if name == wanted or (rank is None and name.startswith(f"{kind}:"))
    }
    if not chosen and must:
        have = ", ".join(there) or "none yet"
        raise UsageError(f"run {run.id} has no log of {wanted} (--role {role}). It has: {have}")
    return chosen


def _print(name: str, line: str, *, alone: bool) -> None:
    if alone:
        typer.echo(line)
        return
    rank = int(name.partition(":")[2] or 0)
    colour = None if name == "controller" else COLOURS[rank % len(COLOURS)]
    typer.echo(typer.style(label(name), fg=colour) + line)
