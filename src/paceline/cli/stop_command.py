"""paceline stop: end a run that is going on, in order."""

import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import parameters

if TYPE_CHECKING:
    from paceline.control.rundir import RunDirectory

__all__ = ["stop"]

_ANSWER_S = 60.0
_POLL_S = 0.2
_SILENT_S = 10.0
"""A controller writes its status every second: one that has not for so long hangs."""


def stop(
    run: Annotated[str, parameters.RUN],
    now: Annotated[
        bool, typer.Option("--now", help="Do not write a checkpoint first.", show_default=False)
    ] = False,
) -> None:
    """Stop a run that is going on: a checkpoint is written, then every process ends.

    [b]paceline resume[/b] goes on from there. Ctrl-C ends only the waiting: the run stops all the same.

    [dim]paceline stop last[/dim]
    """
    from paceline.control import Requests, find_run
    from paceline.exceptions import DeadlineError, LinkError

    found = find_run(run)
    if not found.alive():
        typer.echo(_already(found))
        return
    before = found.read_status()
    try:
        body = {"kind": "stop", "now": now}
        Requests(found.path).ask(body, alive=found.alive, within_s=_ANSWER_S)
        said = ""
        # The state is written first; then processes end, and the report is written.
        while found.alive() or found.lock.held():
            text = waiting_for(found.read_status(), time.time())
            if text != said:
                typer.echo(f"Run {found.id}: {text}")
                said = text
            time.sleep(_POLL_S)
    except LinkError:
        pass  # it ended by itself, or its controller died, before it could answer
    except DeadlineError as error:
        raise DeadlineError(
            f"run {found.id} was asked to stop, and {error}. It may hang: `kill -9 {found.controller_pid()}` "
            "ends its controller; another one takes over, and can be asked again"
        ) from None
    except KeyboardInterrupt:
        typer.echo(f"Run {found.id} goes on stopping. `paceline top {found.id}` shows it.")
        return
    _tell(found, before)


def waiting_for(status: dict[str, Any], now: float) -> str:
    """What a run that was asked to stop is at, in words.

    Args:
        status: its status.json.
        now: Unix time.
    """
    try:
        silent = now - datetime.fromisoformat(str(status.get("updated"))).timestamp()
    except ValueError:
        silent = 0.0
    if silent > _SILENT_S:
        pid = (status.get("controller") or {}).get("pid")
        return (
            f"its controller (process {pid}) has written nothing for more than {_SILENT_S:g} s: it is being "
            "replaced, or hangs"
        )
    state = status.get("state")
    if state == "finishing":
        return "its scripts have ended already; its last checkpoint is written"
    if state != "stopping":
        return "its processes end, and its report is written"
    if not (saving := status.get("saving")):
        return "workers finish the step that they are at, then a checkpoint is written"
    from paceline.observe import words

    return f"a checkpoint of {words.size(int(saving[1]))} is written"


def _already(run: "RunDirectory") -> str:
    """What to say of a run that nobody runs."""
    status, state = run.read_status(), run.state()
    if state != "crashed":
        how = "was stopped" if state == "stopped" else state
        return f"Run {run.id} has ended already: it {how} at update {int(status.get('version', 0)):,}."
    return (
        f"Run {run.id} has crashed: its controller (process {run.controller_pid()}) died, and nobody runs "
        f"it, so there is nothing to stop. {_how_to_go_on(run)}"
    )


def _tell(run: "RunDirectory", before: dict[str, Any]) -> None:
    """How it ended."""
    status, state = run.read_status(), run.state()
    version = int(status.get("version", 0))
    if state == "stopped":
        typer.echo(f"Run {run.id} stopped at update {version:,}. {_how_to_go_on(run)}")
        # What became of the checkpoint, if there is none of now.
        old = len(before.get("messages") or ())
        for text in (status.get("messages") or ())[old:]:
            if text.startswith(("no checkpoint", "stopped without")):
                parameters.note(text)
    elif state == "crashed":
        typer.echo(_already(run))
        raise typer.Exit(1)
    elif state == "failed":
        error = str(status.get("error") or "").partition("\n")[0]
        parameters.complain(f"run {run.id} failed before it could stop: {error}")
        raise typer.Exit(1)
    else:
        typer.echo(f"Run {run.id} {state} before it had to stop, at update {version:,}.")


def _how_to_go_on(run: "RunDirectory") -> str:
    there = sorted(path.name for path in run.checkpoints_path.glob("version-*") if not path.suffix)
    if not there:
        return "It has no checkpoint to go on from."
    return f"Its last checkpoint is {there[-1]}: `paceline resume {run.id}` goes on there."
