"""paceline switch: another mode for a run that is going on."""

from typing import Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import say

__all__ = ["switch"]


def switch(
    run: Annotated[str, parameters.RUN],
    mode: Annotated[str, typer.Argument(help="The mode to go on in.", show_default=False)],
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Switch a run that is going on to another mode, without a restart.

    No sample is lost or repeated. A mode that the run cannot carry is refused, and the run goes on as it was.

    [dim]paceline switch last asp[/dim]
    """
    from paceline.api.going_on import switch_run
    from paceline.api.runs import find_run
    from paceline.core.modes import parse_mode

    parse_mode(mode)  # a text that is no mode's is refused before a run is looked for
    found = find_run(run, trust=trust)
    switched = switch_run(found, mode)
    say(f"Run {found.id} goes on in {switched.mode} from update {switched.version}.")
