"""paceline stop: end a run that is going on, in order."""

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import complain, note, say

if TYPE_CHECKING:
    from paceline.api.going_on import RunEnd

__all__ = ["stop"]


def stop(
    run: Annotated[str, parameters.RUN],
    now: Annotated[
        bool, typer.Option("--now", help="Do not write a checkpoint first.", show_default=False)
    ] = False,
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Stop a run that is going on: a checkpoint is written, then every process ends.

    [b]paceline resume[/b] goes on from there. Ctrl-C ends only the waiting: the run stops all the same.

    [dim]paceline stop last[/dim]
    """
    from paceline.api.going_on import run_end, stop_run
    from paceline.api.runs import find_run

    found = find_run(run, trust=trust)
    if not found.alive():
        say(_already(found.id, run_end(found)))
        return
    before = run_end(found)
    try:
        stop_run(found, now=now, tell=lambda text: say(f"Run {found.id}: {text}"))
    except KeyboardInterrupt:
        say(f"Run {found.id} goes on stopping. `paceline top {found.id}` shows it.")
        return
    _tell(found.id, run_end(found), old=len(before.messages))


def _already(run_id: str, end: "RunEnd") -> str:
    """What to say of a run that has ended, or has no controller any more."""
    if end.state != "crashed":
        how = "was stopped" if end.state == "stopped" else end.state
        return f"Run {run_id} has ended already: it {how} at update {end.version:,}."
    return (
        f"Run {run_id} has crashed: its controller (process {end.controller}) died, and nobody runs "
        f"it, so there is nothing to stop. {_how_to_go_on(run_id, end)}"
    )


def _tell(run_id: str, end: "RunEnd", *, old: int) -> None:
    """How it ended. `old`: messages that were there before it was asked to stop."""
    if end.state == "stopped":
        say(f"Run {run_id} stopped at update {end.version:,}. {_how_to_go_on(run_id, end)}")
        # What became of the checkpoint, if there is none of now.
        for text in end.messages[old:]:
            if text.startswith(("no checkpoint", "stopped without")):
                note(text)
    elif end.state == "crashed":
        say(_already(run_id, end))
        raise typer.Exit(1)
    elif end.state == "failed":
        error = end.error.partition("\n")[0]
        complain(f"run {run_id} failed before it could stop: {error}")
        raise typer.Exit(1)
    else:
        say(f"Run {run_id} {end.state} before it had to stop, at update {end.version:,}.")


def _how_to_go_on(run_id: str, end: "RunEnd") -> str:
    if end.checkpoint is None:
        return "It has no checkpoint to go on from."
    return f"Its last checkpoint is {end.checkpoint}: `paceline resume {run_id}` goes on there."
