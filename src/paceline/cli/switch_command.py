"""paceline switch: another mode for a run that is going on."""

from typing import Annotated

import typer

from paceline.cli import parameters

__all__ = ["switch"]

_ANSWER_S = 60.0


def switch(
    run: Annotated[str, parameters.RUN],
    mode: Annotated[str, typer.Argument(help="The mode to go on in.", show_default=False)],
) -> None:
    """Switch a run that is going on to another mode, without a restart.

    No sample is lost or repeated. A mode that the run cannot carry is refused, and the run goes on as it was.

    [dim]paceline switch last asp[/dim]
    """
    from paceline.control import Requests, find_run
    from paceline.core.modes import parse_mode
    from paceline.exceptions import UsageError

    wanted = parse_mode(mode)
    found = find_run(run)
    if not found.alive():
        raise UsageError(
            f"run {found.id} is {found.state()}, so there is nothing to switch; "
            f"`paceline resume {found.id} --mode {wanted}` goes on from its last checkpoint in {wanted}"
        )
    body = {"kind": "switch", "mode": str(wanted)}
    answer = Requests(found.path).ask(body, alive=found.alive, within_s=_ANSWER_S)
    if answer.get("refused"):
        raise UsageError(f"run {found.id} was not switched and goes on as it was: {answer['refused']}")
    typer.echo(f"Run {found.id} goes on in {answer['mode']} from update {answer['version']}.")
