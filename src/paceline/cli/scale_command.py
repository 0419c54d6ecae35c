"""paceline scale: more or fewer workers or servers for a run that is going on."""

from typing import Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import say

__all__ = ["scale"]


def scale(
    run: Annotated[str, parameters.RUN],
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="How many workers to go on with.")
    ] = None,
    servers: Annotated[
        int | None, typer.Option("--servers", "-s", help="How many servers to go on with.")
    ] = None,
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Let workers or servers join or leave a run that is going on; the others do not stop.

    A worker that leaves does so after the step that it is at, and every sample still counts once. A server
    that leaves gives what it holds to the others.

    [dim]paceline scale last --workers 6[/dim]
    """
    from paceline.api.going_on import scale_run
    from paceline.api.runs import find_run
    from paceline.exceptions import UsageError

    if workers is None and servers is None:
        raise UsageError("scale to what? Give --workers N, --servers N, or both")
    for name, size in (("workers", workers), ("servers", servers)):
        if size is not None and size < 1:
            raise UsageError(f"--{name} {size}: a run needs at least one; `paceline stop` ends it")
    found = find_run(run, trust=trust)
    scaled = scale_run(found, workers=workers, servers=servers)
    now = f"{scaled.workers} workers and {scaled.servers} servers"
    say(f"Run {found.id} goes on with {now} from update {scaled.version}.")
