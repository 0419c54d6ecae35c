"""paceline scale: more or fewer workers for a run that is going on."""

from typing import Annotated

import typer

from paceline.cli import options

__all__ = ["scale"]

_ANSWER_S = 60.0


def scale(
    run: Annotated[str, options.RUN],
    workers: Annotated[int, typer.Option("--workers", "-w", help="How many workers to go on with.")],
) -> None:
    """Let workers join or leave a run that is going on; the others do not stop.

    Who leaves does so after the step that it is at, and every sample still counts once.

    [dim]paceline scale last --workers 6[/dim]
    """
    from paceline.control import Requests, find_run
    from paceline.exceptions import UsageError

    found = find_run(run)
    if not found.alive():
        raise UsageError(
            f"run {found.id} is {found.state()}, so there is nothing to scale; `paceline resume {found.id} "
            f"--workers {workers}` goes on from its last checkpoint with {workers}"
        )
    body = {"kind": "scale", "workers": workers}
    answer = Requests(found.path).ask(body, alive=found.alive, within_s=_ANSWER_S)
    if answer.get("refused"):
        raise UsageError(f"run {found.id} was not scaled and goes on as it was: {answer['refused']}")
    typer.echo(f"Run {found.id} goes on with {answer['workers']} workers from update {answer['version']}.")
