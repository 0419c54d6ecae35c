"""paceline scale: more or fewer workers or servers for a run that is going on."""

from typing import Annotated

import typer

from paceline.cli import parameters

__all__ = ["scale"]

_ANSWER_S = 60.0


def scale(
    run: Annotated[str, parameters.RUN],
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="How many workers to go on with.")
    ] = None,
    servers: Annotated[
        int | None, typer.Option("--servers", "-s", help="How many servers to go on with.")
    ] = None,
) -> None:
    """Let workers or servers join or leave a run that is going on; the others do not stop.

    A worker that leaves does so after the step that it is at, and every sample still counts once. A server
    that leaves gives what it holds to the others.

    [dim]paceline scale last --workers 6[/dim]
    """
    from paceline.control import Requests, find_run
    from paceline.exceptions import UsageError

    if workers is None and servers is None:
        raise UsageError("scale to what? Give --workers N, --servers N, or both")
    sizes = {"workers": workers, "servers": servers}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise UsageError(f"--{name} {size}: a run needs at least one; `paceline stop` ends it")
    wanted = " ".join(f"--{name} {size}" for name, size in sizes.items() if size is not None)
    found = find_run(run)
    if not found.alive():
        raise UsageError(
            f"run {found.id} is {found.state()}, so there is nothing to scale; `paceline resume {found.id} "
            f"{wanted}` goes on from its last checkpoint so"
        )
    body = {"kind": "scale", **sizes}
    answer = Requests(found.path).ask(body, alive=found.alive, within_s=_ANSWER_S)
    if answer.get("refused"):
        raise UsageError(f"run {found.id} was not scaled and goes on as it was: {answer['refused']}")
    now = f"{answer['workers']} workers and {answer['servers']} servers"
    typer.echo(f"Run {found.id} goes on with {now} from update {answer['version']}.")
