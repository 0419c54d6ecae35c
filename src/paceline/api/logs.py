"""Reads what a run's roles wrote."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.control.rundir import RunDirectory
from paceline.control.tail import Tail
from paceline.engines.streams import paths_of
from paceline.exceptions import UsageError
from paceline.observe.record.output import Screen, Stream
from paceline.storage.plain_files import check_directory, plain_size, reason_of

__all__ = ["LogLine", "read_logs"]

_POLL_S = 0.2


class LogLine(NamedTuple):
    """One line that a role wrote."""

    role: str
    """`worker:1`."""
    text: str
    alone: bool
    """Whether only this role was asked for."""


def read_logs(
    run: RunDirectory,
    role: str | None = None,
    *,
    follow: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> Iterator[LogLine]:
    """The lines of a run's logs, role by role; of a progress bar, only its last state.

    Args:
        role: `controller`, `server:0`, `worker:1`, or `worker` for all workers; None: all roles.
        follow: go on with what is written from now on, until the run is over.
        warn: told of each file that is not read, because it is a link, a pipe, ….

    Raises:
        UsageError: there is no such role, or it has no log.
    """
    tails: dict[str, Tail] = {}
    screens: dict[tuple[str, Stream], Screen] = {}
    while True:
        # Asked first: what was written before the run ended is then read below.
        alive = follow and run.alive()
        paths = _chosen(run, role, must=not alive)
        for name, path in paths.items():
            alone = role is not None and len(paths) == 1
            if name not in tails:
                _warn_of_strange_files(path, warn)
            tail = tails.setdefault(name, Tail(path))
            while pieces := tail.read():
                for stream, data in pieces:
                    screen = screens.setdefault((name, stream), Screen())
                    for line in [*screen.feed(data), *screen.settled()]:
                        yield LogLine(name, line, alone)
            for screen in [screens[each] for each in screens if each[0] == name and not alive]:
                for line in screen.end():
                    yield LogLine(name, line, alone)
        if not alive:
            return
        time.sleep(_POLL_S)


def _warn_of_strange_files(log: Path, warn: Callable[[str], None]) -> None:
    for path in paths_of(log).values():
        try:
            plain_size(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            warn(f"logs/{path.name} is not read: {reason_of(error)}")


def _chosen(run: RunDirectory, role: str | None, *, must: bool) -> dict[str, Path]:
    try:
        check_directory(run.logs_path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"{run.logs_path} is not read: {reason_of(error)}") from error
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
