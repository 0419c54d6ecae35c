"""paceline logs: what a run's roles wrote."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.exceptions import UsageError

if TYPE_CHECKING:
    from paceline.control.rundir import RunDirectory

__all__ = ["logs"]

POLL_S = 0.2
COLOURS = ("cyan", "green", "magenta", "blue", "yellow")


def logs(
    run: Annotated[str, options.RUN],
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
    """Show the logs of a run's roles.

    [dim]paceline logs last --role worker:1 --follow[/dim]
    """
    from paceline.control.rundir import find_run

    found = find_run(run)
    tails: dict[str, Tail] = {}
    while True:
        # Asked first: what was written before the run ended is then read below.
        alive = follow and found.alive()
        paths = _chosen(found, role, must=not alive)
        for name, path in paths.items():
            tail = tails.setdefault(name, Tail(path))
            for line in tail.lines(to_the_end=not alive):
                _print(name, line, alone=role is not None and len(paths) == 1)
        if not alive:
            return
        time.sleep(POLL_S)


class Tail:
    """Reads what is new in a file, in whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def lines(self, *, to_the_end: bool) -> Iterator[str]:
        """New lines; also a last one without its end if nothing more will come."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                self._position += len(line)
                self._rest += line
                if self._rest.endswith(b"\n"):
                    yield self._take()
        if to_the_end and self._rest:
            yield self._take()

    def _take(self) -> str:
        text, self._rest = self._rest.decode(errors="replace"), b""
        return text.rstrip("\r\n")


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
    typer.echo(typer.style(f"{name:10} │ ", fg=colour) + line)
